"""The places of hop_tf's packages in the source tree, and the build of its native libraries.

Everything else is declared in pyproject.toml. These libraries are built, into hop_tf/ops:

    libhop_tf_kernels.so  ops/kernels: plain C++, no dependency
    hop_tf_ops.so         ops/tensorflow: TensorFlow operations over the kernels. TensorFlow need not be installed:
                          the library is linked to an empty one with TensorFlow's name
    libhop_tf_cuda.so     ops/cuda: the kernels for GPUs, if `nvcc` is on the path. It is looked for at run time

A library that cannot be built is left out with a warning. Environment: CXX (the compiler), HOP_TF_REQUIRE_NATIVE=1 (to
fail if one of the first two cannot be built), HOP_TF_REQUIRE_CUDA=1 (to fail if the third cannot be built),
HOP_TF_CUDA=0 (to skip the third, which takes minutes).
"""

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

# `strategies/` and `ops/` are top-level folders of the source tree and subpackages of hop_tf once installed.
_SUBPACKAGES = ("strategies", "ops")

# Emulated networks are for the tests, benchmarks and examples of the source tree.
_NOT_PACKED = ("hop_tf.tools.testing.network",)

_COMPILER = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")]
_CXX_FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"),
    *("-Wall", "-Wextra"),
]
# A library finds the others in its folder.
_LINK_FLAGS = ["-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
_TENSORFLOW = "libtensorflow_framework.so.2"
# The build has machine code for these, and PTX of the last one for future devices.
_CUDA_ARCHITECTURES = (75, 80, 86, 89, 90)
_CUDA_FLAGS = [
    "--options-file=ops/cuda/nvcc.options",
    "--threads=0",
    *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in _CUDA_ARCHITECTURES),
    f"-gencode=arch=compute_{_CUDA_ARCHITECTURES[-1]},code=compute_{_CUDA_ARCHITECTURES[-1]}",
]


def _packages() -> list[str]:
    packages = find_packages(include=["hop_tf", "hop_tf.*"], exclude=_NOT_PACKED)
    for name in _SUBPACKAGES:
        packages += [f"hop_tf.{package}" for package in find_packages(include=[name, f"{name}.*"])]
    return packages


def _is_set(variable: str) -> bool:
    return os.environ.get(variable) == "1"


def _library(name: str, folder: str, sources: str, required: bool) -> Extension:
    headers = [str(path) for pattern in ("*.h", "*.cuh") for path in sorted(Path("ops").rglob(pattern))]
    return Extension(
        f"hop_tf.ops.{name}",
        sorted(str(path) for path in Path("ops", folder).glob(sources)),
        depends=[*headers, "ops/cuda/nvcc.options", "setup.py"],
        optional=not required,
    )


def _libraries() -> list[Extension]:
    require_native, require_cuda = _is_set("HOP_TF_REQUIRE_NATIVE"), _is_set("HOP_TF_REQUIRE_CUDA")
    libraries = [_library("libhop_tf_kernels", "kernels", "*.cc", require_native)]
    if require_cuda or (os.environ.get("HOP_TF_CUDA") != "0" and shutil.which("nvcc")):
        libraries.append(_library("libhop_tf_cuda", "cuda", "*.cu", require_cuda))
    return [*libraries, _library("hop_tf_ops", "tensorflow", "*.cc", require_native)]


class _BuildLibraries(build_ext):
    """Builds each library with one call of its compiler."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"  # No Python version in it: the libraries do not know Python.

    def build_extensions(self):
        super().build_extensions()  # Warns of optional libraries that cannot be built.
        missing = [ext for ext in self.extensions if not self._target(ext).exists()]
        if missing:
            names = ", ".join(ext.name for ext in missing)
            self.warn(
                f"{names} could not be built, and hop_tf goes without: TensorFlow's own operations do the work of the "
                "kernels for processors, 10 to 100 times slower, and these that of kernels for GPUs. See above for why."
            )
        for ext in missing if self.editable_mode else ():
            # A library of an earlier build may not fit the sources.
            Path("ops", self._target(ext).name).unlink(missing_ok=True)

    def build_extension(self, ext):
        target = self._target(ext)
        target.parent.mkdir(parents=True, exist_ok=True)
        if ext.name.endswith("hop_tf_ops"):
            self._build_operations(ext, target)
        elif not self._takes_installed(ext, target):
            compiler = ["nvcc", *_CUDA_FLAGS] if ext.name.endswith("cuda") else [*_COMPILER, *_CXX_FLAGS]
            self.spawn([*compiler, *ext.sources, "-o", str(target)])

    def _target(self, ext):
        return Path(self.get_ext_fullpath(ext.name)).absolute()

    def _takes_installed(self, ext, target):
        """Reuses a library of an editable install in the source tree, unless a source is newer. Returns True if so."""
        installed = Path("ops", target.name)
        if not self.editable_mode or newer_group([*ext.sources, *ext.depends], str(installed)):
            return False
        self.copy_file(str(installed), str(target))
        return True

    def _build_operations(self, ext, target):
        libraries = [f"-L{target.parent}", "-lhop_tf_kernels"]
        with tempfile.TemporaryDirectory() as folder:
            stub = os.path.join(folder, _TENSORFLOW)
            self.spawn([*_COMPILER, "-shared", "-xc++", os.devnull, f"-Wl,-soname,{_TENSORFLOW}", "-o", stub])
            self.spawn([*_COMPILER, *_CXX_FLAGS, *ext.sources, *_LINK_FLAGS, stub, *libraries, "-o", str(target)])


class _PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    packages=_packages(),
    package_dir={f"hop_tf.{name}": name for name in _SUBPACKAGES},
    include_package_data=False,  # The sources of the libraries, which MANIFEST.in lists, are not installed.
    package_data={"": ["*.proto"], "hop_tf": ["py.typed"]},
    ext_modules=_libraries(),
    cmdclass={"build_ext": _BuildLibraries, "bdist_wheel": _PlatformWheel},
)
