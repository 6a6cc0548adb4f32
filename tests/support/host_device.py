"""Builds what stands in for a CUDA device: a driver on this machine's memory."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

from hop_tf.ops import native

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = pathlib.Path(native.__file__).with_name("libhop_tf_kernels.so")  # For processors.
COMPILER = os.environ.get("CXX", "g++")


def can_build() -> bool:
    """True if there are a C++ compiler and the kernels for processors."""
    return shutil.which(COMPILER) is not None and KERNELS.exists()


def build_driver(folder: str | os.PathLike) -> pathlib.Path:
    """Compiles the driver, which has kernels, too: those for processors. Returns its path."""
    driver = pathlib.Path(folder, "libcuda.so.1")
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", f"-Wl,-rpath,{KERNELS.parent.resolve()}"]
    source = ROOT / "tests" / "benchmarks" / "host_device.cc"
    subprocess.run([COMPILER, *options, "-o", driver, source, KERNELS.resolve()], check=True)
    return driver
