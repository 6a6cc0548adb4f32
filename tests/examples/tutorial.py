"""A program as in TensorFlow's tutorial on training with several workers and Keras, in our own words.

The images are generated. `migration_test.py` changes the line that makes the strategy, and nothing else.
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf

PER_WORKER_BATCH_SIZE = 16


def digits_dataset(batch_size):
    """Batches of images, with their labels."""
    generator = np.random.default_rng(0)
    patterns = generator.uniform(size=(10, 28, 28))
    labels = generator.integers(10, size=512)
    images = (patterns[labels] + generator.normal(0, 0.3, size=(512, 28, 28))).astype("float32")
    return tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(512).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    """A small convolutional network."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(28, 28)),
            tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.02),
        metrics=["accuracy"],
    )
    return model


def is_chief(task_type, task_id):
    """True if the task is the one whose files are kept."""
    return task_type == "chief" or (task_type == "worker" and task_id == 0)


def write_path(path, task_type, task_id):
    """Returns the path at which a task saves: `path` for the chief, a temporary path for the others."""
    folder, name = os.path.split(path)
    if not is_chief(task_type, task_id):
        folder = os.path.join(folder, f"worker_{task_id}")
        tf.io.gfile.makedirs(folder)
    return os.path.join(folder, name)


folder = sys.argv[1]
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = tf.distribute.MultiWorkerMirroredStrategy()

global_batch_size = PER_WORKER_BATCH_SIZE * num_workers
multi_worker_dataset = digits_dataset(global_batch_size)

with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()

history = multi_worker_model.fit(
    multi_worker_dataset,
    epochs=3,
    steps_per_epoch=16,
    callbacks=[tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(folder, "backup"))],
)

# Save the model. All workers do, and those that are not the chief remove theirs.
task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
model_path = write_path(os.path.join(folder, "model.keras"), task_type, task_id)
multi_worker_model.save(model_path)
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
checkpoint_folder = write_path(os.path.join(folder, "checkpoint"), task_type, task_id)
tf.train.CheckpointManager(checkpoint, checkpoint_folder, max_to_keep=1).save()
if not is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(model_path))
