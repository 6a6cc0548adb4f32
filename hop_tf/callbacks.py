"""Callbacks for `model.fit`."""

from __future__ import annotations

import keras

from hop_tf.keras_hook.backups import AtomicBackupAndRestore

__all__ = ["AtomicBackupAndRestore", "MetricAverage"]


class MetricAverage(keras.callbacks.Callback):
    """Combines metrics over all ranks at the end of each epoch, so that callbacks decide the same on all ranks.

        model.fit(x, y, callbacks=[hop_tf.callbacks.MetricAverage(), keras.callbacks.EarlyStopping("loss")])

    Each callback, and `History`, then gets the same `logs` on all ranks. The place in the list does not matter. Logs of
    single batches stay those of the rank.

    - Training metrics of Keras become the metrics of the data of all ranks: their states are sums, which add up over
      the ranks. So AUC, precision or F1 are exact. The same holds for your own metrics that you mark by
      `hop_tf.state(metric, "sum")`. Every other log is the mean over the ranks.
    - If a callback stops the training at the end of an epoch on one rank, all ranks stop.

    Pass the callback on all ranks. Strategies whose ranks always wait for each other (Pipe-SGD, DTS, and Canary and
    SHAT with `consistency="bsp"`) do all this without it. Under the others, the callback makes all ranks wait for the
    slowest at the end of each epoch.

    - Ranks agree if they have made the same number of steps when their epochs end. Ranks that have made another number
      agree among themselves, with a warning. Data may be of unknown length.
    - Nobody waits for a rank that has left or was lost. In the epoch in which a rank is lost, some ranks may count its
      metrics and others not.
    - An epoch in which a rank has made no step does not count. A rank that a callback stops within an epoch ends
      alone, and keeps its own metrics of that epoch.
    - A process that was started again takes no part in the averages of the `fit` that it joins, and gets its own
      metrics.

    Without a strategy of several ranks, the callback does nothing.
    """
