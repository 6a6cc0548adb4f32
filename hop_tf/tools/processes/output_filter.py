"""`OutputFilter`: removes repeated tracebacks, and native libraries' INFO lines, from a console of several processes.

The log files have everything.
"""

from __future__ import annotations

import re

_TRACEBACK = "Traceback (most recent call last):"
# A traceback ends with its exception. A traceback without an exception is held back for at most this many lines.
_MAX_TRACEBACK_LINES = 1000
# The names of modules and of a class, and the first line of the message, if there is one.
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*\.)?[A-Z]\w*(: .+)?$")

# INFO lines of TensorFlow's C++ code, in its two formats, and lines that belong to these but lack their prefix.
_NATIVE_INFO = re.compile(
    r"I0000 00:00:\d"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\."
)


def is_left_out(line: str) -> bool:
    """True if a line is an INFO line of a native library."""
    return _NATIVE_INFO.match(line) is not None


class OutputFilter:
    """Selects the lines of several processes' output that are shown.

    A traceback is held back until it is complete. If the same traceback was shown before, of any process, a single line
    says so.
    """

    def __init__(self):
        self._held_back: dict[str, list[str]] = {}
        self._shown: dict[int, str] = {}  # By the hash of a traceback, the process whose traceback was shown.
        self._exceptions: dict[str, str] = {}

    def feed(self, name: str, line: str) -> list[str]:
        """Takes a line of the process `name`. Returns the lines of that process to show now."""
        if name in self._held_back:
            return self._continue(name, line)
        if line.startswith(_TRACEBACK):
            self._held_back[name] = [line]
            return []
        return [] if is_left_out(line) else [line]

    def flush(self, name: str) -> list[str]:
        """Returns the lines that were held back for a process whose output has ended."""
        return self._held_back.pop(name, [])

    def forget(self, name: str) -> None:
        """Forgets the last exception of `name`, because another process has taken its place."""
        self._exceptions.pop(name, None)

    def last_exception(self, name: str) -> str | None:
        """The end of the last traceback of the process `name`: the exception's class and its message's first line."""
        return self._exceptions.get(name)

    def _continue(self, name: str, line: str) -> list[str]:
        lines = self._held_back[name]
        lines.append(line)
        if (not line or line.startswith(" ")) and len(lines) < _MAX_TRACEBACK_LINES:
            return []
        lines = self.flush(name)
        if not _EXCEPTION.match(line):
            return lines
        self._exceptions[name] = line
        traceback = hash(tuple(lines))
        if traceback in self._shown:
            return [f"(the same traceback as that of {self._shown[traceback]}: {line})"]
        self._shown[traceback] = name
        return lines
