"""Tests of calls of callbacks in a restarted rank."""

import keras
from absl.testing import absltest

from hop_tf.keras_hook.catching_up import not_called_while_behind


class _Hooks:
    """Hooks of a rank that is behind for the first `num_batches` batches."""

    def __init__(self, num_batches):
        self.num_batches_left = num_batches

    may_fall_behind = False

    @property
    def is_behind(self):
        return self.num_batches_left > 0


def _heard(hooks, make_callbacks, num_epochs=3, num_batches=4):
    """Returns the calls of a callback's methods in an emulated `fit`."""
    heard = []
    names = ("on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end")
    callback = keras.callbacks.LambdaCallback(
        **{name: lambda number, logs, name=name: heard.append((name[3:], number)) for name in names}
    )
    played = keras.callbacks.CallbackList([callback])
    with not_called_while_behind(make_callbacks(callback), hooks):
        for epoch in range(num_epochs):
            played.on_epoch_begin(epoch, {})
            for batch in range(num_batches):
                played.on_train_batch_begin(batch, {})
                hooks.num_batches_left -= 1
                played.on_train_batch_end(batch, {})
            played.on_epoch_end(epoch, {})
    played.on_epoch_begin(99, {})  # Afterwards it is what it was.
    return heard


class CatchingUpTest(absltest.TestCase):
    def test_hears_nothing_of_what_is_passed_over(self):
        for make in (lambda callback: callback, lambda callback: [[callback]]):
            heard = _heard(_Hooks(6), make)
            batches = [(f"train_batch_{what}", batch) for batch in range(4) for what in ("begin", "end")]
            second = [("epoch_begin", 1), *batches[4:], ("epoch_end", 1)]
            third = [("epoch_begin", 2), *batches, ("epoch_end", 2)]
            self.assertEqual(heard, [*second, *third, ("epoch_begin", 99)])

    def test_hears_all_of_a_rank_that_is_not_behind(self):
        heard = _heard(_Hooks(0), lambda callback: callback)
        self.assertLen(heard, 3 * (1 + 8 + 1) + 1)

    def test_there_may_be_none(self):
        self.assertLen(_heard(_Hooks(6), lambda callback: None), 31)


if __name__ == "__main__":
    absltest.main()
