"""A recommender: embeddings of users and films (MovieLens), trained by workers of any speed and parameter servers.

    python -m hop_tf launch --num_workers=2 --num_ps=1 examples/recommender.py         # on one machine
    python -m hop_tf launch --hosts=node1,node2 --num_ps=1 examples/recommender.py     # on several, over ssh

The launcher starts this script on the server, too. There, the script stays in the line that makes the strategy, which
serves, and ends there. `--synthetic` uses generated ratings, and downloads nothing.
"""

import argparse
import pathlib

import keras
import numpy as np
from keras import layers

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=128, help="of all workers together")
parser.add_argument("--synthetic", action="store_true", help="train on generated ratings")
args = parser.parse_args()

URL = "https://files.grouplens.org/datasets/movielens/ml-latest-small.zip"

strategy = hop_tf.SHATParameterServerStrategy()  # A server stays in this line, and ends here.
keras.utils.set_random_seed(0)


def load_ratings():
    """Numbers of users and films from 0, in two columns, and ratings from 0 to 1."""
    generator = np.random.default_rng(0)
    if args.synthetic:
        users, films = generator.normal(size=(50, 3)), generator.normal(size=(80, 3))
        pairs = np.stack([generator.integers(50, size=4000), generator.integers(80, size=4000)], axis=1)
        ratings = 1 / (1 + np.exp(-np.sum(users[pairs[:, 0]] * films[pairs[:, 1]], axis=1)))
        return pairs, ratings.astype("float32")
    folder = pathlib.Path(keras.utils.get_file("ml-latest-small.zip", URL, extract=True))
    table = np.genfromtxt(next(folder.rglob("ratings.csv")), delimiter=",", skip_header=1)
    generator.shuffle(table)
    users, films = (np.unique(table[:, column], return_inverse=True)[1] for column in (0, 1))
    return np.stack([users, films], axis=1), (table[:, 2] / 5).astype("float32")


class Recommender(keras.Model):
    """The rating of a film by a user: the similarity of their vectors, plus a bias of each."""

    def __init__(self, num_users, num_films, width=16):
        super().__init__()
        regularizer = keras.regularizers.L2(1e-6)
        self.users = layers.Embedding(num_users, width, embeddings_regularizer=regularizer)
        self.films = layers.Embedding(num_films, width, embeddings_regularizer=regularizer)
        self.user_bias, self.film_bias = layers.Embedding(num_users, 1), layers.Embedding(num_films, 1)

    def call(self, pairs):
        user, film = pairs[:, 0], pairs[:, 1]
        match = keras.ops.sum(self.users(user) * self.films(film), axis=1, keepdims=True)
        return keras.ops.sigmoid(match + self.user_bias(user) + self.film_bias(film))


pairs, ratings = load_ratings()
split = len(pairs) * 9 // 10
with strategy.scope():
    model = Recommender(*(pairs.max(axis=0) + 1).tolist())
    model.compile(keras.optimizers.Adam(0.01), "mse")

history = model.fit(
    pairs[:split],
    ratings[:split],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(pairs[split:], ratings[split:]),
    verbose=2 if strategy.is_chief else 0,
)
strategy.synchronize(model)  # All workers get the servers' final model.
error = model.evaluate(pairs[split:], ratings[split:], verbose=0)
print(f"mean squared error: {error:.4f}; of the mean rating: {np.var(ratings[split:]):.4f}")
