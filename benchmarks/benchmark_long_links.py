"""Measures how well the transport fills a long link, and the longest silence between two ranks meanwhile.

    python benchmarks/benchmark_long_links.py --links=1e8:0.277,1e8:0.277:0.05,1e8:1

Two ranks are hosts of an emulated network (`network`, which needs root). A link is given as bits per second, round trip
in seconds and optionally jitter in seconds, which lets packets overtake each other. Messages of 2 MB, like the chunks
of an all-reduce, go from rank 0 to rank 1: "ordered" on one lane, "spread" over as many as the transport chooses.

    first s    Time of the first 10 MB, on connections that have carried nothing before.
    later s    The same after pauses of two seconds, median of the last three times of five.
    least s    The least time, by the rate and the delay of the link.
    share %    Arrived bytes as a part of those that TCP can carry, in the last two thirds of a time in which enough
               messages are in flight to fill the link.
    silence s  Longest time for which a rank hears nothing of the other one, from the first message on.
"""

from __future__ import annotations

import itertools
import math
import statistics
import struct
import threading
import time
from collections.abc import Mapping

import numpy as np
import ranks
import results
from absl import app, flags

from hop_tf.options import CommunicationOptions
from hop_tf.transport.base import BULK_LANE, Message
from hop_tf.transport.tcp_transport import TcpTransport

_LINKS = flags.DEFINE_list("links", ["1e8:0.277", "1e8:0.277:0.05", "1e8:1"], "What links are like.")
_SECONDS = flags.DEFINE_float("seconds", 10.0, "How long the link is kept full, and 20 round trips.", lower_bound=1.0)

_LANES = {"ordered": BULK_LANE, "spread": None}
_MESSAGE_BYTES = 2_000_000
_BURST_MESSAGES = 5
_NUM_BURSTS, _NUM_LATER = 6, 3
_PAUSE_SECONDS = 2.0
_TIMEOUT_SECONDS, _FAREWELL_SECONDS = 120.0, 5.0
_NUM_IN_BURSTS = _NUM_BURSTS * _BURST_MESSAGES
_PAYLOAD = np.random.default_rng(0).integers(0, 256, _MESSAGE_BYTES, np.uint8)
_SENT_AT = struct.Struct("<d")
_TCP_SHARE = 0.956  # of a rate, see `network`


class _Rank:
    """A rank: rank 0 sends, rank 1 notes when messages arrive. Both have the same clock."""

    def __init__(self, case: Mapping, rank: int):
        self._case = case
        self._peer = 1 - rank
        options = CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS, bandwidth_bits_per_second=case["rate"])
        self._transport = TcpTransport(rank, case["addresses"][0], identity={}, options=options)
        self._room = threading.Semaphore(case["num_in_flight"])
        self._arrivals: list[tuple[float, float]] = []  # When a message was sent, and when it arrived.
        self._longest_silence = 0.0
        self._ended = threading.Event()

    def run(self) -> tuple[list[tuple[float, float]], float]:
        """Returns the times at which messages were sent and arrived (only on rank 1), and the longest silence."""
        self._transport.register("message", self._arrived)
        self._transport.register("arrived", lambda message: self._room.release())
        self._transport.register("end", lambda message: self._ended.set())
        self._transport.start()
        self._transport.connect(self._peer)
        while not self._transport.status(self._peer).round_trip_seconds:
            time.sleep(0.05)
        watching = threading.Thread(target=self._watch)
        watching.start()
        if self._peer == 1:
            self._send_all()
        watching.join()
        self._transport.close()
        return self._arrivals, self._longest_silence

    def _send_all(self) -> None:
        for _ in range(_NUM_BURSTS):
            for _ in range(_BURST_MESSAGES):
                self._send()
            self._transport.flush(1, _TIMEOUT_SECONDS)
            time.sleep(_PAUSE_SECONDS)
        end = time.monotonic() + self._case["seconds"]
        while time.monotonic() < end:
            self._send()
        self._transport.flush(1, _TIMEOUT_SECONDS)
        self._transport.send(1, "end")
        self._ended.set()
        self._transport.flush(1, _FAREWELL_SECONDS)  # Rank 1 may close before it acknowledges.

    def _send(self) -> None:
        self._room.acquire()
        self._transport.send(1, "message", _SENT_AT.pack(time.monotonic()), [_PAYLOAD], self._case["lane"])

    def _arrived(self, message: Message) -> None:
        self._arrivals.append((*_SENT_AT.unpack(message.header), time.monotonic()))
        self._transport.send(0, "arrived")

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self._longest_silence = max(self._longest_silence, self._transport.status(self._peer).silent_seconds)


def _measure(link: str, lane: int | None) -> list[float]:
    """Returns a line of the table."""
    rate, round_trip, jitter = map(float, [*link.split(":"), "0"][:3])
    bytes_per_second = _TCP_SHARE * rate / 8
    case = {
        "lane": lane,
        "rate": rate,
        "num_in_flight": _BURST_MESSAGES + math.ceil(3 * bytes_per_second * round_trip / _MESSAGE_BYTES),
        "seconds": _SECONDS.value + 20 * round_trip,
    }
    network = {"round_trip_seconds": round_trip, "jitter_seconds": jitter, "reorder": jitter > 0}
    (_, silence), (arrivals, other_silence) = ranks.run(__file__, case, 2, str(rate), num_ports=1, **network)
    arrivals.sort()
    bursts = [arrivals[start : start + _BURST_MESSAGES] for start in range(0, _NUM_IN_BURSTS, _BURST_MESSAGES)]
    first, *others = [max(arrived for _, arrived in burst) - burst[0][0] for burst in bursts]
    row = sorted(arrived for _, arrived in arrivals[_NUM_IN_BURSTS:])
    since = len(row) // 3
    share = (len(row) - 1 - since) * _MESSAGE_BYTES / (row[-1] - row[since]) / bytes_per_second
    least = _BURST_MESSAGES * _MESSAGE_BYTES / bytes_per_second + round_trip / 2
    times = [first, statistics.median(others[-_NUM_LATER:]), least]
    return [rate / 1e6, round_trip * 1e3, jitter * 1e3, *times, 100 * share, max(silence, other_silence)]


def main(argv: list[str]) -> None:
    """Prints a table."""
    del argv
    columns = ("Mbit/s", "ms", "jitter ms", "first s", "later s", "least s", "share %", "silence s")
    print(f"{'lanes':>8} " + " ".join(f"{column:>9}" for column in columns))
    for link, (lanes, lane) in itertools.product(_LINKS.value, _LANES.items()):
        values = _measure(link, lane)
        results.note("share in percent", f"{link}, tcp, {lanes}", values[columns.index("share %")])
        print(f"{lanes:>8} " + " ".join(f"{value:>9.2f}" for value in values), flush=True)


if __name__ == "__main__":
    ranks.serve(lambda case, rank: _Rank(case, rank).run())
    app.run(main)
