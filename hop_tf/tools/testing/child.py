"""A process of a `MultiProcessRunner`: runs a function or a script, and writes the value to a file.

It is called in a fork of a process server, or run as a program: `python -P child.py specification value`. It imports
only the standard library before the test's own code.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import runpy
import signal
import sys
from types import ModuleType

# Equal to `STACKS_SIGNAL` in hop_tf.tools.processes.server, which must not be imported before `sys.path` is set.
_STACKS_SIGNAL = signal.SIGUSR1

# The name under which the test's main module is loaded. Under the name "__main__", its tests would run here.
_MAIN = "__hop_tf_test_main__"


def main(specification_path: str, value_path: str) -> None:
    """Runs the function or script of a specification.

    Args:
      specification_path: The path of a pickled dictionary. See `MultiProcessRunner`.
      value_path: The path to which to write the function's pickled value.
    """
    faulthandler.enable()
    faulthandler.register(_STACKS_SIGNAL, all_threads=True)
    with open(specification_path, "rb") as file:
        specification = pickle.load(file)
    sys.path[:] = specification["sys_path"]
    if specification["function"] is None:
        _run_script(specification["path"], specification["arguments"])
        return
    module = _load_module(specification["module"], specification["path"])
    function = getattr(module, specification["function"])
    value = function(*pickle.loads(specification["arguments"]))
    _write_value(value, value_path)


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _load_module(name: str, path: str) -> ModuleType:
    """Imports a module by name if the name leads to its file, or otherwise from the file.

    So a test file need not be importable.
    """
    if _is_importable(name, path):
        return importlib.import_module(name)
    name = _MAIN if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_importable(name: str, path: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(path)


def _write_value(value: object, path: str) -> None:
    """Writes the value, as a whole or not at all."""
    with open(f"{path}.part", "wb") as file:
        pickle.dump(value, file)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    main(*sys.argv[1:])
