"""Callbacks for `model.fit`."""

from __future__ import annotations

import keras

from hop_tf.keras_hook.backups import AtomicBackupAndRestore

__all__ = ["AtomicBackupAndRestore", "MetricAverage"]


class MetricAverage(keras.callbacks.Callback):
    """Takes metrics over all ranks at the end of each epoch, so that callbacks decide alike on all ranks.

        model.fit(x, y, callbacks=[hop_tf.callbacks.MetricAverage(), keras.callbacks.EarlyStopping("loss")])

    Each callback, and `History`, then gets the same `logs` on all ranks. The place in the list does not matter. Logs of
    single batches stay those of the rank.

    - Training metrics of Keras are those of the data of all ranks: their states are sums, which add up over the ranks.
      So AUC, precision or F1 are exact. This also holds for your own metrics that you mark by
      `hop_tf.state(metric, "sum")`. Every other log is the mean over the ranks.
    - If a callback stops the training at the end of an epoch on one rank, all ranks stop.

    Pass it on all ranks. Strategies whose ranks wait for each other anyhow (Pipe-SGD, DTS, and Canary and SHAT with
    `consistency="bsp"`) do all this without it. Under the others, all ranks now wait for the slowest at the end of each
    epoch.

    - Ranks agree if they have made the same number of steps when their epochs end. Ranks that have made another number
      agree among themselves, with a warning. Data may be of unknown length.
    - A rank that has left, or was lost, is not waited for. In the epoch in which a rank is lost, some ranks may have
      its metrics and others not.
    - An epoch in which a rank has made no step counts for nothing. A rank that a callback stops within an epoch ends
      alone, and keeps its own metrics of that epoch.
    - A process that was started again has no part in the `fit` that it joins, and gets its own metrics.

    Without a strategy of several ranks it does nothing.
    """
