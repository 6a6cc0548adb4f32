"""Deterministic simulation of a scheme: its own code, on a virtual clock, in one process.

Every rank runs the scheme's real `Exchange` and `Membership`. Only what they stand on is replaced: the monitor's clock
is virtual, and the transport delivers after a given link time. One rank runs at a time, and the order is fixed by the
virtual time, so a run depends on nothing but its arguments, and a deadlock is seen at once: no event is left.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hop_tf.buffers import BufferPool
from hop_tf.membership import Membership
from hop_tf.monitor import Monitor
from hop_tf.options import CommunicationOptions
from hop_tf.transport.base import Handler, Message, PeerStatus, Transport


class DeadlockError(RuntimeError):
    """Some simulated ranks wait, and nothing can happen any more."""


class Scheduler:
    """A virtual clock with events, and processes of which one runs at a time.

    Attributes:
      now: Virtual time in seconds.
    """

    def __init__(self):
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._processes: list[_Process] = []

    def call_at(self, time: float, callback: Callable[[], None]) -> None:
        """Calls `callback` when the clock reaches `time`; events of one time run in the order of these calls."""
        heapq.heappush(self._events, (max(time, self.now), next(self._sequence), callback))

    def spawn(self, name: str, body: Callable[[], None]) -> None:
        """Starts a process at the current time."""
        process = _Process(name, body)
        self._processes.append(process)
        self.call_at(self.now, process.resume)

    def sleep(self, seconds: float) -> None:
        """Lets virtual time pass for the calling process."""
        process = self.current()
        self.call_at(self.now + seconds, process.resume)
        process.park()

    def current(self) -> _Process:
        """The process that runs now."""
        return next(p for p in self._processes if p.thread is threading.current_thread())

    def run(self) -> None:
        """Runs until every process has ended.

        Raises:
          DeadlockError: If processes wait for something that cannot happen.
          BaseException: The first one that a process raised.
        """
        try:
            while self._events:
                self.now, _, callback = heapq.heappop(self._events)
                callback()
                for process in self._processes:
                    if process.error is not None:
                        raise process.error
            waiting = [process.name for process in self._processes if not process.ended]
            if waiting:
                raise DeadlockError(f"at {self.now:.6f} s nothing can happen any more. Waiting: {waiting}.")
        finally:
            for process in self._processes:
                process.abandon()


class _Abandoned(BaseException):
    """Unwinds a process that will never be resumed."""


class _Process:
    """A thread that runs only between `resume` and its next `park`."""

    def __init__(self, name: str, body: Callable[[], None]):
        self.name = name
        self.error: BaseException | None = None
        self.ended = False
        self._body = body
        self._abandoned = False
        self._turn = threading.Semaphore(0)
        self._parked = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=f"hop_tf simulated {name}", daemon=True)
        self.thread.start()

    def resume(self) -> None:
        """Runs the process until it parks or ends. Called by the scheduler."""
        if not self.ended:
            self._turn.release()
            self._parked.acquire()

    def park(self) -> None:
        """Gives the turn back. Called by the process."""
        self._parked.release()
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """Ends the thread wherever it is parked."""
        self._abandoned = True
        self.resume()
        self.thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._abandoned:
                self._body()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._parked.release()


class VirtualMonitor(Monitor):
    """A monitor on a scheduler's clock. As one process runs at a time, its lock is always free."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._waiting: list[_Process] = []

    def now(self) -> float:
        """See `Monitor`."""
        return self._scheduler.now

    def __enter__(self) -> VirtualMonitor:
        return self

    def __exit__(self, *exc_info) -> None:
        pass

    def notify_all(self) -> None:
        """See `Monitor`."""
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            self._scheduler.call_at(self._scheduler.now, process.resume)

    def wait(self, timeout_seconds: float) -> None:
        """Waits until notified. The time limit is ignored: without a notification nothing has changed."""
        del timeout_seconds
        process = self._scheduler.current()
        self._waiting.append(process)
        process.park()


class VirtualTransport(Transport):
    """A transport whose messages take virtual time.

    Args:
      rank: This rank.
      scheduler: The clock.
      network: All ranks' transports; this one adds itself.
      link_seconds: `link_seconds(sender, receiver, num_bytes)` is how long a message takes. Messages to one peer on
        one lane keep their order.
    """

    def __init__(
        self,
        rank: int,
        *,
        scheduler: Scheduler,
        network: dict[int, VirtualTransport],
        link_seconds: Callable[[int, int, int], float],
    ):
        self._rank = rank
        self._scheduler = scheduler
        self._network = network
        self._link_seconds = link_seconds
        self._handlers: dict[str, Handler] = {}
        self._held: dict[str, list[Message]] = {}
        self._last_arrival: dict[tuple[int, int], float] = {}
        self._pool = BufferPool()
        self._counters = dict.fromkeys(("bytes_sent", "bytes_received", "messages_sent", "messages_received"), 0)
        network[rank] = self

    @property
    def rank(self) -> int:
        """See `Transport`."""
        return self._rank

    def start(self) -> None:
        """See `Transport`."""

    def connect(self, peer: int) -> None:
        """See `Transport`."""

    def register(self, queue: str, handler: Handler) -> None:
        """See `Transport`."""
        self._handlers[queue] = handler
        for message in self._held.pop(queue, ()):
            handler(message)

    def unregister(self, queue: str) -> None:
        """See `Transport`."""
        self._handlers.pop(queue, None)

    def send(
        self,
        peer: int,
        queue: str,
        header: bytes = b"",
        payload: Sequence[np.ndarray] = (),
        lane: int = 0,
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        """See `Transport`. Never blocks."""
        del check
        joined = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in payload] or [_NOTHING])
        data = self._pool.take(joined.nbytes)
        data[:] = joined
        data.flags.writeable = False
        num_bytes = len(header) + data.nbytes
        self._count("sent", num_bytes)
        arrival = self._scheduler.now + self._link_seconds(self._rank, peer, num_bytes)
        arrival = max(arrival, self._last_arrival.get((peer, lane), 0.0))
        self._last_arrival[peer, lane] = arrival
        message = Message(self._rank, queue, header, data)
        self._scheduler.call_at(arrival, lambda: self._network[peer]._deliver(message))

    def _deliver(self, message: Message) -> None:
        self._count("received", len(message.header) + message.payload.nbytes)
        handler = self._handlers.get(message.queue)
        if handler is None:
            self._held.setdefault(message.queue, []).append(message)
        else:
            handler(message)

    def _count(self, direction: str, num_bytes: int) -> None:
        self._counters[f"bytes_{direction}"] += num_bytes
        self._counters[f"messages_{direction}"] += 1

    def flush(self, peer: int, timeout_seconds: float) -> bool:
        """See `Transport`. Nothing is lost here."""
        return True

    def status(self, peer: int) -> PeerStatus:
        """See `Transport`. Every peer lives."""
        return PeerStatus(f"virtual:{peer}", connected=True, silent_seconds=0.0, ever_connected=True)

    def counters(self) -> Mapping[str, int]:
        """See `Transport`."""
        return {**self._counters, "connections_refused": 0}

    def close(self) -> None:
        """See `Transport`."""


_NOTHING = np.empty(0, np.uint8)


class VirtualCluster:
    """Ranks with memberships on one virtual clock.

    Args:
      world_size: Number of ranks.
      link_seconds: See `VirtualTransport`. Default: messages take no time.

    Attributes:
      scheduler: The clock and the processes.
      memberships: One for each rank; every rank is a peer of every other.
      pool: Buffers for the ranks' arrays.
    """

    def __init__(self, world_size: int, link_seconds: Callable[[int, int, int], float] | None = None):
        self.scheduler = Scheduler()
        self.pool = BufferPool()
        network: dict[int, VirtualTransport] = {}
        self.memberships = [
            Membership(
                transport=VirtualTransport(
                    rank,
                    scheduler=self.scheduler,
                    network=network,
                    link_seconds=link_seconds or (lambda sender, receiver, num_bytes: 0.0),
                ),
                monitor=VirtualMonitor(self.scheduler),
                options=CommunicationOptions(),
                world_size=world_size,
                peers=range(world_size),
            )
            for rank in range(world_size)
        ]

    def run(self, body: Callable[[int], None]) -> None:
        """Runs `body(rank)` on every rank until all have ended. See `Scheduler.run`."""
        for rank in range(len(self.memberships)):
            self.scheduler.spawn(f"rank {rank}", lambda rank=rank: body(rank))
        self.scheduler.run()
