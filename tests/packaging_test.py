"""The wheel holds what it should, and hop_tf is importable from it and from a bare source tree."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

import pytest
from absl.testing import absltest

from hop_tf.version import __version__

_ROOT = Path(__file__).absolute().parents[1]
_FOLDERS = {"hop_tf": "hop_tf", "hop_tf/strategies": "strategies", "hop_tf/ops": "ops"}
_TIMEOUT_SECONDS = 120
_SOURCES = {".py", ".c", ".cc", ".h", ".json", ".md", ".ipynb", ".png", ".sbatch", ".yaml"}
_NOT_FOR_TESTS = {"tests/README.md", "tests/english.py", "tests/kubernetes/make_schemas.py"}

_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"

# The CUDA kernels are left out: for all architectures they take minutes.
_WITHOUT_CUDA = {"HOP_TF_CUDA": "0", "HOP_TF_REQUIRE_CUDA": "0"}

# Runs an operation of each library.
_LOAD_NATIVE = """
from hop_tf import ops
codes, scales = ops.int8_encode([-2.0, 1.0])
print(codes.numpy().tolist(), ops.native_available() and bool((ops.arrays.int8_decode(codes, scales) == [-2, 1]).any()))
"""

# Imports the named modules, and tells which file every module in the process came from.
_IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""


def _installed_files():
    """Every installed file, relative to site-packages, and where it lies in the source tree."""
    return {
        f"{package}/{path.relative_to(_ROOT / folder)}": path
        for package, folder in _FOLDERS.items()
        for pattern in ("*.py", "*.proto", "py.typed")
        for path in sorted((_ROOT / folder).rglob(pattern))
        if (path.parent / "__init__.py").exists()  # Not the helpers beside native sources.
        and "testing/network" not in path.as_posix()  # Emulated networks are not packed.
    }


def _modules():
    """The files that can be imported here: those for Ray where it is installed."""
    has_ray = importlib.util.find_spec("ray") is not None
    return {
        file: path
        for file, path in _installed_files().items()
        if file.endswith(".py") and (has_ray or not file.startswith(("hop_tf/tools/ray/", "hop_tf/integrations/ray")))
    }


def _module_name(file):
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _run(code, *arguments, folder, **variables):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_SECONDS,
        check=True,
        text=True,
    ).stdout


def _copy_source(target):
    for folder in _FOLDERS.values():
        shutil.copytree(_ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(_ROOT / file, target)


def _build(what, source, target, **variables):
    """Builds `what`, "build_wheel" or "build_sdist", as pip does; returns the file."""
    target.mkdir()
    _run(_BUILD, what, str(target), folder=source, **_WITHOUT_CUDA, **variables)
    (file,) = target.iterdir()
    return file


def _native_libraries(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith((".so", ".so.2"))}


_needs_compiler = unittest.skipIf(shutil.which(os.environ.get("CXX", "g++")) is None, "needs a C++ compiler")


class BazelTest(absltest.TestCase):
    def test_it_has_the_files_that_tests_use(self):
        """Bazel runs a test in a folder with these files only."""
        patterns = re.findall(r'"((?:tests|examples|docs/pictures)/[^"]+)"', (_ROOT / "BUILD").read_text())
        known = {path for pattern in patterns for path in _ROOT.glob(pattern)}
        folders = [_ROOT / "tests", _ROOT / "examples", _ROOT / "docs" / "pictures"]
        files = {path for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES}
        missing = {str(path.relative_to(_ROOT)) for path in files - known}
        self.assertContainsSubset(missing, _NOT_FOR_TESTS)


class PackagingTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = Path(cls.enterClassContext(tempfile.TemporaryDirectory())).resolve()
        source, cls.site_packages = temporary / "source", temporary / "site-packages"
        _copy_source(source)
        cls.wheel = _build("build_wheel", source, temporary / "wheels")
        with zipfile.ZipFile(cls.wheel) as archive:
            archive.extractall(cls.site_packages)
        (cls.distribution,) = importlib.metadata.distributions(path=[str(cls.site_packages)])

    def test_metadata(self):
        metadata = self.distribution.metadata
        self.assertEqual(metadata["Name"], "hop_tf")
        self.assertEqual(metadata["Version"], __version__)
        self.assertEqual(metadata["License-Expression"], "Apache-2.0")
        self.assertEqual(metadata["Description-Content-Type"], "text/markdown")
        self.assertCountEqual(
            metadata.get_all("Provides-Extra"),
            ["cpu", "gpu", "benchmarks", "docs", "examples", "peers", "ray", "release", "test"],
        )

    def test_tensorflow_is_only_an_extra(self):
        tensorflow = [line for line in self.distribution.requires if line.startswith("tensorflow")]
        self.assertLen(tensorflow, 2)
        self.assertTrue(all("extra ==" in line for line in tensorflow), tensorflow)

    @pytest.mark.slow
    def test_console_script(self):
        (script,) = self.distribution.entry_points
        self.assertEqual((script.group, script.name), ("console_scripts", "hop_tf"))
        self.assertTrue(callable(script.load()))

    def test_files(self):
        files = {str(file) for file in self.distribution.files if ".dist-info/" not in str(file)}
        self.assertEqual({file for file in files if not file.endswith(".so")}, set(_installed_files()))

    def test_the_wheel_is_for_any_python(self):
        self.assertIn("Tag: py3-none-linux_", self.distribution.read_text("WHEEL"))

    @_needs_compiler
    def test_native_libraries_need_no_new_system(self):
        """Otherwise the wheel would be for few systems: see `make dist`."""
        for library in self.site_packages.glob("hop_tf/ops/*.so"):
            needed = re.findall(rb"(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", library.read_bytes())
            for name, version in needed:
                newest = {b"GLIBC": (2, 31), b"GLIBCXX": (3, 4, 28), b"CXXABI": (1, 3, 12)}[name]  # Of Debian 11.
                self.assertLessEqual(tuple(map(int, version.split(b"."))), newest, (library, name))

    @_needs_compiler
    @pytest.mark.slow
    def test_native_libraries(self):
        self.assertEqual(_native_libraries(self.wheel), {"hop_tf/ops/libhop_tf_kernels.so", "hop_tf/ops/hop_tf_ops.so"})
        path = os.pathsep.join([str(self.site_packages), os.environ.get("PYTHONPATH", "")])
        printed = _run(_LOAD_NATIVE, folder=self.site_packages, PYTHONPATH=path)
        self.assertEqual(printed.splitlines()[-1], "[-127, 64] True")

    @pytest.mark.slow
    def test_imports_from_the_wheel(self):
        expected = {_module_name(file): str(self.site_packages / file) for file in _modules()}
        self._check_imports(self.site_packages, expected)

    @pytest.mark.stress
    def test_imports_from_the_source_tree(self):
        expected = {_module_name(file): str(path) for file, path in _modules().items()}
        self._check_imports(_ROOT, expected)

    def _check_imports(self, folder, expected):
        """Every file is loaded once, under its installed name: no second copy as top-level `strategies`."""
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        modules = json.loads(_run(_IMPORT, *expected, folder=folder, PYTHONPATH=path))
        files = set(expected.values())
        self.assertEqual({name: file for name, file in modules.items() if file in files}, expected)


class SourceTest(absltest.TestCase):
    """Builds that compile nothing."""

    def setUp(self):
        super().setUp()
        self.temporary = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        self.source = self.temporary / "source"
        _copy_source(self.source)

    def test_native_sources_are_in_the_source_distribution(self):
        with tarfile.open(_build("build_sdist", self.source, self.temporary / "sdist")) as archive:
            files = {name.partition("/")[2] for name in archive.getnames()}
        sources = {
            str(path.relative_to(_ROOT))
            for pattern in ("*.cc", "*.cu", "*.cuh", "*.h", "*.options")
            for path in (_ROOT / "ops").rglob(pattern)
        }
        self.assertNotEmpty(sources)
        self.assertContainsSubset(sources, files)

    def test_without_a_compiler(self):
        missing = str(self.temporary / "no_compiler")
        wheel = _build("build_wheel", self.source, self.temporary / "wheels", CXX=missing, HOP_TF_REQUIRE_NATIVE="0")
        self.assertEmpty(_native_libraries(wheel))
        with self.assertRaises(subprocess.CalledProcessError):
            _build("build_wheel", self.source, self.temporary / "none", CXX=missing, HOP_TF_REQUIRE_NATIVE="1")


class MissingTest(absltest.TestCase):
    """Tests the errors for packages of an extra that are not installed."""

    def run_without(self, package, code):
        code = f"import sys; sys.modules[{package!r}] = None; {code}"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )

    def test_names_the_extras_of_tensorflow(self):
        run = self.run_without("tensorflow", "import hop_tf; hop_tf.HopStrategy")
        self.assertEqual(run.returncode, 1)
        self.assertIn("hop_tf needs TensorFlow: install it with one of the extras, hop_tf[cpu]", run.stderr)

    def test_names_the_extra_of_ray(self):
        run = self.run_without("ray", "import hop_tf, hop_tf.integrations; import hop_tf.integrations.ray")
        self.assertEqual(run.returncode, 1)
        self.assertIn("hop_tf.integrations.ray needs Ray Train: pip install 'hop_tf[ray]'", run.stderr)


if __name__ == "__main__":
    absltest.main()
