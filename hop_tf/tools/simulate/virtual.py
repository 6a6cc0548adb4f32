"""Monitor, transport and cluster on a virtual clock, the layer below an algorithm."""

from __future__ import annotations

import collections
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from hop_tf.arguments import check_seconds
from hop_tf.membership.monitor import Monitor
from hop_tf.membership.session import Membership
from hop_tf.options import CommunicationOptions
from hop_tf.records import Kind, Recorder
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tools.simulate.scheduler import Process, Scheduler
from hop_tf.tools.simulate.wires import Sending, Wires
from hop_tf.transport.base import Handler, Message, PeerStatus, Transport


class VirtualMonitor(Monitor):
    """A monitor on a scheduler's clock. Only one process runs at a time, so the lock is always free.

    Args:
      scheduler: The clock.
      looks: True if a waiting process wakes now and then to check conditions that come without a notification, such as
        deadlines. Default False: it wakes only by a notification.
    """

    def __init__(self, scheduler: Scheduler, looks: bool = False):
        self._scheduler = scheduler
        self._looks = looks
        self._waiting: dict[object, Process] = {}

    def now(self) -> float:
        """See `Monitor`."""
        return self._scheduler.now

    def __enter__(self) -> VirtualMonitor:
        return self

    def __exit__(self, *exc_info) -> None:
        pass

    def notify_all(self) -> None:
        """See `Monitor`."""
        for wait in list(self._waiting):
            self._end(wait)

    def wait(self, timeout_seconds: float, deadline: float = math.inf) -> None:
        """See `Monitor`."""
        wait, process = object(), self._scheduler.current()
        self._waiting[wait] = process
        if self._looks:
            deadline = min(deadline, self._scheduler.now + timeout_seconds)
        if deadline < math.inf:
            self._scheduler.call_at(deadline, lambda: self._end(wait))
        process.park()

    def _end(self, wait: object) -> None:
        process = self._waiting.pop(wait, None)
        if process is not None:
            self._scheduler.resume_at(self._scheduler.now, process)


class VirtualTransport(Transport):
    """A transport whose messages take virtual time, and whose rank may die and be started again.

    A message in flight is lost if a new process has replaced the receiver. It is also lost if the receiver already
    knows a newer process of the sender, from that process's first message. Messages of a process that has died may
    reach only some ranks: see `die`.

    Args:
      rank: This rank.
      scheduler: The clock.
      network: All ranks' transports. This one adds itself, or replaces that of an earlier process.
      link_seconds: `link_seconds(sender, receiver, num_bytes)` is the latency of a message. Infinity: neither this
        message nor a later one to that peer on that lane arrives, because messages keep their order.
      sending_seconds: `sending_seconds(sender, receiver, num_bytes)` is the time for which a message keeps the link
        busy, before `link_seconds` begin. Messages on one lane leave one after the other. Default: no time.
      card_seconds: `card_seconds(sender, num_bytes)` is the time for which a message occupies the sender's network
        card, if it has the card to itself. Messages to several ranks at the same time share the card: see `Wires`.
        Default: no time.
      detection_seconds: The time from a rank's death until others can know of it.
      on_restart: See `QueueTransport`.
      pool: The source of the arrays of messages. Default: a pool of its own.
      cuts: The times since which links are down, by sender and receiver. See `VirtualCluster.cut`.
      recorder: Recorder for messages of recorded steps, or None.
      payload_scale: The number of bytes that a byte of payload stands for. Above 1 if vectors are shorter than the real
        ones.
    """

    def __init__(
        self,
        rank: int,
        *,
        scheduler: Scheduler,
        network: dict[int, VirtualTransport],
        link_seconds: Callable[[int, int, int], float],
        sending_seconds: Callable[[int, int, int], float] | None = None,
        card_seconds: Callable[[int, int], float] | None = None,
        detection_seconds: float = 0.0,
        on_restart: Callable[[int], None] | None = None,
        pool: BufferPool | None = None,
        cuts: Mapping[tuple[int, int], float] = types.MappingProxyType({}),
        recorder: Recorder | None = None,
        payload_scale: float = 1.0,
    ):
        self._rank = rank
        self._payload_scale = payload_scale
        self.recorder = recorder
        self._scheduler = scheduler
        self._network = network
        self._link_seconds = link_seconds
        self._sending_seconds = sending_seconds
        self._card_seconds = card_seconds
        self._wires = Wires(scheduler, self._begin_to_send, self._have_sent)
        self._left = VirtualMonitor(scheduler)  # Notified when a message has left.
        self._detection_seconds = detection_seconds
        self._on_restart = on_restart
        self._incarnation = 1 + network[rank]._incarnation if rank in network else 0
        self._born_at = scheduler.now
        self._died_at: float | None = None
        self._frozen = (-math.inf, -math.inf)  # Begin and end of the latest freeze.
        self._kept_for_thaw: list[tuple[VirtualTransport, Sending]] = []
        self._keeps = False
        self._reaches: Collection[int] | None = None
        self._peers: dict[int, VirtualTransport] = {}
        self._cuts = cuts
        self._may_return: set[int] = set()
        self._handlers: dict[str, Handler] = {}
        self._retired: set[str] = set()
        self._held: dict[str, list[Message]] = {}
        self._last_arrival: dict[tuple[int, int], float] = {}
        self._latest_arrival: dict[int, float] = {}  # On any lane.
        self._kept: list[Sending] = []  # Messages to peers that this rank has never met, until these exist.
        self._pool = pool or BufferPool()
        self._counters = dict.fromkeys(("bytes_sent", "bytes_received", "messages_sent", "messages_received"), 0)
        self._num_recorded: collections.Counter[tuple[int, int]] = collections.Counter()  # By peer and lane.
        network[rank] = self
        for other in network.values():
            other._bring_kept()
            if self._incarnation and other is not self:  # The other's heartbeats find this process at the old address.
                scheduler.call_at(scheduler.now + detection_seconds, lambda other=other: self._be_found(other))

    def _be_found(self, other: VirtualTransport) -> None:
        is_up = self._died_at is None and other._died_at is None
        if (
            is_up
            and self.rank in other._peers
            and not {(self.rank, other.rank), (other.rank, self.rank)} & {*self._cuts}
        ):
            other._meet(self)
            self._meet(other)

    def _bring_kept(self) -> None:
        kept, self._kept = self._kept, []
        for sending in kept:
            sending.receiver = None
            self._scheduler.call_at(self._scheduler.now, lambda sending=sending: self._bring(sending))

    @property
    def rank(self) -> int:
        """See `Transport`."""
        return self._rank

    @property
    def incarnation(self) -> str:
        """See `Transport`."""
        return f"{self._rank}.{self._incarnation}"

    def start(self) -> None:
        """See `Transport`."""

    def connect(self, peer: int) -> None:
        """See `Transport`."""

    def die(self, reaches: Collection[int] | None = None) -> None:
        """Ends the process. Its messages in flight reach only the ranks in `reaches`. None: all."""
        self._died_at = self._scheduler.now
        self._reaches = reaches
        self._kept.clear()
        self._wires.stop()

    def freeze(self, seconds: float, keeps: bool = False) -> None:
        """Stops the process for some time: it takes no messages, and is silent. Messages to it arrive afterwards.

        Args:
          seconds: The time.
          keeps: True if the process's own messages in flight arrive afterwards, too. Default False.
        """
        self._keeps = keeps
        now, (begin, end) = self._scheduler.now, self._frozen
        self._frozen = begin if now < end else now, max(end, now + seconds)
        self._scheduler.call_at(self._frozen[1], self._thaw)

    def _thaw(self) -> None:
        if self._scheduler.now >= self._frozen[1]:  # Otherwise the process was frozen once more.
            kept, self._kept_for_thaw = self._kept_for_thaw, []
            for sender, sending in kept:
                sender._bring(sending)

    def register(self, queue: str, handler: Handler) -> None:
        """See `Transport`."""
        self._handlers[queue] = handler
        self._retired.discard(queue)
        for message in self._held.pop(queue, ()):
            handler(message)

    def unregister(self, queue: str) -> None:
        """See `Transport`."""
        self._handlers.pop(queue, None)
        self._held.pop(queue, None)
        self._retired.add(queue)

    @property
    def queues(self) -> Collection[str]:
        """The queues that are registered."""
        return self._handlers.keys()

    @property
    def num_held(self) -> int:
        """The number of messages for queues that are not registered."""
        return sum(map(len, self._held.values()))

    def send(
        self,
        peer: int,
        queue: str,
        header: bytes = b"",
        payload: Sequence[np.ndarray] = (),
        lane: int | None = 0,
        *,
        check: Callable[[], None] | None = None,
        supersedes: bool = False,
    ) -> bool:
        """See `Transport`. Never blocks."""
        del check
        message = Message(self._rank, queue, header, self._joined(payload) if payload else _NOTHING)
        for older in self._wires.waiting(peer, lane) if supersedes else ():
            if older.message.queue == queue:
                older.message = message
                return True
        num_bytes = self._num_bytes(message)
        self._count("sent", num_bytes)
        sending = Sending(message, peer, lane, num_bytes, self._scheduler.now, receiver=self._peers.get(peer))
        if self._sending_seconds is not None:
            sending.seconds = self._sending_seconds(self._rank, peer, num_bytes)
            self._check("sending_seconds", sending.seconds, peer)
        if self._card_seconds is not None:
            sending.card_seconds = self._card_seconds(self._rank, num_bytes)
            self._check("card_seconds", sending.card_seconds, peer)
        if self.recorder is not None and self.recorder.is_on:
            sending.record, sending.step = self._record_of(sending), self.recorder.step
        self._wires.put(sending)
        return False

    def _num_bytes(self, message: Message) -> int:
        return len(message.header) + round(message.payload.nbytes * self._payload_scale)

    def _record_of(self, sending: Sending) -> dict:
        """Returns the fields of a message that both ends record."""
        lane = _UNORDERED_LANE if sending.lane is None else sending.lane
        self._num_recorded[sending.peer, lane] += 1
        return {
            "lane": lane,
            "name": sending.message.queue,
            "num_bytes": sending.num_bytes,
            "number": self._num_recorded[sending.peer, lane],
        }

    def _begin_to_send(self, sending: Sending) -> None:
        if sending.record is not None:
            about = {"peer": sending.peer, "step": sending.step, "queued": self._scheduler.now - sending.put_at}
            self.recorder.add(Kind.SEND, self.recorder.now(), **about, **sending.record)

    def _have_sent(self, sending: Sending) -> None:
        peer, way = sending.peer, (sending.peer, sending.lane)
        seconds = self._link_seconds(self._rank, peer, sending.num_bytes)
        if seconds != math.inf:
            self._check("link_seconds", seconds, peer)
        arrival = self._scheduler.now + seconds
        if sending.lane is not None:
            arrival = max(arrival, self._last_arrival.get(way, 0.0))
            self._last_arrival[way] = arrival
        self._latest_arrival[peer] = max(arrival, self._latest_arrival.get(peer, 0.0))
        self._left.notify_all()
        if arrival != math.inf:
            self._scheduler.call_at(arrival, lambda: self._bring(sending))

    def _check(self, name: str, seconds: float, peer: int) -> None:
        if not 0 <= seconds < math.inf:  # Checked here first, to avoid a text for each of 100,000 messages.
            check_seconds(name, seconds, f" from rank {self._rank} to rank {peer}")

    def _bring(self, sending: Sending) -> None:
        peer = sending.peer
        if (self._reaches is not None and peer not in self._reaches) or (self._rank, peer) in self._cuts:
            return
        receiver = sending.receiver or self._network[peer]
        if self._keeps and self._scheduler.now < self._frozen[1]:
            self._scheduler.call_at(self._frozen[1], lambda: self._bring(sending))
            return
        if self._scheduler.now < receiver._frozen[1] or receiver._kept_for_thaw:
            receiver._kept_for_thaw.append((self, sending))
            return
        if receiver._died_at is None:
            self._meet(receiver)  # A connection tells the sender which process the receiver is.
            if sending.record is not None and receiver.recorder is not None:
                receiver.recorder.add(Kind.RECEIVE, receiver.recorder.now(), peer=self._rank, **sending.record)
            receiver._receive(self, sending.message)
        elif peer not in self._peers:
            self._kept.append(sending)

    def _joined(self, payload: Sequence[np.ndarray]) -> np.ndarray:
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in payload]
        if len(parts) == 1 and not parts[0].flags.writeable:
            return parts[0]  # A read-only array needs no copy.
        data = self._pool.take(sum(part.nbytes for part in parts))
        np.concatenate(parts, out=data)
        data.flags.writeable = False
        return data

    def _receive(self, sender: VirtualTransport, message: Message) -> None:
        if self._meet(sender):
            self._deliver(message)

    def _meet(self, sender: VirtualTransport) -> bool:
        """True if `sender` is the newest process of its rank that is known here. Remembers it if it is newer."""
        known = self._peers.setdefault(sender.rank, sender)
        if known._incarnation < sender._incarnation:
            self._peers[sender.rank] = sender
            for messages in self._held.values():
                messages[:] = [message for message in messages if message.sender != sender.rank]
            self._on_restart(sender.rank)
        return known._incarnation <= sender._incarnation

    def _deliver(self, message: Message) -> None:
        self._count("received", self._num_bytes(message))
        handler = self._handlers.get(message.queue)
        if handler is not None:
            handler(message)
        elif message.queue not in self._retired:
            self._held.setdefault(message.queue, []).append(message)

    def _count(self, direction: str, num_bytes: int) -> None:
        self._counters[f"bytes_{direction}"] += num_bytes
        self._counters[f"messages_{direction}"] += 1

    def flush(self, peer: int, timeout_seconds: float) -> bool:
        """See `Transport`. Called by a process."""
        deadline = self._scheduler.now + timeout_seconds
        while self._wires.is_busy(peer):
            if self._scheduler.now >= deadline:
                return False
            self._left.wait(math.inf, deadline)
        arrives_at = self._latest_arrival.get(peer, 0.0)
        if arrives_at > self._scheduler.now:
            self._scheduler.sleep(min(arrives_at, deadline) - self._scheduler.now)
        return arrives_at <= deadline

    def status(self, peer: int) -> PeerStatus:
        """See `Transport`."""
        met, died_at = peer in self._peers, self._network[peer]._died_at
        if (cut_at := self._cuts.get((peer, self._rank))) is not None:
            incarnation = self._peers[peer].incarnation if met else None
            return PeerStatus(f"virtual:{peer}", False, self._scheduler.now - cut_at, incarnation)
        is_dead = died_at is not None and self._scheduler.now >= max(died_at, self._born_at) + self._detection_seconds
        return PeerStatus(
            f"virtual:{peer}",
            connected=not is_dead,
            silent_seconds=math.inf if is_dead and not met else self._network[peer]._standing_seconds(),
            incarnation=self._peers[peer].incarnation if met else None,
            refused_seconds=math.inf if is_dead and met else 0.0,
            may_return=peer in self._may_return,
        )

    def _standing_seconds(self) -> float:
        begin, end = self._frozen
        return self._scheduler.now - begin if self._scheduler.now < end else 0.0

    def expect_return(self, peer: int) -> None:
        """See `Transport`."""
        self._may_return.add(peer)

    def counters(self) -> Mapping[str, int]:
        """See `Transport`."""
        return {**self._counters, "connections_refused": 0}

    def close(self) -> None:
        """See `Transport`."""


# The lane, in records, of messages that may arrive in any order.
_UNORDERED_LANE = 1
_NOTHING = np.empty(0, np.uint8)
_NOTHING.flags.writeable = False


# The scheduler finds an endless wait at once, so deadlines are not needed.
_WITHOUT_DEADLINES = CommunicationOptions(timeout_seconds=1e9, progress_timeout_seconds=1e9)


class VirtualCluster:
    """Ranks with memberships on one virtual clock.

    Args:
      world_size: Number of ranks.
      link_seconds: See `VirtualTransport`. Default: messages take no time.
      sending_seconds: See `VirtualTransport`.
      peers: `peers(rank)`: the ranks that a rank communicates with. Default: all.
      continue_without_lost: See `Membership`.
      min_ranks: See `Membership`.
      patience_seconds: See `Membership`.
      detection_seconds: See `VirtualTransport`.
      options: Deadlines. Default: there are none.
      limit_seconds: See `Scheduler`. If given, a waiting rank checks deadlines now and then, as on real clocks. Default
        None: a rank checks them only after a notification, and an endless wait is found at once.
      num_servers: Number of parameter servers.
      card_seconds: See `VirtualTransport`.
      recorders: `recorders(rank, scheduler)` makes a rank's recorder, with the scheduler's clock. Default: none.
      payload_scale: See `VirtualTransport`.

    Attributes:
      scheduler: The clock and the processes.
      memberships: The membership of each rank.
      servers: The servers' transports, which follow those of the ranks.
      pool: Buffers for the arrays of ranks and of messages.
    """

    def __init__(
        self,
        world_size: int,
        link_seconds: Callable[[int, int, int], float] | None = None,
        peers: Callable[[int], Iterable[int]] | None = None,
        continue_without_lost: bool = False,
        min_ranks: int = 1,
        patience_seconds: float | None = None,
        detection_seconds: float = 0.0,
        options: CommunicationOptions = _WITHOUT_DEADLINES,
        limit_seconds: float | None = None,
        num_servers: int = 0,
        sending_seconds: Callable[[int, int, int], float] | None = None,
        card_seconds: Callable[[int, int], float] | None = None,
        recorders: Callable[[int, Scheduler], Recorder | None] = lambda rank, scheduler: None,
        payload_scale: float = 1.0,
    ):
        self._payload_scale = payload_scale
        self._sending_seconds, self._card_seconds = sending_seconds, card_seconds
        self._make_recorder = recorders
        self._options = options
        self._has_limit = limit_seconds is not None
        self.scheduler = Scheduler(math.inf if limit_seconds is None else limit_seconds)
        self.pool = BufferPool()
        self._link_seconds = link_seconds or (lambda sender, receiver, num_bytes: 0.0)
        self._peers = peers
        self._continue_without_lost = continue_without_lost
        self._min_ranks = min_ranks
        self._patience_seconds = patience_seconds
        self._detection_seconds = detection_seconds
        self._network: dict[int, VirtualTransport] = {}
        self._cuts: dict[tuple[int, int], float] = {}
        self._processes: dict[int, list[Process]] = {}  # The rank's main process is the first.
        self._num_servers = num_servers
        self.memberships: list[Membership] = []
        for rank in range(world_size):
            self.memberships.append(self._join(rank, world_size))
        servers = range(world_size, world_size + num_servers)
        self.servers = [
            self._connect(server, self._make_recorder(server, self.scheduler), lambda worker: None)
            for server in servers
        ]

    def run(self, body: Callable[[int], None]) -> None:
        """Runs `body(rank)` on every rank until all have ended. See `Scheduler.run`."""
        for rank in range(len(self.memberships)):
            self.start(rank, lambda rank=rank: body(rank))
        self.scheduler.run()

    def start(self, rank: int, body: Callable[[], None]) -> None:
        """Starts the process of a rank now."""
        self._processes[rank] = [self.scheduler.spawn(f"rank {rank}", body)]

    def start_thread(self, rank: int, name: str, body: Callable[[], None]) -> _Thread:
        """Starts a further process of a rank, which dies with the rank: see `ExchangeContext.start_thread`."""
        self._processes[rank].append(self.scheduler.spawn(f"{name} of rank {rank}", body))
        return _Thread()

    def cut(self, rank: int, other: int, one_way: bool = False) -> None:
        """Cuts the link between two ranks: from now on none of their messages to each other arrive.

        Args:
          rank: A rank.
          other: Another rank.
          one_way: True if messages of `other` still arrive, and only `rank` is silent. Default False.
        """
        for pair in [(rank, other)] if one_way else [(rank, other), (other, rank)]:
            self._cuts[pair] = self.scheduler.now

    def freeze(self, rank: int, seconds: float, keeps: bool = False) -> None:
        """Stops the process of a rank for some time, as SIGSTOP does. Call it by `Scheduler.call_at`.

        Args:
          rank: The rank.
          seconds: The time.
          keeps: See `VirtualTransport.freeze`.
        """
        self._network[rank].freeze(seconds, keeps)
        for process in self._processes[rank]:
            process.frozen_until = max(process.frozen_until, self.scheduler.now + seconds)
        if self._patience_seconds is not None and seconds > self._patience_seconds:
            # Waiting ranks look for lost peers four times within the patience. The factor puts the fourth look after
            # the patience has ended.
            look = self._patience_seconds / 4 * (1 + 1e-9)
            for number in range(1, int(seconds / look) + 1):
                self.scheduler.call_at(self.scheduler.now + number * look, self._wake_all)

    def kill(self, rank: int, reaches: Collection[int] | None = None) -> bool:
        """Ends the process of a rank now, at any point. Returns False if it had already ended. Call it by `call_at`.

        Args:
          rank: The rank.
          reaches: The ranks that get its messages in flight. Default None: all.
        """
        if self._processes[rank][0].ended:
            return False
        for process in self._processes[rank]:
            process.abandon()
        self.close(rank, reaches)
        return True

    def close(self, rank: int, reaches: Collection[int] | None = None) -> None:
        """Stops a rank's process from taking messages: it was killed (see `kill`), or has failed."""
        self._network[rank].die(reaches)
        self.scheduler.call_at(self.scheduler.now + self._detection_seconds, self._wake_all)

    def restart(self, rank: int) -> Membership:
        """Prepares a new process for a rank whose process has died. Returns its membership."""
        self.memberships[rank] = self._join(rank, len(self.memberships))
        self.scheduler.call_at(self.scheduler.now + self._detection_seconds, self._wake_all)
        return self.memberships[rank]

    def _join(self, rank: int, world_size: int) -> Membership:
        recorder = self._make_recorder(rank, self.scheduler)
        return Membership(
            transport=self._connect(rank, recorder, lambda peer: self.memberships[rank].on_restart(peer)),
            monitor=VirtualMonitor(self.scheduler, looks=self._has_limit),
            options=self._options,
            world_size=world_size,
            peers=None if self._peers is None else self._peers(rank),
            continue_without_lost=self._continue_without_lost,
            min_ranks=self._min_ranks,
            patience_seconds=self._patience_seconds,
            recorder=recorder,
            servers=range(world_size, world_size + self._num_servers),
        )

    def _connect(self, rank: int, recorder: Recorder | None, on_restart: Callable[[int], None]) -> VirtualTransport:
        return VirtualTransport(
            rank,
            scheduler=self.scheduler,
            network=self._network,
            link_seconds=self._link_seconds,
            sending_seconds=self._sending_seconds,
            card_seconds=self._card_seconds,
            detection_seconds=self._detection_seconds,
            on_restart=on_restart,
            pool=self.pool,
            cuts=self._cuts,
            recorder=recorder,
            payload_scale=self._payload_scale,
        )

    def _wake_all(self) -> None:
        """Wakes all ranks that wait. A death, unlike a message, does not notify them."""
        for membership in self.memberships:
            membership.look()


class _Thread:
    """The thread that `start_thread` returns. Joining does nothing, because the cluster waits for all."""

    def join(self, timeout: float | None = None) -> None:
        pass
