"""Callbacks for `model.fit`."""

from __future__ import annotations

import keras

from hop_tf.keras_hook.backups import AtomicBackupAndRestore

__all__ = ["AtomicBackupAndRestore", "MetricAverage"]


class MetricAverage(keras.callbacks.Callback):
    """Averages metrics over all ranks at the end of each epoch, so that callbacks decide alike on all ranks.

        model.fit(x, y, callbacks=[hop_tf.callbacks.MetricAverage(), keras.callbacks.EarlyStopping("loss")])

    Each callback, and `History`, then gets the mean over the ranks of every metric in its `logs`, validation metrics
    included. The place in the list does not matter. Logs of single batches stay those of the rank.

    Pass it on all ranks. Strategies whose ranks wait for each other anyhow (Pipe-SGD, DTS, and Canary and SHAT with
    `consistency="bsp"`) average without it. Under the others, all ranks now wait for the slowest at the end of each
    epoch.

    - The number of steps in an epoch must be known: pass `steps_per_epoch` where Keras cannot tell it. Ranks that make
      another number of steps have means of their own, with a warning.
    - A rank that has left, or was lost, is not waited for. In the epoch in which a rank is lost, some ranks may have
      its metrics and others not.
    - A process that was started again has no part in the means of the `fit` that it joins, and gets its own metrics.

    Without a strategy of several ranks it does nothing.
    """
