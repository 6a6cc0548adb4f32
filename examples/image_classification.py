"""Image classification: a residual network on CIFAR-10, with augmented images from tf.data.

    python -m hop_tf launch --num_workers=2 examples/image_classification.py           # on one machine
    python -m hop_tf launch --hosts=node1,node2 examples/image_classification.py       # on several, over ssh

Each rank reads and augments its own share of the images. `--synthetic` uses generated images, and downloads nothing.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch_size", type=int, default=128, help="of all ranks together")
parser.add_argument("--synthetic", action="store_true", help="train on generated images")
args = parser.parse_args()

keras.utils.set_random_seed(0)


def synthetic_data(num_rows):
    """Noise with a color for each of the 10 classes."""
    generator = np.random.default_rng(0)
    colors = generator.uniform(50, 200, size=(10, 1, 1, 3))
    y = generator.integers(10, size=(num_rows, 1))
    x = colors[y[:, 0]] + generator.normal(0, 30, size=(num_rows, 32, 32, 3))
    return x.clip(0, 255).astype("uint8"), y


def load_data():
    """Images for training and for validation, with their labels."""
    if args.synthetic:
        return synthetic_data(320), synthetic_data(64)
    return keras.datasets.cifar10.load_data()


def convolution(x, filters, size, stride=1):
    """A convolution, normalized with the rank's part of the batch."""
    x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9)(x)


def residual_block(x, filters, stride):
    """Two convolutions, and a skip connection."""
    y = layers.ReLU()(convolution(x, filters, 3, stride))
    y = convolution(y, filters, 3)
    return layers.ReLU()(layers.add([y, x if stride == 1 else convolution(x, filters, 1, stride)]))


def build_model():
    """Three residual blocks of 16, 32 and 64 filters."""
    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolution(layers.Rescaling(1 / 255)(inputs), 16, 3))
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        x = residual_block(x, filters, stride)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


(x_train, y_train), validation_data = load_data()
augmentation = keras.Sequential([layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1)])


def training_data(context):
    """Batches of this rank: its share of the images, augmented."""
    images = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    images = images.shard(context.num_input_pipelines, context.input_pipeline_id)
    images = images.shuffle(10_000).repeat().batch(context.get_per_replica_batch_size(args.batch_size))
    images = images.map(lambda x, y: (augmentation(x, training=True), y), tf.data.AUTOTUNE)
    return images.prefetch(tf.data.AUTOTUNE)


strategy = hop_tf.PipeSGDStrategy(codec="int8")  # Reads TF_CONFIG, which the launcher sets.
steps_per_epoch = len(x_train) // args.batch_size
with strategy.scope():
    model = build_model()
    rate = 0.1 * args.batch_size / 128
    schedule = keras.optimizers.schedules.CosineDecay(rate, args.epochs * steps_per_epoch)
    model.compile(
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9, weight_decay=5e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    strategy.distribute_datasets_from_function(training_data),
    steps_per_epoch=steps_per_epoch,
    epochs=args.epochs,
    validation_data=validation_data,
    verbose=2 if strategy.is_chief else 0,
)
if strategy.is_chief:  # All ranks have the same weights now, so one of them saves.
    model.save("image_classification.keras")
