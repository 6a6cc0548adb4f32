"""Where the packages of hop_tf lie in the source tree, and how its native libraries are built.

Everything else is declared in pyproject.toml. What is built, into hop_tf/ops:

    libhop_tf_kernels.so  ops/kernels: plain C++, no dependency
    hop_tf_ops.so         ops/tensorflow: TensorFlow operations over the kernels. TensorFlow need not be installed:
                          the library is linked to an empty one with TensorFlow's name
    libhop_tf_cuda.so     ops/cuda: the kernels for GPUs, where `nvcc` is on the path

Environment: CXX (the compiler), HOP_TF_REQUIRE_NATIVE=1 (to fail, not to warn, where the first two cannot be built),
HOP_TF_CUDA=0 (leaves the third out), HOP_TF_CUDA=1 (fails without it).
"""

import os
import shutil
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

# `strategies/` and `ops/` are top-level folders of the source tree and subpackages of hop_tf once installed.
_SUBPACKAGES = ("strategies", "ops")

_COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")
_CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
# A library finds those beside it.
_LINK_FLAGS = ["-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
_TENSORFLOW = "libtensorflow_framework.so.2"
_CUDA_ARCHITECTURES = (75, 80, 86, 89, 90)
_CUDA_FLAGS = [
    *("-O3", "-std=c++17", "-shared", "--fmad=false", "-cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden"),
    *("-Xlinker=--exclude-libs,ALL", "--threads=0"),
    *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in _CUDA_ARCHITECTURES),
    f"-gencode=arch=compute_{_CUDA_ARCHITECTURES[-1]},code=compute_{_CUDA_ARCHITECTURES[-1]}",
]


def _packages() -> list[str]:
    packages = find_packages(include=["hop_tf", "hop_tf.*"])
    for name in _SUBPACKAGES:
        packages += [f"hop_tf.{package}" for package in find_packages(include=[name, f"{name}.*"])]
    return packages


def _wants_cuda() -> bool:
    if not any(Path("ops/cuda").glob("*.cu")):
        return False
    choice = os.environ.get("HOP_TF_CUDA")
    return choice == "1" or (choice != "0" and shutil.which("nvcc") is not None)


def _library(name: str, folder: str, pattern: str) -> Extension:
    sources = sorted(str(path) for path in Path("ops", folder).glob(pattern))
    headers = sorted(str(path) for path in Path("ops").rglob("*.h"))
    return Extension(f"hop_tf.ops.{name}", sources, depends=headers)


class _BuildLibraries(build_ext):
    """Builds the libraries with one call of the compiler each."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"  # No Python version in it: the libraries do not know Python.

    def build_extensions(self):
        try:
            super().build_extensions()
        except ExecError as error:
            if os.environ.get("HOP_TF_REQUIRE_NATIVE") == "1":
                raise
            self.extensions.clear()
            self.warn(
                f"hop_tf's native libraries cannot be built: {error}. They are left out, and TensorFlow's own "
                "operations do their work several times slower. HOP_TF_REQUIRE_NATIVE=1 makes this an error."
            )

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        if ext.name.endswith("cuda"):
            self.spawn(["nvcc", *_CUDA_FLAGS, *ext.sources, "-o", str(target)])
        elif ext.name.endswith("kernels"):
            self.spawn([_COMPILER, *_CXX_FLAGS, *ext.sources, "-o", str(target)])
        else:
            self._build_operations(ext.sources, target)

    def _build_operations(self, sources, target):
        libraries = [f"-L{target.parent}", "-lhop_tf_kernels"]
        if _wants_cuda():
            libraries += ["-DHOP_TF_WITH_CUDA", "-lhop_tf_cuda"]
        with tempfile.TemporaryDirectory() as folder:
            stub = os.path.join(folder, _TENSORFLOW)
            self.spawn([_COMPILER, "-shared", "-xc++", os.devnull, f"-Wl,-soname,{_TENSORFLOW}", "-o", stub])
            self.spawn([_COMPILER, *_CXX_FLAGS, *sources, *_LINK_FLAGS, stub, *libraries, "-o", str(target)])


class _PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    packages=_packages(),
    package_dir={f"hop_tf.{name}": name for name in _SUBPACKAGES},
    include_package_data=False,  # The sources of the libraries, which MANIFEST.in lists, are not installed.
    package_data={"": ["*.proto"], "hop_tf": ["py.typed"]},
    ext_modules=[
        _library("libhop_tf_kernels", "kernels", "*.cc"),
        *([_library("libhop_tf_cuda", "cuda", "*.cu")] if _wants_cuda() else []),
        _library("hop_tf_ops", "tensorflow", "*.cc"),
    ],
    cmdclass={"build_ext": _BuildLibraries, "bdist_wheel": _PlatformWheel},
)
