"""The half of DTS in the training graph: what a rank has done in a window, and how a difference in it spreads.

SGD with momentum m and decoupled weight decay makes, with a[i] = lr[i] g[i] and rho[i] = 1 - lr[i] decay,

    v[i] = m v[i - 1] - a[i]
    w[i] = rho[i] w[i - 1] + v[i]           or, as Nesterov's, w[i] = rho[i] w[i - 1] + m v[i] - a[i]

All of this is linear. So what the gradients of a window contribute, S to v and A to w, follows the same lines from zero
at the window's begin to its end e:

    S[i] = m S[i - 1] - a[i]                (the paper's S, above Equation 11, times -lr)
    A[i] = rho[i] A[i - 1] + S[i]           or, as Nesterov's, A[i] = rho[i] A[i - 1] + m S[i] - a[i]

and differences dS, dA at step e are, at step e + d,

    M dS               in the velocity      M = m^d
    R dA + C dS        in the weights       R = rho[e + 1] ... rho[e + d]
                                            C[e] = 0;  C[i] = rho[i] C[i - 1] + m^(i - e)   (Nesterov: m^(i - e + 1))

In windows of one step S is A (with Nesterov, A / (1 + m)), and only A travels. Other optimizers have no S; A is what
they have added to the weights.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.codecs import TopK
from hop_tf.keras_hook import Descent, descent_of, weight_decays
from hop_tf.timing.dts import num_windows

# A threshold is sought among about so many values; all of them in models that have fewer.
_SAMPLE_SIZE = 1 << 17
# Whether a variable's weights decay is the first index of R and C.
_STAYS, _DECAYS = 0, 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When windows end, and when what all have done in them is applied; numbers may be tensors.

    Window k = 0, 1, ... ends when (k + 1) p steps are complete, and is applied D steps later.

    Attributes:
      delay: D.
      interval: p.
    """

    delay: int
    interval: int

    @property
    def num_slots(self) -> int:
        """Most windows that are under way at a time."""
        return num_windows(self.delay, self.interval)

    def ended(self, num_steps: int) -> tuple[bool, int]:
        """Whether a window ends when so many steps are complete, and which one that is."""
        return num_steps % self.interval == 0, num_steps // self.interval - 1

    def due(self, num_steps: int) -> tuple[bool, int]:
        """Whether a window is applied when so many steps are complete, and which one that is."""
        num_due = num_steps - self.delay
        return (num_due > 0) & (num_due % self.interval == 0), num_due // self.interval - 1

    def under_way(self, num_steps: int) -> range:
        """The windows that have ended by then and are not applied."""
        return range(max(0, num_steps - self.delay) // self.interval, num_steps // self.interval)


class Windows:
    """The accumulators S and A of an optimizer's variables, and the factors M, R, C of the windows under way.

    Args:
      optimizer: The optimizer.
      variables: What it updates.
      interval: Steps of a window.
      num_slots: How many windows may be under way; window k has slot k % num_slots.
      compensation: "exact": the lines above. "paper": w and v take m^d dA and m^d dS (Equation 13); without momentum w
        takes dA (Equation 12). "none": they take dA and dS as they are.
      selection: Which part of a window is handed out, and which one stays for later windows. None: all of it.

    Attributes:
      velocities: Those of the optimizer; none where it has no momentum.
      num_vectors: How many tensors of each variable a window hands out: A, and S where that tells more.
    """

    def __init__(
        self,
        optimizer: object,
        variables: Sequence[tf.Variable],
        *,
        interval: int,
        num_slots: int,
        compensation: str,
        selection: TopK | None,
    ):
        self._variables = variables
        self._optimizer = weakref.ref(optimizer)
        descent = self._descent()
        self.velocities = descent.velocities if descent else ()
        self._compensation = compensation
        self._selection = selection
        self._num_slots = num_slots
        # What stays for later windows makes them longer.
        self.num_vectors = 2 if self.velocities and (interval > 1 or selection is not None) else 1
        with tf.init_scope():
            self._a = [_zeros_like(variable) for variable in variables]
            self._s = [_zeros_like(velocity) for velocity in self.velocities]
            with tf.device("/cpu:0"):
                self._m = _factors([num_slots])
                self._r = _factors([2, num_slots])
                self._c = _factors([2, num_slots])

    def _descent(self) -> Descent | None:
        # A model can be compiled again with the same optimizer: what that is now counts.
        return descent_of(self._optimizer(), self._variables)

    def reset(self) -> None:
        """Begins anew, as after a `fit` that was broken off."""
        for accumulator in (*self._a, *self._s):
            accumulator.assign(tf.zeros_like(accumulator))

    def accumulate(self, before: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """Emits the ops that take a step's update into account.

        Args:
          before: The variables before the update.
          gradients: The gradients that were applied.
          rate: The learning rate.
        """
        descent, rho, kinds = self._descent(), self._rho(rate), self._kinds()
        for index, (variable, a) in enumerate(zip(self._variables, self._a, strict=True)):
            if kinds[index] == _DECAYS:
                a.assign(a * tf.cast(rho[_DECAYS], a.dtype))
            if descent is None:
                a.assign_add(variable - before[index])
            else:
                self._descend(descent, index, gradients[index], rate)
        factor = descent.momentum if descent else 0.0
        self._m.assign(factor * self._m)
        self._r.assign(rho[:, tf.newaxis] * self._r)
        spread = factor * self._m if descent and descent.nesterov else self._m
        self._c.assign(rho[:, tf.newaxis] * self._c + spread)

    def _descend(self, descent: Descent, index: int, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        """The optimizer's lines, without decay, in one pass over the values."""
        a = self._a[index]
        gradient, rate = tf.cast(gradient, a.dtype), tf.cast(rate, a.dtype)
        if not self.velocities:
            tf.raw_ops.ResourceApplyGradientDescent(var=a.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=a.handle,
            accum=self._s[index].handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(descent.momentum, a.dtype),
            use_nesterov=descent.nesterov,
        )

    def coast(self, rate: tf.Tensor) -> None:
        """Emits the ops of a step whose gradient is zero, for one that the optimizer has left out."""
        descent, rho = self._descent(), self._rho(rate)
        for variable, kind in zip(self._variables, self._kinds(), strict=True):
            variable.assign(variable * tf.cast(rho[kind], variable.dtype))
        for variable, velocity in zip(self._variables, self.velocities, strict=bool(self.velocities)):
            velocity.assign(descent.momentum * velocity)
            variable.assign_add(descent.momentum * velocity if descent.nesterov else velocity)

    def hand_out(self, window: tf.Tensor, everything: bool) -> list[tf.Tensor]:
        """Emits the ops that end a window.

        Args:
          window: Its number.
          everything: Whether nothing stays for later windows.

        Returns:
          A, then S, of each variable.
        """
        begins = tf.equal(tf.range(self._num_slots, dtype=tf.int64), window % self._num_slots)
        self._m.assign(tf.where(begins, tf.ones_like(self._m), self._m))
        self._r.assign(tf.where(begins, tf.ones_like(self._r), self._r))
        self._c.assign(tf.where(begins, tf.zeros_like(self._c), self._c))
        keeps = self._keeps(window) if self._selection and not everything else None
        taken = [self._take(accumulator, keeps, index) for index, accumulator in enumerate((*self._a, *self._s))]
        return taken[: self.num_vectors * len(self._variables)]

    def _take(self, accumulator: tf.Variable, keeps: Sequence[tf.Tensor] | None, index: int) -> tf.Tensor:
        """Empties an accumulator, but for what stays: there the window just goes on."""
        total, zeros = accumulator.read_value(), tf.zeros_like(accumulator)
        if keeps is None:
            accumulator.assign(zeros)
            return total
        stays = keeps[index % len(self._variables)]
        accumulator.assign(tf.where(stays, total, zeros))
        return tf.where(stays, zeros, total)

    def _keeps(self, window: tf.Tensor) -> list[tf.Tensor]:
        """Where A is not among the largest. Lin et al. call it local accumulation and momentum factor masking."""
        sizes = [tf.abs(tf.cast(a, tf.float32)) for a in self._a]
        values = tf.concat([tf.reshape(size, [-1]) for size in sizes], axis=0)
        sample = values[:: _next_prime(values.shape[0] // _SAMPLE_SIZE)]
        ratios = [self._selection.ratio_at(step) for step in range(self._selection.warmup_steps + 1)]
        ratio = tf.gather(ratios, tf.minimum(window, len(ratios) - 1))
        num_largest = tf.cast(tf.math.ceil(ratio * sample.shape[0]), tf.int32)
        threshold = tf.math.top_k(sample, num_largest).values[-1]
        return [size < threshold for size in sizes]  # What is not a number is handed out.

    def correct(self, window: tf.Tensor, differences: Sequence[tf.Tensor]) -> None:
        """Emits the ops that replace what this rank has done in a window by what all have done.

        Args:
          window: Its number.
          differences: Mean less own of what was handed out.
        """
        m, r, c = self._factors_of(window % self._num_slots)
        kinds = self._kinds()
        changes, sums = differences[: len(self._variables)], differences[len(self._variables) :]
        if self.num_vectors == 1 and self.velocities:
            descent = self._descent()
            sums = [change / (1.0 + descent.momentum * descent.nesterov) for change in changes]
        for index, (variable, change) in enumerate(zip(self._variables, changes, strict=True)):
            change = tf.cast(r[kinds[index]], change.dtype) * change
            if self.velocities:
                change += tf.cast(c[kinds[index]], change.dtype) * sums[index]
                self.velocities[index].assign_add(tf.cast(m, change.dtype) * sums[index])
            variable.assign_add(change)

    def _factors_of(self, slot: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        m, r, c = self._m[slot], self._r[:, slot], self._c[:, slot]
        if self._compensation == "exact":
            return m, r, c
        if self._compensation == "paper" and self.velocities:
            return m, tf.fill([2], m), tf.zeros_like(c)
        return tf.ones_like(m), tf.ones_like(r), tf.zeros_like(c)

    def _rho(self, rate: tf.Tensor) -> tf.Tensor:
        return 1.0 - tf.cast(rate, tf.float64) * tf.constant([0.0, max(self._decays())], tf.float64)

    def _decays(self) -> list[float]:
        return weight_decays(self._optimizer(), self._variables)

    def _kinds(self) -> list[int]:
        return [_DECAYS if decay else _STAYS for decay in self._decays()]


def _zeros_like(variable: tf.Variable) -> tf.Variable:
    with tf.device(variable.device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False, name="hop_tf_accumulator")


def _next_prime(number: int) -> int:
    """A stride that meets all columns of a layer's kernel in turn; 1 for numbers below 2."""
    if number < 2:
        return 1
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


def _factors(shape: Sequence[int]) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, tf.float64), trainable=False, name="hop_tf_factors")
