"""Runs a test file by pytest, with the options and the conftest.py of `make test`. Bazel starts this program."""

import os
import sys


class _Deselected:
    """Counts the cases that conftest.py deselects: a file may have slow ones only."""

    num_items = 0

    def pytest_deselected(self, items):
        self.num_items += len(items)


if __name__ == "__main__":
    import pytest  # Here: processes that tests start load this file, too, and need no pytest.

    report = os.environ.get("XML_OUTPUT_FILE")
    options = ["-p", "no:cacheprovider", *([f"--junit-xml={report}"] if report else [])]
    deselected = _Deselected()
    status = pytest.main([*options, *sys.argv[1:]], plugins=[deselected])
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED and deselected.num_items else status)
