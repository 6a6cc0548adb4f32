"""Runs a test file by pytest, with the options and the conftest.py of `make test`. Bazel starts this program."""

import os
import sys

if __name__ == "__main__":
    import pytest  # Here: processes that tests start load this file, too, and need no pytest.

    report = os.environ.get("XML_OUTPUT_FILE")
    options = ["-p", "no:cacheprovider", *([f"--junit-xml={report}"] if report else [])]
    sys.exit(pytest.main([*options, *sys.argv[1:]]))
