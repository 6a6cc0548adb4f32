"""The command line: `python -m hop_tf <command>`, or `hop_tf <command>`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from hop_tf.version import __version__

# Each command is a module with `main(argv) -> int`, which is imported only when the command runs. The module imports
# TensorFlow, which takes seconds, only after it has read its arguments.
_COMMANDS = {
    "launch": ("hop_tf.tools.commands.launch", "start a training script on several workers, here or over ssh"),
    "timeline": ("hop_tf.tools.commands.timeline", "write one trace of all ranks, from their records"),
    "diagnose": ("hop_tf.tools.commands.diagnose", "find where the time of a job went, and suggest changes"),
    "supervise": ("hop_tf.tools.commands.supervise", "show what the ranks of a running job do"),
    "plan": ("hop_tf.tools.commands.plan", "start a script, measure, and recommend strategies"),
    "serve": ("hop_tf.tools.commands.serve", "run a parameter server, until the workers are done"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: The command and its arguments. Default: the arguments of this program.

    Returns:
      The exit code; 130 after Ctrl-C.
    """
    commands = "\n".join(f"  {name:<11}{summary}" for name, (_, summary) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hop_tf",
        description="Distributed training of Keras models.",
        epilog=f"commands:\n{commands}\n\n`hop_tf <command> --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=_COMMANDS, metavar="command", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own arguments")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    module, _ = _COMMANDS[arguments.command]
    try:
        exit_code = importlib.import_module(module).main(arguments.arguments)
    except KeyboardInterrupt:
        exit_code = 128 + signal.SIGINT
    _flush_output()
    return exit_code


def _flush_output() -> None:
    """Writes the remaining output. Python's own flush at exit would change the exit code if a pipe has no reader."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
