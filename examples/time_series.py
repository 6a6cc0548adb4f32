"""Time series: a recurrent network forecasts the next day, with callbacks that decide alike on all ranks.

    python -m hop_tf launch --num_workers=2 examples/time_series.py                    # on one machine
    python -m hop_tf launch --hosts=node1,node2 examples/time_series.py                # on several, over ssh

The data are generated: the load of a power grid, hour by hour. Under Pipe-SGD, callbacks get the means of metrics over
all ranks. So `EarlyStopping` and `ReduceLROnPlateau` decide alike on all ranks.
"""

import argparse

import keras
import numpy as np

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=30, help="at most")
parser.add_argument("--days", type=int, default=1000)
parser.add_argument("--batch_size", type=int, default=64, help="of all ranks together")
args = parser.parse_args()

PAST, FUTURE = 48, 24  # Hours that the network sees, and forecasts.

keras.utils.set_random_seed(0)

# Daily and weekly cycles, and noise that lasts for some hours. All ranks make the same values.
hours = np.arange(24 * args.days)
noise = np.convolve(np.random.default_rng(0).normal(size=len(hours)), np.ones(6) / 6, mode="same")
load = np.sin(2 * np.pi * hours / 24) + 0.5 * (hours // 24 % 7 < 5) + 0.3 * noise
load = ((load - load.mean()) / load.std()).astype("float32")


def windows(values, shuffle):
    """Batches of past values, each with its future values. The seed makes all ranks shuffle alike."""
    targets = np.lib.stride_tricks.sliding_window_view(values, FUTURE)[PAST:]
    return keras.utils.timeseries_dataset_from_array(
        values[:-FUTURE, np.newaxis], targets, PAST, batch_size=args.batch_size, shuffle=shuffle, seed=0
    )


split = len(load) * 4 // 5
training, validation = windows(load[:split], shuffle=True), windows(load[split:], shuffle=False)

strategy = hop_tf.PipeSGDStrategy()  # Reads TF_CONFIG, which the launcher sets.
with strategy.scope():
    model = keras.Sequential([keras.Input((PAST, 1)), keras.layers.GRU(32), keras.layers.Dense(FUTURE)])
    model.compile(keras.optimizers.Adam(0.005), "mse", metrics=["mae"])

history = model.fit(
    training,
    epochs=args.epochs,
    validation_data=validation,
    callbacks=[
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=2),
        keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
    ],
    verbose=2 if strategy.is_chief else 0,
)
same_as_yesterday = np.mean(np.abs(load[split + 24 :] - load[split:-24]))
print(f"mean error: {history.history['val_mae'][-1]:.3f}; of 'as yesterday': {same_as_yesterday:.3f}")
