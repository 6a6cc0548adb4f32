"""Reads what several processes print: a log file each, their recent lines, and one stream for all."""

from __future__ import annotations

import codecs
import collections
import contextlib
import itertools
import os
import queue
import re
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from absl import logging

_TOKENS = re.compile(r"[^\r\n\x08\x1b]+|\x08+|\r|\n|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[^\[]|\x1b")
_INCOMPLETE_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*)?\Z")
_ERASE_TO_END = re.compile(r"\x1b\[0?K")
_LONGEST_LINE = 65536
_PROGRESS_SECONDS = 2.0
_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
_CONSOLE_LINES = 10000


class LineAssembler:
    """Turns a terminal's character stream into lines as they look in the end.

    A progress bar rewrites its line with carriage returns and backspaces. Only the text that stands there at the end
    becomes a line. Colours and other escape sequences are left out, and a line of more than 64 KiB is broken.
    """

    def __init__(self):
        self._line = ""
        self._cursor = 0
        self._held_back = ""

    @property
    def unfinished(self) -> str:
        """The line so far, without its newline."""
        return self._line.rstrip()

    def feed(self, text: str) -> list[str]:
        """Takes the next characters. Returns the lines that they complete."""
        text, self._held_back = self._held_back + text, ""
        if incomplete := _INCOMPLETE_ESCAPE.search(text):
            text, self._held_back = text[: incomplete.start()], text[incomplete.start() :]
        lines = []
        for token in _TOKENS.findall(text):
            if token != "\n":
                self._apply(token)
            if token == "\n" or len(self._line) > _LONGEST_LINE:
                lines.append(self.finish())
        return lines

    def finish(self) -> str:
        """Ends the line and returns it."""
        line = self.unfinished
        self._line, self._cursor = "", 0
        return line

    def _apply(self, token: str) -> None:
        if token == "\r":
            self._cursor = 0
        elif token[0] == "\b":
            self._cursor = max(0, self._cursor - len(token))
        elif _ERASE_TO_END.match(token):
            self._line = self._line[: self._cursor]
        elif token[0] != "\x1b":
            end = self._cursor + len(token)
            self._line = self._line[: self._cursor] + token + self._line[end:]
            self._cursor = end


class TaskOutput:
    """The output of one process: lines in memory and in a log file.

    Args:
      name: The process's name, for messages.
      log_path: File for the lines. An existing file is overwritten.
      num_kept_lines: The number of last lines that stay in memory, or None for all.
    """

    def __init__(self, *, name: str, log_path: str, num_kept_lines: int | None = None):
        self.name = name
        self.log_path = log_path
        self._assembler = LineAssembler()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._changed = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=num_kept_lines)
        self._at_end = False
        self._log_failed = False
        self._log = open(log_path, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
        self._read_end, self._write_end = os.pipe()

    @property
    def write_end(self) -> int:
        """File descriptor for the process to print to."""
        return self._write_end

    @property
    def read_end(self) -> int:
        """File descriptor to read from."""
        return self._read_end

    @property
    def unfinished(self) -> str:
        """The line that is being printed."""
        return self._assembler.unfinished

    def close_write_end(self) -> None:
        """Closes this process's copy of the write end.

        Must be called after the process's start, so that the output ends when the process ends.
        """
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None

    def receive(self, data: bytes) -> list[str]:
        """Takes bytes that were read, or none at the end of the output. Returns the lines that they complete."""
        with self._changed:
            lines = self._assembler.feed(self._decoder.decode(data, final=not data))
            if not data:
                self._at_end = True
                lines += [line for line in [self._assembler.finish()] if line]
            self._lines.extend(lines)
            self._write_log(lines)
            self._changed.notify_all()
        return lines

    def wait_for(self, pattern: re.Pattern, timeout_seconds: float) -> re.Match | None:
        """Waits for a line in which `pattern` is found.

        Returns:
          The first match in all lines in memory, including the unfinished one. None if the output or the time ends
          without a match.
        """
        deadline = time.monotonic() + timeout_seconds
        num_searched = 0
        with self._changed:
            while True:
                num_lines = len(self._lines)
                for line in [*itertools.islice(self._lines, num_searched, None), self.unfinished]:
                    if match := pattern.search(line):
                        return match
                num_searched = num_lines
                if self._at_end or not self._changed.wait(deadline - time.monotonic()):
                    return None

    @property
    def at_end(self) -> bool:
        """True if the whole output of the process and its children was read."""
        return self._at_end

    def lines(self) -> list[str]:
        """The lines in memory, including the unfinished one."""
        with self._changed:
            return [*self._lines, *([self.unfinished] if self.unfinished else [])]

    def close(self) -> None:
        """Releases the log file and the pipe. Must be called after the last read."""
        self.close_write_end()
        os.close(self._read_end)
        with contextlib.suppress(OSError):  # `_write_log` has already reported a full disk.
            self._log.close()

    def _write_log(self, lines: list[str]) -> None:
        try:
            self._log.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            # A full disk must not stop the reading, because the process would block at its next print.
            if not self._log_failed:
                logging.error("Cannot write to %s: %s.", self.log_path, error)
            self._log_failed = True


class OutputReader:
    """Reads the outputs of all processes on one thread, so that no process ever waits for a reader.

    Args:
      outputs: The outputs to read.
      show: Called with (output, line) for every line, and every two seconds for an unfinished line that has changed. It
        must not block.
    """

    def __init__(self, outputs: Sequence[TaskOutput], show: Callable[[TaskOutput, str], None] | None = None):
        self._outputs = outputs
        self._show = show or (lambda *_: None)
        # For each unfinished line, the time at which it was begun or last shown, and the text that was shown.
        self._shown = {output: (time.monotonic(), "") for output in outputs}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hop_tf_output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reads to the end and stops. If a stray process keeps an output open, blocks for at most five seconds."""
        for output in self._outputs:
            output.close_write_end()
        self._thread.join(_CLOSE_SECONDS)
        self._closing = True
        self._thread.join()
        for output in self._outputs:
            output.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for output in self._outputs:
                selector.register(output.read_end, selectors.EVENT_READ, output)
            while selector.get_map() and not self._closing:
                for key, _ in selector.select(_POLL_SECONDS):
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fd)
                    self._show_lines(key.data, key.data.receive(data))
                for output in self._outputs:
                    self._show_progress(output)

    def _show_lines(self, output: TaskOutput, lines: list[str]) -> None:
        for line in lines:
            self._show(output, line)
        if lines:
            self._shown[output] = (time.monotonic(), "")

    def _show_progress(self, output: TaskOutput) -> None:
        (since, shown), unfinished, now = self._shown[output], output.unfinished, time.monotonic()
        if not unfinished:
            self._shown[output] = (now, "")
        elif unfinished != shown and now - since > _PROGRESS_SECONDS:
            self._show(output, unfinished)
            self._shown[output] = (now, unfinished)


class Console:
    """One stream for all processes' lines, written by a thread of its own, so that a stopped terminal stops no process.

    Lines that the terminal cannot take in time are left out, and their number is printed.

    Args:
      stream: The stream to write to. On a terminal the processes' names are coloured, unless `NO_COLOR` is set.
    """

    _COLOURS = (36, 33, 32, 35, 34, 31)

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR")
        self._colours: dict[str, int] = {}
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_left_out = self._num_printed = 0
        self._thread = threading.Thread(target=self._run, name="hop_tf_console", daemon=True)
        self._thread.start()

    def write(self, name: str, line: str, *, may_be_left_out: bool = True) -> None:
        """Prints `[name] line`, soon. Does not block."""
        if may_be_left_out and self._lines.qsize() >= _CONSOLE_LINES:
            self._num_left_out += 1
        else:
            self._lines.put(f"{self._prefix(name)} {line}")

    def close(self) -> None:
        """Prints the remaining lines. Blocks while lines are printed, at most five seconds for each."""
        self._lines.put(None)
        num_printed = -1
        while self._thread.is_alive() and self._num_printed > num_printed:
            num_printed = self._num_printed
            self._thread.join(_CLOSE_SECONDS)

    def _prefix(self, name: str) -> str:
        if not self._coloured:
            return f"[{name}]"
        colour = self._colours.setdefault(name, self._COLOURS[len(self._colours) % len(self._COLOURS)])
        return f"\x1b[{colour}m[{name}]\x1b[0m"

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._print(line)
                if self._lines.empty():
                    self._catch_up()
            self._catch_up()
        except (OSError, ValueError) as error:
            logging.warning("Cannot print the output any longer (%s). The log files have it.", error)
            while self._lines.get() is not None:
                pass

    def _catch_up(self) -> None:
        num_left_out, self._num_left_out = self._num_left_out, 0
        if num_left_out:
            self._print(f"({num_left_out} lines left out here; the log files have them)")
        self._stream.flush()

    def _print(self, line: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._write(line.encode(encoding, "backslashreplace").decode(encoding))
        self._num_printed += 1

    def _write(self, line: str) -> None:
        self._stream.write(f"{line}\n")
