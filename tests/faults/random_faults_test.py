"""Random faults at random moments, in real processes, under every strategy.

What happens to whom, and when, is drawn: `HOP_TF_SCHEDULE_SEED` says from which seed. `make test` runs one case of each
kind that no other test has; `make stress` runs all, for each seed, and ends with a table of what was seen (see
`tests/conftest.py`).

Nothing here depends on how long something takes, but for the bound of the whole case: no process may hang.
"""

import dataclasses
import functools
import os
import random
import re
import tempfile
import threading
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from faults.kinds import KINDS, LINKS, TIMEOUT_SECONDS, TOKEN, FailingLinks, files_again, happen, happen_within
from hop_tf.errors import HopError
from hop_tf.tools.testing import MultiProcessError, MultiProcessRunner, network
from support import MEMBERS, Member

_SEED = int(os.environ.get("HOP_TF_SCHEDULE_SEED", "0"))
_NUM_RANKS = 3
_NUM_STEPS = 60
_NUM_EPOCHS = 2
_NUM_EPOCHS_WITH_RESTART = 8  # It takes a while until the rank is back.
_BATCH_SIZE = 6
_CASE_SECONDS = 120.0
_STEP_SECONDS = 0.03  # Emulated: what is drawn happens in the middle of the training.
_LEFT_SECONDS = 10.0
_STEP = "step [0-9]+"
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
_OF_OTHER_TESTS = (
    "kill",
    "restart",
    "freeze",
    "exception",
    "exit",
    "cut",
    "garbage",
    "strangers",
    "credentials",
    "disk",
)
_KINDS = sorted(KINDS, key=lambda kind: kind in _OF_OTHER_TESTS)
# Strategies whose restarted ranks join the others.
_LET_JOIN = ("hop_tolerant", "canary", "shat", "pipe_sgd_continue", "dts_continue", "canary_synchronous_continue")


@dataclasses.dataclass(frozen=True)
class _Case:
    """A fault in a job.

    Attributes:
      name: Name of the strategy, in `_MEMBERS`.
      kind: One of `KINDS`.
      victim: The rank that has the fault.
      step: Number of steps that the victim has made before.
      delay: Seconds from that step to the fault, unless the victim causes the fault itself.
    """

    name: str
    kind: str
    victim: int
    step: int
    delay: float

    @property
    def num_epochs(self):
        return _NUM_EPOCHS_WITH_RESTART if self.kind == "restart" else _NUM_EPOCHS

    @classmethod
    def draw(cls, kind, number):
        rng = random.Random(f"{_SEED}/{kind}/{number}")
        names = list(_MEMBERS)
        return cls(
            name=names[(number + list(KINDS).index(kind) + _SEED) % len(names)],  # `make test` tries each of them.
            kind=kind,
            victim=rng.randrange(_NUM_RANKS),
            step=rng.randrange(1, _LAST_MOMENT),
            delay=rng.uniform(0.0, 0.1),
        )


class _Progress(keras.callbacks.Callback):
    """Prints the number and time of each step. On the victim, also causes the faults that a rank causes itself."""

    def __init__(self, strategy, case):
        super().__init__()
        self.num_steps = 0
        self._happens = case.step if strategy.rank == case.victim else None
        self._kind = case.kind

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        print(f"step {self.num_steps} at {time.monotonic()}", flush=True)
        if self.num_steps == self._happens:
            happen_within(self._kind)


def _train(case, directory):
    """Returns the error of `fit`, the number of steps, the loss, the weights, and all that remains after shutdown."""
    case = _Case(**case)
    options = hop_tf.CommunicationOptions(
        timeout_seconds=TIMEOUT_SECONDS,
        cluster_token=TOKEN,
        log_dir=os.path.join(directory, "logs"),
    )
    resolver = FailingLinks(directory).resolver() if case.kind in LINKS else None
    strategy = _MEMBERS[case.name].make(cluster_resolver=resolver, communication_options=options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.02), "mse")
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
    fit = functools.partial(model.fit, x, y, batch_size=_BATCH_SIZE, epochs=case.num_epochs, shuffle=False, verbose=0)
    progress, error = _Progress(strategy, case), ""
    with files_again():
        try:
            fit(callbacks=[progress])
        except HopError as raised:
            error = f"{type(raised).__name__}: {raised}"
        print(f"ended at {time.monotonic()}", flush=True)
        loss = float(np.mean((model(x, training=False).numpy() - y) ** 2))
        weights = model.get_weights()
        strategy.shutdown()
    return {"error": error, "steps": progress.num_steps, "loss": loss, "weights": weights, "left": _left()}


def _left():
    """Returns the threads and sockets of hop_tf that have not ended soon after `shutdown`."""
    deadline = time.monotonic() + _LEFT_SECONDS
    while True:
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("hop_tf")]
        listening = [
            str(each.laddr) for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN
        ]
        if not (threads or listening) or time.monotonic() > deadline:
            return threads + listening
        time.sleep(0.05)


def _moments(output, pattern):
    return [float(seconds) for seconds in re.findall(rf"^{pattern} at ([0-9.]+)$", output, re.MULTILINE)]


class RandomFaultsTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.fixture(autouse=True)
    def _records(self, record_property):
        self.seen = {"hangs": 0, "wrong": 0, "leaks": 0}
        record_property("fault", self.seen)  # For the table, which is made when all tests have ended.

    @parameterized.parameters(*((kind, number) for number in range(len(_MEMBERS)) for kind in _KINDS))
    @pytest.mark.stress(but=1)
    @pytest.mark.slow
    def test_no_hang_no_wrong_result(self, kind, number):
        case = _Case.draw(kind, number)
        print(case)
        self.seen |= {"kind": kind, "strategy": case.name}
        try:
            results, disturbed_at = self._run(case)
        except MultiProcessError:
            self.seen["hangs"] = 1
            raise
        self._note_times(case, results, disturbed_at)
        self.seen["wrong"] = 1  # Unless nothing below is found.
        self._check(case, results)
        self.seen["wrong"] = 0
        left = {result.task: result.value["left"] for result in results.workers if result.value is not None}
        self.seen["leaks"] = int(any(left.values()))
        self.assertFalse(any(left.values()), msg=left)

    def _run(self, case):
        """Returns the results of the workers, and the time of the fault."""
        member = _MEMBERS[case.name]
        directory = self.enter_context(tempfile.TemporaryDirectory())
        proxy = self.enter_context(network.Proxy(_NUM_RANKS + member.num_ps))
        with MultiProcessRunner(
            _train,
            _NUM_RANKS,
            num_ps=member.num_ps,
            args=(dataclasses.asdict(case), directory),
            env={"HOP_TF_STEP_SECONDS": str(_STEP_SECONDS)},
            timeout_seconds=_CASE_SECONDS,
        ) as runner:
            if case.kind in LINKS:
                FailingLinks(directory).connect(runner, proxy)
            runner.wait_for_output(case.victim, f"^step {case.step} ")
            time.sleep(case.delay)
            disturbed_at = happen(case.kind, case.victim, runner, proxy, random.Random(case.step))
            if case.kind == "freeze":  # It stays so until the others have ended.
                thread = threading.Timer(3 * TIMEOUT_SECONDS, lambda: runner.kill(case.victim))
                thread.start()
                self.addCleanup(thread.join)
            results = runner.join()
        if disturbed_at is None:
            disturbed_at = _moments(results[case.victim].output, _STEP)[-1]
        return results, disturbed_at

    def _check(self, case, results):
        member, kind = _MEMBERS[case.name], KINDS[case.kind]
        joins = case.kind == "restart" and case.name in _LET_JOIN
        others = [results[rank] for rank in range(_NUM_RANKS) if rank != case.victim]
        self.assertEqual(results[case.victim].exit_code, kind.exit_code, msg=results[case.victim].output)
        self.assertEqual([result.exit_code for result in others], [0] * len(others))
        if kind.raises or (case.kind == "restart" and not joins):
            self.assertNotEmpty(results[case.victim].value["error"])
        values = [result.value for result in others]
        if kind.loses and not member.goes_on_without_lost:
            for value in values:
                self.assertRegex(value["error"], f"^Peer(Lost|Failed)Error: .*rank {case.victim}")
            return
        if joins or not kind.loses:
            values.append(results[case.victim].value)
        for value in values:
            self.assertEqual(value["error"], "")
            self.assertLess(value["loss"], 5.0)  # 14 at the beginning.
            self.assertTrue(all(np.isfinite(each).all() for each in value["weights"]))
            if member.is_in_lock_step:
                if not joins:
                    self.assertEqual(value["steps"], _NUM_STEPS * case.num_epochs)
                self.assertAllEqual(value["weights"][0], values[0]["weights"][0])

    def _note_times(self, case, results, disturbed_at):
        """Notes how long another rank stood still, and when a restarted rank made its first step."""
        other = results[(case.victim + 1) % _NUM_RANKS].output
        moments = [at for at in _moments(other, f"(?:{_STEP}|ended)") if at > disturbed_at]
        gaps = np.diff([disturbed_at, *sorted(moments)])
        self.seen["stop"] = float(gaps.max()) if gaps.size else 0.0
        first_steps = _moments(results[case.victim].output, _STEP)[:1]
        if case.kind == "restart" and first_steps:
            self.seen["return"] = first_steps[0] - disturbed_at


if __name__ == "__main__":
    absltest.main()
