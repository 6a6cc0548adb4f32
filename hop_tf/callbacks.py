"""Callbacks for `model.fit`."""

from __future__ import annotations

import keras

from hop_tf.keras_hook.backups import AtomicBackupAndRestore

__all__ = ["AtomicBackupAndRestore", "MetricAverage"]


class MetricAverage(keras.callbacks.Callback):
    """Combines metrics over all ranks at the end of each epoch, so that callbacks make equal decisions on all ranks.

        model.fit(x, y, callbacks=[hop_tf.callbacks.MetricAverage(), keras.callbacks.EarlyStopping("loss")])

    Each callback, and `History`, then gets the same `logs` on all ranks. The callback may be anywhere in the list. Logs
    of single batches remain the rank's own.

    - Training metrics of Keras become metrics over the data of all ranks: their states are sums, which are added up
      over the ranks. So AUC, precision or F1 are exact. The same holds for your own metrics that you mark by
      `hop_tf.state(metric, "sum")`. Every other log is the mean over the ranks.
    - If a callback stops the training at the end of an epoch on one rank, all ranks stop.

    Pass the callback on all ranks. Strategies whose ranks always wait for each other (Pipe-SGD, DTS, and Canary and
    SHAT with `consistency="bsp"`) do all this without it. Under the others, the callback makes all ranks wait for the
    slowest at the end of each epoch.

    - Ranks combine metrics if they have made the same number of steps when their epochs end. Ranks with a different
      number of steps combine metrics among themselves, with a warning. Data may be of unknown length.
    - No rank waits for a rank that has left or was lost. In the epoch in which a rank is lost, its metrics may count on
      some ranks and not on others.
    - If a rank has made no step in an epoch, its training metrics of that epoch do not count. A rank that a callback
      stops within an epoch ends alone, and keeps its own metrics of that epoch.
    - A restarted process takes no part in the averages of the `fit` that it joins, and gets its own metrics.

    Without a strategy of several ranks, the callback does nothing.
    """
