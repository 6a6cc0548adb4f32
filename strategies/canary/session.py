"""`CanarySession`: Canary's collectives and its gradient exchange index, without Keras.

References:
  Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
  Networks. IEEE TPDS 2021. Table 3.
"""

from __future__ import annotations

import collections
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf import codecs
from hop_tf.arguments import check_integer
from hop_tf.collectives.all_reduce import AllReduce
from hop_tf.collectives.networks import BCube, get_network
from hop_tf.collectives.routed import get_algorithm
from hop_tf.errors import HopError, MismatchError, PeerLostError, ProtocolError
from hop_tf.membership.monitor import Monitor, ThreadMonitor
from hop_tf.membership.session import Membership
from hop_tf.options import CommunicationOptions, checked_options
from hop_tf.strategies.canary import gei
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.base import BULK_LANE, Message, Transport
from hop_tf.transport.session_transport import SessionTransport

_GATHER, _CALL = "canary_session/gather", "canary_session/call"
# The header of a gathered message: a digest of the ranks that take part, and the number of earlier exchanges among
# these ranks.
_HEADER = struct.Struct("<Iq")


class CanarySession:
    """The methods of Table 3, over any transport. Use as a context manager.

    Two ranks must call the collectives that they share in the same order. In between, each may call any number of other
    collectives, such as those of other cubes. Ranks compare their calls, and raise `MismatchError` if these differ.
    Ranks and iterations count from 0.

    Several sessions may follow each other on a transport, or run at the same time. The k-th session on a rank's
    transport communicates with the k-th sessions of the other ranks. A session can be entered only once.

    Args:
      transport: The started transport of this rank. The session does not close it.
      world_size: n.
      algorithm: As for `CanaryStrategy`. Default "mesh".
      num_colayers: k, the length of a row vector. Default 1.
      max_staleness: The threshold s. Default 16.
      min_colayers: The threshold p. Default None: all colayers.
      codec: Encodes float32 tensors in `all_reduce`. Default None: they travel as they are.
      options: Deadlines. Default: `CommunicationOptions()`.
      monitor: The rank's monitor. Default: a monitor of real threads.

    Raises:
      ValueError: If an argument is out of range, or `algorithm` does not fit `world_size`.
      MismatchError: By `__enter__`, if a rank has a different `algorithm`, codec or `num_colayers`. If another rank
        gives up first for that reason, this rank raises PeerLostError instead.
      HopError: By `__enter__`, if the session was entered before, or a rank is lost. By collectives, if the session was
        not entered or has ended, here or on a rank that takes part.

    Blocks: `__enter__`, until all ranks enter. `__exit__`, until all messages have arrived at the ranks that still
      listen, at most `progress_timeout_seconds`. After that, the transport may be closed.
    """

    def __init__(
        self,
        transport: Transport,
        world_size: int,
        *,
        algorithm: str = "mesh",
        num_colayers: int = 1,
        max_staleness: int = 16,
        min_colayers: int | None = None,
        codec: codecs.Codec | str | None = None,
        options: CommunicationOptions | None = None,
        monitor: Monitor | None = None,
    ):
        check_integer("world_size", world_size, at_least=1)
        check_integer("num_colayers", num_colayers, at_least=1)
        gei.check_min_colayers(min_colayers, num_colayers)
        self._network = get_network(algorithm)
        self._network.check_world_size(world_size)
        self._thresholds = gei.Thresholds(max_staleness, num_colayers if min_colayers is None else min_colayers)
        self._codec = codecs.get(codec)
        options = checked_options(options, "options")
        if not isinstance(monitor, Monitor | None):
            raise TypeError(
                f"`monitor` must be a hop_tf.membership.monitor.Monitor or None. Received: monitor={monitor!r}."
            )
        self._progress_timeout_seconds = options.progress_timeout_seconds
        self._pool = BufferPool()
        self._index = gei.GEIMatrix(world_size, num_colayers)
        self._transport = SessionTransport(transport)
        self._membership = Membership(
            transport=self._transport,
            monitor=monitor or ThreadMonitor(),
            options=options,
            world_size=world_size,
        )
        self._is_running = False
        self._reductions: dict[tuple, AllReduce] = {}
        self._num_steps: dict[tuple, int] = {}
        # Keyed by the ranks that take part.
        self._num_gathers: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._gathered: dict[tuple[int, int, int], np.ndarray] = {}
        # For each other rank: this rank's and the other rank's common calls that were not compared yet.
        self._own_calls: dict[int, collections.deque[str]] = collections.defaultdict(collections.deque)
        self._calls_there: dict[int, collections.deque[str]] = collections.defaultdict(collections.deque)
        self._settings = f"algorithm={self._network}, num_colayers={num_colayers}, codec={self._codec}"
        self._num_colayers = num_colayers
        self._transport.register(_GATHER, self._on_gather)
        self._transport.register(_CALL, self._on_call)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._membership.rank

    def __enter__(self) -> CanarySession:
        if self._is_running or self._membership.has_left:
            raise HopError(f"rank {self.rank}: a session can be entered only once. Create another session.")
        try:
            self._membership.begin_session()
            self._compare_settings()
            self._is_running = True
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._is_running = False
        reason = "it has ended the session" if error is None else f"{kind.__name__}: {error}"
        deadline = self._membership.monitor.now() + self._progress_timeout_seconds
        self._membership.flush(deadline)  # So a rank that hears the farewell has all earlier messages.
        self._membership.leave(sent_rounds={}, reason=reason, abort=error is not None, final=True)
        self._membership.flush(deadline)
        self._transport.end_session()

    def _compare_settings(self) -> None:
        mine = np.frombuffer(self._settings.encode(), np.uint8)
        ranks = self._ranks_of(None)
        others = [rank for rank in ranks if rank != self.rank]
        received = self._exchange(ranks, dict.fromkeys(others, mine), BULK_LANE, "receive the session's settings")
        for rank, data in received.items():
            if (theirs := data.tobytes().decode(errors="replace")) != self._settings:
                raise MismatchError(
                    f"rank {self.rank}: rank {rank} has other settings: '{theirs}' there, '{self._settings}' here. "
                    "They must be the same on all ranks."
                )

    def _exchange(
        self, ranks: tuple[int, ...], values: Mapping[int, np.ndarray], lane: int, operation: str
    ) -> Mapping[int, np.ndarray]:
        """Sends each of the other `ranks` its values. Returns the bytes that each has sent in the same call."""
        group, number = _digest(ranks), self._num_gathers[ranks]
        self._num_gathers[ranks] += 1
        for rank, array in values.items():
            self._membership.send(rank, _GATHER, _HEADER.pack(group, number), [array], lane=lane)
        self._membership.wait(
            lambda: [rank for rank in values if (rank, group, number) not in self._gathered], operation=operation
        )
        with self._membership.monitor:
            return {rank: self._gathered.pop((rank, group, number)) for rank in values}

    def _check_is_running(self, ranks: Sequence[int]) -> None:
        """Raises HopError if the session was not entered here, or has ended here or on one of these ranks."""
        if not self._is_running:
            raise HopError(f"rank {self.rank}: call collectives of a session within its `with` statement.")
        self._membership.check()  # Raises the reason if a rank has given up.
        with self._membership.monitor:
            ended = sorted(self._membership.departed() & set(ranks))
        if ended:
            raise PeerLostError(
                f"rank {self.rank}: ranks {ended} have ended the session, and take part in no further collectives."
            )

    def _announce(self, ranks: Sequence[int], call: str) -> None:
        """Tells the others which call this rank is about to make."""
        for rank in ranks:
            if rank != self.rank:
                self._note_call(self._own_calls, rank, call)
                self._membership.send(rank, _CALL, call.encode())

    def _on_call(self, message: Message) -> None:
        self._note_call(self._calls_there, message.sender, message.header.decode(errors="replace"))

    def _note_call(self, calls: Mapping[int, collections.deque[str]], rank: int, call: str) -> None:
        """Records a call, and compares the oldest call of each side if both are known."""
        with self._membership.monitor:
            calls[rank].append(call)
            here, there = self._own_calls[rank], self._calls_there[rank]
            if not here or not there:
                return
            own, other = here[0], there[0]
            if own == other:
                here.popleft()
                there.popleft()
                self._membership.monitor.notify_all()
                return
        self._membership.fail(
            MismatchError(
                f"rank {self.rank}: rank {rank} has called {other}, but this rank has called {own}. Two ranks must "
                "call their common collectives in the same order."
            )
        )

    def _wait_compared(self, ranks: Sequence[int]) -> None:
        """Waits until all own calls were compared with the other ranks'.

        Values may arrive before the call that they belong to. If the other rank has made another call, the values are
        wrong.
        """
        self._membership.wait(
            lambda: [rank for rank in ranks if self._own_calls[rank]], operation="receive the calls of the others"
        )

    # BCube driver.

    def all_gather(
        self, tensor: np.ndarray, cube: tuple[int, int] | None = None, pieces: int | None = None
    ) -> np.ndarray:
        """Collects this rank's pieces from all ranks of a cube, and sums them up: the first stage of Table 2.

        The ranks of a cube must call it equally often. Other cubes do not matter. Messages use the lane, and so the
        interface, of the cube's level.

        Args:
          tensor: Array of floating-point values or integers, of the same shape and dtype on all ranks that take part.
          cube: <level, index> of a cube of a BCube that this rank is in. Default None: all ranks.
          pieces: The number of pieces into which the tensor, seen as a vector, is cut. Piece j goes to the rank at
            position (j modulo the cube's size) of the cube. Default None: the number of ranks.

        Returns:
          1-D array: this rank's pieces, summed over the cube and concatenated. Sums of integers have 64 bits, as
          `np.sum` makes them.

        Blocks: until all ranks of the cube have called it.

        Raises:
          ValueError: If this rank is not in the cube, or `pieces` is not an integer of at least 1.
          MismatchError: If a rank of the cube calls something else.
          HopError: If a rank is lost.
        """
        ranks, lane = self._ranks_of(cube), BULK_LANE if cube is None else _lane_of(cube)
        pieces = len(ranks) if pieces is None else pieces
        check_integer("pieces", pieces, at_least=1)
        self._check_is_running(ranks)
        tensor = np.ascontiguousarray(tensor)
        parts = np.array_split(tensor.reshape(-1), pieces)
        of_places = [np.concatenate([parts[0][:0], *parts[place :: len(ranks)]]) for place in range(len(ranks))]
        own = of_places[ranks.index(self.rank)]
        self._announce(ranks, f"all_gather({_signature(tensor)}, pieces={pieces}, ranks={ranks})")
        to_others = {rank: values for rank, values in zip(ranks, of_places, strict=True) if rank != self.rank}
        received = self._exchange(ranks, to_others, lane, "gather pieces")
        self._wait_compared(ranks)
        if any(values.nbytes != own.nbytes for values in received.values()):
            raise ProtocolError(f"rank {self.rank}: received pieces that differ in size from this rank's pieces.")
        return np.sum([received[rank].view(own.dtype) if rank in received else own for rank in ranks], axis=0)

    def all_reduce(
        self,
        tensor: np.ndarray,
        cube: tuple[int, int] | None = None,
        piece_level: int | None = None,
        *,
        iteration: int | None = None,
        colayer: int = 0,
    ) -> np.ndarray:
        """Averages a tensor over ranks.

        The ranks that take part must call it equally often. Other ranks do not matter. Messages within a cube use the
        lane, and so the interface, of the cube's level. The paper's example passes both `cube` and `piece_level`, and
        does not say what the two mean together. Here only one of them may be given.

        Args:
          tensor: Array of floating-point values, of the same shape and dtype on all ranks that take part.
          cube: <level, index> of a cube of a BCube that this rank is in: its ranks take part. Default None:
            `piece_level` decides.
          piece_level: The number of BCube levels over which pieces are exchanged. The ranks that take part are those
            whose digits differ from this rank's only in the lowest `piece_level` levels. Default None: all ranks.
          iteration: If given, the gradient exchange index records that the ranks' gradients of this iteration were
            merged.
          colayer: The colayer of these gradients. Default 0.

        Returns:
          The mean, equal to the bit on all ranks that take part.

        Blocks: until all ranks that take part have called it.

        Raises:
          ValueError: If this rank is not in the cube, or there is no such level, iteration or colayer. Also if both
            `cube` and `piece_level` are given, or the tensor has values that are not floating-point, such as integers.
          MismatchError: If a rank that takes part calls something else.
          HopError: If a rank is lost.
        """
        if iteration is not None:
            check_integer("iteration", iteration, at_least=0)
            check_integer("colayer", colayer, at_least=0, at_most=self._num_colayers - 1)
        if cube is not None and piece_level is not None:
            raise ValueError(
                "`cube` and `piece_level` both say which ranks take part: give only one of them. Received: "
                f"cube={cube!r}, piece_level={piece_level!r}."
            )
        ranks, algorithm, lane = self._ranks_of(cube), str(self._network), None
        if cube is not None:
            algorithm, lane = "mesh", _lane_of(cube)
        elif piece_level is not None:
            ranks, algorithm = self._lowest_levels(piece_level)
        tensor = np.asarray(tensor)
        _check_floating(tensor)
        self._check_is_running(ranks)
        values = np.ascontiguousarray(tensor).reshape(-1)
        key = (algorithm, ranks, values.size, values.dtype.name)
        if key not in self._reductions:
            self._reductions[key] = self._make_reduction(key, values.dtype, lane)
        self._announce(ranks, f"all_reduce({_signature(tensor)}, {algorithm}, ranks={ranks})")
        step = self._num_steps[key] = self._num_steps.get(key, -1) + 1
        (mean,) = self._reductions[key].mean(step, [values.copy()], lambda rank, _: rank in ranks)
        self._wait_compared(ranks)
        if iteration is not None:
            for rank in ranks:
                self._index.merge(rank, iteration, colayer)
        return mean.reshape(tensor.shape)

    def _make_reduction(self, key: tuple, dtype: np.dtype, lane: int | None) -> AllReduce:
        algorithm, ranks, size, name = key
        codec = self._codec if dtype == np.float32 else codecs.Identity(dtype=dtype)
        return get_algorithm(algorithm)(
            self._membership,
            f"session/{algorithm}/{_digest(ranks):08x}/{size}/{name}",
            sizes=[size],
            codecs=[codec],
            pool=self._pool,
            lane=lane,
        )

    def _ranks_of(self, cube: tuple[int, int] | None) -> tuple[int, ...]:
        if cube is None:
            return tuple(range(self._membership.world_size))
        for level in range(self._bcube().beta):
            for index, ranks in enumerate(self._bcube().cubes(level)):
                if cube == (level, index) and self.rank in ranks:
                    return ranks
        raise ValueError(f"`cube` must be (level, index) of one that rank {self.rank} is in. Received: cube={cube!r}.")

    def _lowest_levels(self, piece_level: int) -> tuple[tuple[int, ...], str]:
        network = self._bcube()
        check_integer("piece_level", piece_level, at_least=1)
        if piece_level > network.beta:
            raise ValueError(f"`piece_level` must be at most {network.beta}. Received: piece_level={piece_level}.")
        size = network.alpha**piece_level
        first = self.rank // size * size
        return tuple(range(first, first + size)), f"bcube:{network.alpha},{piece_level}"

    def _bcube(self) -> BCube:
        if not isinstance(self._network, BCube):
            raise ValueError(f"`algorithm` must be a BCube: other networks have no levels. Received: {self._network}.")
        return self._network

    def _on_gather(self, message: Message) -> None:
        if len(message.header) != _HEADER.size:
            raise message.unexpected()
        group, number = _HEADER.unpack(message.header)
        with self._membership.monitor:
            self._gathered[message.sender, group, number] = message.payload
            self._membership.monitor.notify_all()

    # GEI handler.

    def begin_iteration(self, iteration: int) -> None:
        """Records that some rank has started `iteration`, and adds rows up to that iteration.

        Raises:
          ValueError: If `iteration` is not an integer of at least 0. The methods below also raise it.
        """
        check_integer("iteration", iteration, at_least=0)
        self._index.start(iteration)

    def gei_row_vector(self, iteration: int) -> tuple[int, ...]:
        """The row vector of an iteration. See `hop_tf.strategies.canary.gei.GEIMatrix.row_vector`."""
        check_integer("iteration", iteration, at_least=0)
        return self._index.row_vector(iteration)

    def gei_matrix(self) -> Mapping[int, tuple[int, ...]]:
        """The rows that are kept, by iteration."""
        return self._index.matrix()

    # Consistency controller.

    def calc_staleness(self, iteration: int) -> int:
        """The number of iterations from `iteration` to the newest one known to have started. Negative if ahead."""
        check_integer("iteration", iteration, at_least=0)
        return self._index.staleness(iteration)

    def calc_proportion(self, row_vector: Sequence[int], rank: int | None = None) -> int:
        """The number of colayers of which a rank's gradient was exchanged. Default None: this rank."""
        rank = self.rank if rank is None else rank
        check_integer("rank", rank, at_least=0, at_most=self._membership.world_size - 1)
        return gei.calc_proportion(row_vector, rank)

    def check_staleness(self, staleness: int, threshold: int | None = None) -> bool:
        """True if a staleness is within the threshold. Default None: the session's threshold."""
        threshold = self._thresholds.max_staleness if threshold is None else threshold
        check_integer("staleness", staleness)
        check_integer("threshold", threshold, at_least=0)
        return gei.check_staleness(staleness, threshold)

    def check_proportion(self, proportion: int, threshold: int | None = None) -> bool:
        """True if `proportion` colayers suffice. Default None: the session's threshold."""
        threshold = self._thresholds.min_colayers if threshold is None else threshold
        for name, value in (("proportion", proportion), ("threshold", threshold)):
            check_integer(name, value, at_least=0)
        return gei.check_proportion(proportion, threshold)


def _signature(tensor: np.ndarray) -> str:
    return f"{tensor.dtype.name}{list(tensor.shape)}"


def _digest(ranks: tuple[int, ...]) -> int:
    """A number that names the ranks that take part in a collective."""
    return zlib.crc32(np.array(ranks, np.int32).tobytes())


def _lane_of(cube: tuple[int, int]) -> int:
    """The lane for messages within a cube: the lane of the interface for the cube's level."""
    return BULK_LANE + cube[0]


def _check_floating(tensor: np.ndarray) -> None:
    """Raises ValueError if the mean of values of this type has another type."""
    try:
        codecs.Identity(dtype=tensor.dtype)
    except (TypeError, ValueError) as error:  # TypeError: there is no such type in TensorFlow.
        raise ValueError(
            "`tensor` must have floating-point values, because means of integers are no integers. Convert it, for "
            f"example by `tensor.astype(np.float32)`. Received: values of type {tensor.dtype.name}."
        ) from error
