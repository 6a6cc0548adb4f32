"""Random faults at random moments, in real processes, under every strategy.

What happens to whom, and when, is drawn: `HOP_TF_SCHEDULE_SEED` says from which seed. `make test` runs one case of each
kind; `make stress` runs all, for each seed, and ends with a table of what was seen (see `tests/conftest.py`).

Nothing here depends on how long something takes, but for the bound of the whole case: no process may hang.
"""

import dataclasses
import functools
import json
import os
import random
import signal
import socket
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.errors import HopError
from hop_tf.testing import MultiProcessRunner
from support import MEMBERS, Member

_SEED = int(os.environ.get("HOP_TF_SCHEDULE_SEED", "0"))
_NUM_RANKS = 3
_NUM_STEPS = 60
_NUM_EPOCHS = 2
_BATCH_SIZE = 6
_TIMEOUT_SECONDS = 5.0
_CASE_SECONDS = 120.0
_STEP_SECONDS = 0.03  # Emulated: what is drawn happens in the middle of the training.
_LAST_MOMENT = 100  # The step at which something happens, at the latest.
_MEMBERS = {
    **{name: member for name, member in MEMBERS.items() if name != "own"},
    "hop_tolerant": Member(
        lambda **arguments: hop_tf.HopStrategy(topology="complete", num_backup_workers=1, **arguments),
        goes_on_without_lost=True,
    ),
    **{
        f"{name}_continue": dataclasses.replace(
            MEMBERS[name],
            make=functools.partial(MEMBERS[name].make, on_peer_loss="continue"),
            goes_on_without_lost=True,
        )
        for name in ("pipe_sgd", "dts", "canary_synchronous")
    },
}
# What happens to the victim, and whether the others lose it.
_KINDS = {
    "kill": True,
    "freeze": True,
    "exception": True,
    "exit": True,
    "pause": False,  # For less than the timeout.
    "garbage": False,  # Strangers send it to the victim's port.
    "strangers": False,  # They connect, and say nothing.
}


@dataclasses.dataclass(frozen=True)
class _Case:
    """What happens.

    Attributes:
      name: The strategy's, in `_MEMBERS`.
      kind: One of `_KINDS`.
      victim: To which rank.
      step: When the victim has made so many steps.
      delay: How many seconds later.
    """

    name: str
    kind: str
    victim: int
    step: int
    delay: float

    @classmethod
    def draw(cls, kind, number):
        rng = random.Random(f"{_SEED}/{kind}/{number}")
        names = list(_MEMBERS)
        return cls(
            name=names[(number + _SEED) % len(names)],
            kind=kind,
            victim=rng.randrange(_NUM_RANKS),
            step=rng.randrange(1, _LAST_MOMENT),
            delay=rng.uniform(0.0, 0.1),
        )


class _Progress(keras.callbacks.Callback):
    """Says which step was made and when; raises or exits where that is what happens."""

    def __init__(self, strategy, case):
        super().__init__()
        self.num_steps = 0
        self._happens = case.step if strategy.rank == case.victim else None
        self._kind = case.kind

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        print(f"step {self.num_steps} at {time.monotonic()}", flush=True)
        if self.num_steps == self._happens:
            if self._kind == "exception":
                raise MemoryError("on purpose")
            if self._kind == "exit":
                raise SystemExit(3)


def _train(case):
    """What `fit` raised, when; how many steps were made; and the loss before and after."""
    case = _Case(**case)
    options = hop_tf.CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS, cluster_token="secret")
    strategy = _MEMBERS[case.name].make(communication_options=options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.02), "mse")
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
    progress, error = _Progress(strategy, case), ""
    try:
        model.fit(x, y, batch_size=_BATCH_SIZE, epochs=_NUM_EPOCHS, shuffle=False, verbose=0, callbacks=[progress])
    except HopError as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(f"ended at {time.monotonic()}", flush=True)
    loss = float(np.mean((model(x, training=False).numpy() - y) ** 2))
    weights = model.get_weights()
    strategy.shutdown()
    return {"error": error, "steps": progress.num_steps, "loss": loss, "weights": weights}


def _disturb(runner, case, addresses):
    """Lets it happen. Returns when it did."""
    if case.kind in ("exception", "exit"):
        return None
    time.sleep(case.delay)
    now = time.monotonic()
    match case.kind:
        case "kill":
            runner.kill(case.victim)
        case "freeze":
            runner.pause(case.victim)
        case "pause":
            runner.pause(case.victim)
            time.sleep(_TIMEOUT_SECONDS / 3)
            runner.resume(case.victim)
        case "garbage":
            _send(addresses[case.victim], random.Random(case.step).randbytes(3000), num_connections=20)
        case "strangers":
            _send(addresses[case.victim], b"", num_connections=100)
    return now


def _send(address, data, num_connections):
    host, _, port = address.rpartition(":")
    sockets = []
    try:
        for _ in range(num_connections):
            sockets.append(socket.create_connection((host, int(port)), 5.0))
            sockets[-1].sendall(data)
        time.sleep(0.3)
    except OSError:
        pass  # The other side has closed it.
    finally:
        for each in sockets:
            each.close()


def _moments(output, what):
    return [float(line.rpartition(" ")[2]) for line in output.splitlines() if line.startswith(what)]


class RandomFaultsTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.fixture(autouse=True)
    def _records(self, record_property):
        self._record = record_property

    @parameterized.parameters(*((kind, number) for number in range(len(_MEMBERS)) for kind in _KINDS))
    @pytest.mark.stress(after=len(_KINDS))
    def test_no_hang_no_wrong_result(self, kind, number):
        case = _Case.draw(kind, number)
        print(case)
        member = _MEMBERS[case.name]
        with MultiProcessRunner(
            _train,
            _NUM_RANKS,
            num_ps=member.num_ps,
            args=(dataclasses.asdict(case),),
            env={"HOP_TF_STEP_SECONDS": str(_STEP_SECONDS)},
            timeout_seconds=_CASE_SECONDS,
        ) as runner:
            runner.wait_for_output(case.victim, f"^step {case.step} ")
            disturbed_at = _disturb(runner, case, runner.addresses)
            if case.kind == "freeze":  # It stays so until the others have ended.
                thread = threading.Timer(3 * _TIMEOUT_SECONDS, lambda: runner.kill(case.victim))
                thread.start()
                self.addCleanup(thread.join)
            results = runner.join()
        loses = _KINDS[case.kind]
        self._check(case, member, results, loses)
        self._note(case, results, disturbed_at, loses)

    def _check(self, case, member, results, loses):
        others = [results[rank] for rank in range(_NUM_RANKS) if rank != case.victim or not loses]
        codes = {"kill": -signal.SIGKILL, "freeze": -signal.SIGKILL, "exception": 1, "exit": 3}
        self.assertEqual(results[case.victim].exit_code, codes.get(case.kind, 0))
        self.assertEqual([result.exit_code for result in others], [0] * len(others))
        raises = loses and not member.goes_on_without_lost
        for value in (result.value for result in others):
            if raises:
                self.assertRegex(value["error"], f"^Peer(Lost|Failed)Error: .*rank {case.victim}")
                continue
            self.assertEqual(value["error"], "")
            self.assertLess(value["loss"], 5.0)  # 14 at the beginning.
            self.assertTrue(all(np.isfinite(each).all() for each in value["weights"]))
            if member.is_in_lock_step:
                self.assertEqual(value["steps"], _NUM_STEPS * _NUM_EPOCHS)
        if member.is_in_lock_step and not raises:
            for result in others[1:]:
                self.assertAllEqual(result.value["weights"][0], others[0].value["weights"][0])

    def _note(self, case, results, disturbed_at, loses):
        """For the table: how long it took until the others had noticed, or went on."""
        if disturbed_at is None:
            disturbed_at = _moments(results[case.victim].output, "step")[-1]
        other = results[(case.victim + 1) % _NUM_RANKS].output
        moments = [at for at in (*_moments(other, "step"), *_moments(other, "ended")) if at > disturbed_at]
        gaps = np.diff([disturbed_at, *sorted(moments)])
        seconds = float(gaps.max()) if gaps.size else 0.0
        self._record("fault", json.dumps({"kind": case.kind, "strategy": case.name, "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    absltest.main()
