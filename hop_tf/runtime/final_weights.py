"""`FinalWeights`: weights that callbacks assign when `fit` has ended, in place of the last step's."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.errors import HopError, PeerLostError
from hop_tf.keras_hook.shared_paths import flat_callbacks
from hop_tf.membership.session import Membership
from hop_tf.runtime.rank_collectives import RankCollectives

_CLAIM = "callbacks that may change weights when `fit` has ended"
# Keras's own callbacks that change weights then.
_RESTORING = (keras.callbacks.EarlyStopping, keras.callbacks.SwapEMAWeights)


class FinalWeights:
    """Detects weights that callbacks have changed in `on_train_end`. Synchronous ranks average these weights.

    A callback keeps the weights that its rank held at the end of an epoch. If ranks hold different weights within
    `fit`, as under DTS, each rank would end with its own weights. A merge at the end of that epoch would have given the
    mean of these weights.

    Args:
      callbacks: As `fit` takes them.

    Attributes:
      claims: The claims for the session. If any rank makes a claim, all ranks have to agree on the weights after `fit`.
    """

    def __init__(self, callbacks: object):
        may_change = any(map(_may_change_weights, flat_callbacks(callbacks)))
        self.claims = [_CLAIM] if may_change else []
        self._variables: Sequence[tf.Variable] = ()
        self._values: list[tf.Tensor] = []

    def is_needed(self, owners: Collection[str]) -> bool:
        """True if any rank has such callbacks. `owners` are the claims of all ranks."""
        return _CLAIM in owners

    def note(self, variables: Sequence[tf.Variable]) -> None:
        """Keeps the weights as the strategy leaves them, until a few callbacks have run."""
        self._variables = [variable for variable in variables if variable.dtype.is_floating]
        self._values = [variable.read_value() for variable in self._variables]

    def take_changed(self) -> bool:
        """Returns True if callbacks have changed a value since `note`. Forgets the values."""
        values, self._values = self._values, []
        return any(not _is_same(variable, value) for variable, value in zip(self._variables, values, strict=True))

    def warn(self, rank: int) -> None:
        """Warns that this rank's weights are its own. Ranks that do not wait for each other cannot agree on weights."""
        logging.warning(
            "rank %d: a callback has replaced the weights at the end of `fit`, as "
            "EarlyStopping(restore_best_weights=True) does. The new weights are this rank's own. Call "
            "`strategy.synchronize(model)` on all ranks before you save the model: it averages the weights. (Under "
            "SHAT it brings back the servers' last model. Save the model of one rank instead.) With "
            "hop_tf.callbacks.MetricAverage() all ranks keep the weights of the same epoch.",
            rank,
        )

    def agree(self, membership: Membership, num_steps: int, collectives: RankCollectives) -> None:
        """Averages the weights over the ranks, if callbacks have changed those of any rank. A collective, after `fit`.

        A rank that has ended early waits for the others here. It has left the session, so the others continue without
        it.

        Args:
          membership: This rank's membership.
          num_steps: Number of steps that this rank has made.
          collectives: This rank's collectives.
        """
        changed = self.take_changed()
        try:
            _wait_for_ends(membership)
            of_ranks = [json.loads(each) for each in collectives.share(self._describe(changed, num_steps))]
            if not any(changed for changed, _, _ in of_ranks) or len({digest for _, _, digest in of_ranks}) == 1:
                return
            if len({steps for _, steps, _ in of_ranks}) == 1:
                if membership.rank == 0:
                    logging.info(
                        "Callbacks have changed weights at the end of `fit`. All ranks take the mean of these weights."
                    )
                collectives.average(self._variables)
                return
        except HopError as error:
            logging.warning(
                "rank %d: ranks do not average the weights that callbacks have restored: %s", membership.rank, error
            )
        if changed:
            self.warn(membership.rank)

    def _describe(self, changed: bool, num_steps: int) -> bytes:
        digest = 0
        for variable in self._variables:
            digest = zlib.crc32(np.asarray(variable.read_value()).tobytes(), digest)
        return json.dumps([changed, num_steps, digest]).encode()


def _wait_for_ends(membership: Membership) -> None:
    """Waits until all other ranks have left the session. Raises PeerLostError unless all of their fits ended well."""
    others = set(range(membership.world_size)) - {membership.rank}
    for rank in others:
        membership.transport.connect(rank)  # From now on its silence counts.
    membership.wait(lambda: others - membership.departed(), operation="agree on the weights at the end of `fit`")
    for rank in sorted(others):
        departure = membership.departure(rank)
        if departure is not None and departure.reason:
            raise PeerLostError(f"rank {rank} has ended its `fit` early: {departure.reason}")


def _may_change_weights(callback: keras.callbacks.Callback) -> bool:
    """True unless `on_train_end` is a method of Keras or hop_tf that is known to leave weights as they are."""
    method = callback.on_train_end
    module = getattr(getattr(method, "__func__", method), "__module__", None) or ""
    if not module.startswith(("keras.", "hop_tf.")):
        return True
    return isinstance(callback, _RESTORING) and getattr(callback, "restore_best_weights", True)


def _is_same(variable: tf.Variable, value: tf.Tensor) -> bool:
    now, before = np.asarray(variable.read_value()), np.asarray(value)
    return now.ctypes.data == before.ctypes.data or np.array_equal(now, before, equal_nan=True)
