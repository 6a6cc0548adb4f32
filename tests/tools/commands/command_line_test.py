"""Tests for all commands: they show help at once, and end without a traceback on Ctrl-C."""

import contextlib
import io
import json
import os
import subprocess
import sys
from unittest import mock

from absl.testing import absltest, parameterized

from hop_tf import __main__ as command_line
from hop_tf.tools.commands import diagnose

_DEADLINE_SECONDS = 120.0
_HELP = """
import contextlib, io, json, sys
from hop_tf import __main__ as command_line

for command in command_line._COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        command_line.main([command, "--help"])
    slow = sorted({"tensorflow", "keras"} & sys.modules.keys())
    print(json.dumps([command, f"usage: hop_tf {command}" in out.getvalue(), slow]))
"""


class CommandLineTest(parameterized.TestCase):
    def test_help_does_not_wait_for_tensorflow(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _HELP]
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=_DEADLINE_SECONDS
        )
        told = [json.loads(line) for line in run.stdout.splitlines()]
        self.assertEqual(told, [[command, True, []] for command in command_line._COMMANDS])

    @parameterized.parameters("logs", "localhost:1")
    def test_control_c(self, what):
        errors = io.StringIO()
        of_what = "_of_running_job" if ":" in what else "_of_records"
        with contextlib.redirect_stderr(errors), mock.patch.object(diagnose, of_what, side_effect=KeyboardInterrupt):
            self.assertEqual(command_line.main(["diagnose", what]), 130)
        self.assertEmpty(errors.getvalue())


if __name__ == "__main__":
    absltest.main()
