"""A GAN: two networks with an optimizer each, trained in one `train_step`, draw handwritten digits (MNIST).

    python -m hop_tf launch --num_workers=2 examples/gan.py                            # on one machine
    python -m hop_tf launch --hosts=node1,node2 examples/gan.py                        # on several, over ssh

The model is the same as without hop_tf. Within `fit`, a rank computes the loss of its own part of the batch. The
gradients of both optimizers are averaged over the ranks. `--synthetic` uses generated images, and downloads nothing.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=128, help="of all ranks together")
parser.add_argument("--synthetic", action="store_true", help="train on generated images")
args = parser.parse_args()

NOISE = 64  # Length of the vector from which the generator draws an image.

keras.utils.set_random_seed(0)


def load_images():
    """Images of 28 x 28 pixels, from 0 to 1."""
    if args.synthetic:  # White squares.
        images = np.zeros((512, 28, 28, 1), "float32")
        for image, (top, left) in zip(images, np.random.default_rng(0).integers(4, 12, (512, 2)), strict=True):
            image[top : top + 12, left : left + 12] = 1
        return images
    (x, _), _ = keras.datasets.mnist.load_data()
    return x[..., np.newaxis].astype("float32") / 255


class GAN(keras.Model):
    """Trains a generator and a discriminator against each other."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(32, 4, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Conv2D(64, 4, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(7 * 7 * 64, activation="relu"),
                layers.Reshape((7, 7, 64)),
                layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
            ]
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, real):
        noise = tf.random.normal([tf.shape(real)[0], NOISE])
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            real_logits, fake_logits = self.discriminator(real), self.discriminator(fake)
            d_loss = self.loss_fn(tf.ones_like(real_logits), real_logits)
            d_loss += self.loss_fn(tf.zeros_like(fake_logits), fake_logits)
            g_loss = self.loss_fn(tf.ones_like(fake_logits), fake_logits)
        d_weights, g_weights = self.discriminator.trainable_weights, self.generator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, d_weights), d_weights)
        self.g_optimizer.apply(tape.gradient(g_loss, g_weights), g_weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


strategy = hop_tf.PipeSGDStrategy()  # Reads TF_CONFIG, which the launcher sets.
with strategy.scope():
    model = GAN()
    model.compile(keras.optimizers.Adam(3e-4, beta_1=0.5), keras.optimizers.Adam(3e-4, beta_1=0.5))

images = load_images()
history = model.fit(images, batch_size=args.batch_size, epochs=args.epochs, verbose=2 if strategy.is_chief else 0)
drawn = model.generator.predict(np.random.default_rng(1).normal(size=(16, NOISE)), verbose=0)
if strategy.is_chief:
    for number, image in enumerate(drawn):
        keras.utils.save_img(f"gan_{number}.png", image)
