"""Text classification: a small transformer tells whether reviews of films (IMDB) are positive.

    python -m hop_tf launch --num_workers=2 examples/text_classification.py            # on one machine
    python -m hop_tf launch --hosts=node1,node2 examples/text_classification.py        # on several, over ssh

All ranks pass the same arrays to `fit`, which divides every batch among them. `--synthetic` uses generated reviews,
and downloads nothing.
"""

import argparse

import keras
import numpy as np
from keras import layers

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=64, help="of all ranks together")
parser.add_argument("--synthetic", action="store_true", help="train on generated reviews")
args = parser.parse_args()

# The size of the vocabulary (the most frequent words), and the length of a review in words.
VOCABULARY, LENGTH = (100, 40) if args.synthetic else (20_000, 200)

keras.utils.set_random_seed(0)


def synthetic_data(num_rows):
    """Random words. Positive reviews have more even numbers among them."""
    generator = np.random.default_rng(num_rows)
    y = generator.integers(2, size=num_rows)
    words = generator.integers(50, size=(num_rows, LENGTH)) * 2
    is_odd = generator.random((num_rows, LENGTH)) < np.where(y == 1, 0.3, 0.7)[:, None]
    return words + is_odd, y


def load_data():
    """Reviews as the indices of their words, all of one length, with labels: for training and for validation."""
    if args.synthetic:
        return synthetic_data(768), synthetic_data(128)
    parts = keras.datasets.imdb.load_data(num_words=VOCABULARY)
    return [(keras.utils.pad_sequences(x, maxlen=LENGTH), y) for x, y in parts]


class TokenAndPositionEmbedding(layers.Layer):
    """A vector for each word, and one for each position."""

    def __init__(self, width):
        super().__init__()
        self.tokens = layers.Embedding(VOCABULARY, width)
        self.positions = layers.Embedding(LENGTH, width)

    def call(self, x):
        return self.tokens(x) + self.positions(keras.ops.arange(LENGTH))


def transformer_block(x, width, num_heads):
    """Attention, and two dense layers, each with a skip connection."""
    attention = layers.MultiHeadAttention(num_heads, width // num_heads)(x, x)
    x = layers.LayerNormalization()(layers.add([x, layers.Dropout(0.1)(attention)]))
    y = layers.Dense(width)(layers.Dense(width, activation="relu")(x))
    return layers.LayerNormalization()(layers.add([x, layers.Dropout(0.1)(y)]))


def build_model():
    """One block, the mean over all positions, and a decision."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = transformer_block(TokenAndPositionEmbedding(32)(inputs), width=32, num_heads=2)
    x = layers.Dense(20, activation="relu")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))


(x_train, y_train), validation_data = load_data()

strategy = hop_tf.PipeSGDStrategy(codec="truncate16")  # Reads TF_CONFIG, which the launcher sets.
with strategy.scope():
    model = build_model()
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=["accuracy"])

history = model.fit(
    x_train,
    y_train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=validation_data,
    verbose=2 if strategy.is_chief else 0,
)
