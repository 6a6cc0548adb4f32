"""`RankCollectives`: operations that all ranks of a job call together, besides the exchange of each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.codecs import Identity
from hop_tf.collectives.mean import Mean
from hop_tf.collectives.tree import TreeCollectives
from hop_tf.errors import DeadlineExceededError, HopError, PeerLostError
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.membership.session import Membership
from hop_tf.runtime.all_gather import AllGather
from hop_tf.runtime.joining import Joining
from hop_tf.runtime.replica_state import ReplicaState, compare, read, sign, spec_of, write
from hop_tf.tensors.buffers import BufferPool

# Collectives are numbered within their session, because a rank may miss the rest of a session. Users' calls are
# numbered separately.
_IN_SESSION, _CALLED = "collectives in the session", "collectives called by users"

# If a rank has made a smaller part of the others' steps than this, its weights are too old to be averaged.
_LEAST_SHARE = 0.9


@contextlib.contextmanager
def all_ranks_call(what: str) -> Iterator[None]:
    """Adds a possible cause to errors of waiting: not all ranks call `what`."""
    try:
        yield
    except (PeerLostError, DeadlineExceededError) as error:
        raise type(error)(f"{error} All ranks must call {what} equally often, and in the same order.") from error


class RankCollectives:
    """Collectives that a rank calls as often as the others do, in the same order.

    Args:
      membership: The ranks that take part.
      joining: In a process that was started again, takes over the others' counts of collectives.
      state: Records the variables that were given initial values.
      pool: Buffers.

    Attributes:
      all_gather: Gives every rank each rank's value of a tensor, also within a graph. A collective.
    """

    def __init__(self, membership: Membership, joining: Joining, state: ReplicaState, pool: BufferPool):
        self._membership = membership
        self._joining = joining
        self._state = state
        self._pool = pool
        self._trees = TreeCollectives(membership)
        self._in_session = False
        self._num_gathered = 0  # In the session.
        self.all_gather = AllGather(membership.world_size, self.share, membership.fail)

    def begin_session(self) -> None:
        """Forgets the collectives of the last session."""
        self._in_session = True
        self._joining.counts[_IN_SESSION] = self._num_gathered = 0
        self._trees.begin_session()
        self.all_gather.reset()

    def end_session(self) -> None:
        """Called when a session ends. Later calls are between two sessions."""
        self._in_session = False

    @property
    def sent_rounds(self) -> dict[str, int]:
        """See `TreeCollectives.sent_rounds`."""
        return self._trees.sent_rounds

    def close(self) -> None:
        """Ends the thread of `all_gather`."""
        self.all_gather.close()

    def broadcast_initial_values(self, variables: Iterable[tf.Variable]) -> None:
        """Gives rank 0's values to variables that have not been given initial values before. A collective.

        Called outside of graphs, or in `tf.init_scope`.

        Args:
          variables: The variables, in the same order on all ranks.

        Raises:
          MismatchError: If rank 0 has other variables.
        """
        # Slots that an optimizer creates in the step that is being traced have no values yet. They begin equal anyway.
        new = [variable for variable in self._state.add(variables) if tf.compat.v1.is_variable_initialized(variable)]
        if not new or self._membership.joining:  # A rank that joins takes the present values.
            return
        signature = sign("initial values", "", [spec_of(v) for v in new])
        self.compare(signature)
        received = self._trees.broadcast(_IN_SESSION, read(new), self._next_in_session())
        if received is not None:
            write(new, received)

    def average(self, variables: Sequence[tf.Variable]) -> None:
        """Assigns to each float variable its mean over the ranks. A collective.

        Ranks that have made less than 90 % of the others' steps in the last session do not count. They get the mean of
        the others.

        Blocks: until all ranks take part.

        Raises:
          MismatchError: If rank 0 has other variables.
          PeerLostError: If a rank was lost.
        """
        self._membership.require_all("to average")
        floats = [v for v in variables if v.dtype.is_floating]
        arrays = [np.asarray(v.read_value()) for v in floats]
        with self._called_by_users("`strategy.synchronize`"):
            self._compare(self._next_called(), sign("average", "", [spec_of(v) for v in floats]))
            numbers = self._trees.all_gather(self._next_called(), str(self._membership.num_rounds).encode())
            counts = self._counts(list(map(int, numbers)))
            means = self._trees.mean(self._next_called(), arrays, counts)
        with as_own_updates():
            for variable, mean in zip(floats, means, strict=True):
                variable.assign(mean)

    def _counts(self, num_rounds: Sequence[int]) -> bool:
        """True if this rank's values count, given each rank's number of rounds. Rank 0 logs the ranks left out."""
        least = _LEAST_SHARE * max(num_rounds)
        behind = [rank for rank, number in enumerate(num_rounds) if number < least]
        if behind and self._membership.rank == 0:
            logging.warning(
                "`synchronize` leaves out the weights of ranks that have made only a part of the steps of the last "
                "training. These ranks get the mean of the others: %s.",
                ", ".join(f"rank {rank} {100 * num_rounds[rank] / max(num_rounds):.3g} %" for rank in behind),
            )
        return self._membership.rank not in behind

    def gather(self, value: object) -> list | None:
        """Brings every rank's value to rank 0. A collective; see `TreeCollectives.gather`."""
        self._membership.require_all("to gather")
        with self._called_by_users("`strategy.gather_reports`"):
            return self._trees.gather(self._next_called(), value)

    def share(self, data: bytes) -> list[bytes]:
        """Returns each rank's bytes, in the order of ranks. A collective.

        `all_gather` calls this on a thread of its own, for one value after the other, in the program's order.
        """
        if not self._in_session:
            return self._trees.all_gather(self._next_called(), data)
        self._num_gathered += 1
        return self._trees.all_gather("gathered", data, self._num_gathered - 1)

    def make_vector_mean(self, make: Callable[..., Mean], num_values: int) -> Mean:
        """Makes the mean of a float32 vector, for measurements. A collective. The caller closes the result.

        Args:
          make: The constructor, as `hop_tf.collectives.get_algorithm` returns it.
          num_values: Length of the vector.
        """
        self._membership.require_all("to measure")
        return make(
            self._membership,
            self._next_called(),
            sizes=[num_values],
            codecs=[Identity()],
            pool=self._pool,
        )

    def compare(self, signature: bytes) -> None:
        """Raises `MismatchError` unless rank 0 has the same signature. A collective of the session."""
        self._compare(_IN_SESSION, signature, self._next_in_session())

    @contextlib.contextmanager
    def _called_by_users(self, what: str) -> Iterator[None]:
        """Tells the others if this rank fails. Otherwise they would wait, and count this rank as lost."""
        try:
            with all_ranks_call(what):
                yield
        except HopError as error:
            if not self._membership.is_given_up:
                self._membership.leave(sent_rounds={}, reason=f"{type(error).__name__}: {error}", abort=True)
            raise

    def _next_in_session(self) -> int:
        self._joining.counts[_IN_SESSION] += 1
        return self._joining.counts[_IN_SESSION] - 1

    def _next_called(self) -> str:
        self._joining.counts[_CALLED] += 1
        return f"called {self._joining.counts[_CALLED]}"

    def _compare(self, name: str, mine: bytes, number: int | None = None) -> None:
        """Raises `MismatchError` unless rank 0 has the same signature. For name and number see `TreeCollectives`."""
        if self._membership.joining:
            return
        received = self._trees.broadcast(name, [np.frombuffer(mine, np.uint8)], number)
        if received is not None:
            compare(self._membership.transport, mine, 0, received.tobytes())
