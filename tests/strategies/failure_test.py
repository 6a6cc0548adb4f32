"""Tests the README's promises about ranks that are lost, disagree or leave, in real processes.

No result depends on durations. A process prints its progress, and stops at gates that the test has chosen. The test
acts when it has read the line. If the contract has a bound, the test waits for the line no longer than that.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.membership.session import Membership
from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import MultiProcessRunner

_TIMEOUT_SECONDS = 4.0
# Limit until all processes have printed their errors and ended, also on a busy machine: half of the default timeout.
_CONTRACT_SECONDS = _TIMEOUT_SECONDS + 26.0
_INTERRUPT_SECONDS = 30.0  # Until an interrupted `fit` has ended.
_IMPATIENT = {"timeout_seconds": _TIMEOUT_SECONDS}
_NEVER_SECONDS = 100.0  # Longer than any test: with this timeout, no rank may wait until it ends.
_BATCH_SIZE = 12
_NUM_STEPS = 16
_STOP = 3  # The step in which a process stops.
_DISAGREEMENTS = ("option", "model", "world")
# The behavior of an interrupted rank, and the rank that is stopped meanwhile.
_INTERRUPTIONS = {"waiting": 2, "computing": 1, "waiting_in_many_steps": 2, "starting": 2}


# In the processes.


def _say(text):
    print(f"{text}\n", end="", flush=True)  # One write, which other threads cannot split.


def _stop(gates, name):
    """Stops at a named pipe until the test opens it, too."""
    path = f"{gates}/{name}"
    os.mkfifo(path)
    _say(f"stops at {name}")
    with open(path):
        pass


def _rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def _make_strategy(
    addresses,
    *,
    rank=None,
    topology="complete",
    max_iteration_gap=2,
    on_peer_loss=None,
    timeout_seconds=_NEVER_SECONDS,
):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=_rank() if rank is None else rank
    )
    return hop_tf.HopStrategy(
        topology=topology,
        max_iteration_gap=max_iteration_gap,
        on_peer_loss=on_peer_loss,
        cluster_resolver=resolver,
        communication_options=hop_tf.CommunicationOptions(timeout_seconds=timeout_seconds),
    )


def _make_model(strategy, *, num_units=3, stop=None, steps_per_execution=1):
    """Returns a model that calls `stop`, if given, while it computes step `_STOP`."""
    steps = itertools.count()

    def compute():
        if next(steps) == _STOP and stop is not None:
            stop()
        return np.float32(0)

    def loss(y, predicted):
        return tf.reduce_mean(tf.square(y - predicted)) + tf.reshape(tf.numpy_function(compute, [], tf.float32), ())

    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(num_units)])
        model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=steps_per_execution)
    return model


def _dataset(num_units=3):
    x = np.random.default_rng(0).normal(size=(_NUM_STEPS * _BATCH_SIZE, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] * np.ones(num_units, "float32"))).batch(_BATCH_SIZE)


def _fit(model, *, num_epochs=1, callbacks=()):
    model.fit(_dataset(model.output_shape[-1]), epochs=num_epochs, callbacks=[*callbacks], verbose=0)


def _custom_loop(strategy, model, num_epochs=1):
    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function
    def train_step(batch):
        strategy.run(replica_step, args=batch)

    dataset = strategy.experimental_distribute_dataset(_dataset())
    for _ in range(num_epochs):
        for step, batch in enumerate(dataset):
            train_step(batch)
            yield step


@contextlib.contextmanager
def _says_what_it_raises(name="it"):
    try:
        yield
    except BaseException as error:
        one_line = " ".join(str(error).split())
        _say(f"{name} raised {type(error).__name__}: {one_line}")
        raise


def _attempt(name, model, **fit_args):
    """Trains; returns the error as text, and the number of finished steps."""
    finished = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: finished.append(batch))
    fit_args["callbacks"] = [count, *fit_args.get("callbacks", ())]
    raised = None
    try:
        with _says_what_it_raises(name):
            _fit(model, **fit_args)
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}"
    return {"raised": raised, "steps": len(finished)}


def _raise_at_batch(batch):
    def check(current, logs):
        if current == batch:
            raise ValueError("on purpose")

    return keras.callbacks.LambdaCallback(on_train_batch_end=check)


def train_until_it_fails(addresses, gates, options, rank=None, in_custom_loop=False):
    """Rank 1 stops in the middle. Unless `rank` is given, all stop before they begin."""
    atexit.register(_say, "exits")
    strategy = _make_strategy(addresses, rank=rank, **options)
    model = _make_model(strategy, stop=functools.partial(_stop, gates, "middle") if strategy.rank == 1 else None)
    if rank is None:
        _stop(gates, f"start of {strategy.rank}")
    with _says_what_it_raises():
        if in_custom_loop:
            list(_custom_loop(strategy, model, num_epochs=1000))
        else:
            _fit(model, num_epochs=1000)


def disagree(addresses):
    results = {}
    for case in _DISAGREEMENTS:
        differing = {other: _rank() if other == case else 0 for other in _DISAGREEMENTS}
        strategy = _make_strategy(addresses[case][: 2 + differing["world"]], max_iteration_gap=2 + differing["option"])
        results[case] = _attempt(case, _make_model(strategy, num_units=3 + differing["model"]))
        strategy.shutdown()
    return results


def be_interrupted(addresses, gates):
    strategy = _make_strategy(addresses)
    wait = Membership.wait

    def observed_wait(self, missing, *, operation, step=None):
        _say(f"{case}: {operation}, step {step}")
        wait(self, missing, operation=operation, step=step)

    results = {}
    with mock.patch.object(Membership, "wait", observed_wait):
        for case, stopped in _INTERRUPTIONS.items():
            stop = functools.partial(_stop, gates, case) if strategy.rank == stopped else None
            if stop and case == "starting":
                stop = stop()
            model = _make_model(strategy, stop=stop, steps_per_execution=8 if "many" in case else 1)
            results[case] = _attempt(case, model)
    return results


def leave_early(addresses):
    """Rank 1 leaves several times, each time in another way. Then all ranks average, and leave for good."""
    strategy = _make_strategy(addresses, on_peer_loss="continue")
    model = _make_model(strategy)
    leaves = strategy.rank == 1
    stopping = keras.callbacks.EarlyStopping(monitor="loss", min_delta=1e9)  # Stops after the second epoch.
    results = {
        "exception": _attempt("exception", model, callbacks=[_raise_at_batch(5)] * leaves),
        "fewer_epochs": _attempt("fewer_epochs", model, num_epochs=1 if leaves else 2),
        "early_stopping": _attempt("early_stopping", model, num_epochs=3, callbacks=[stopping] * leaves),
    }
    strategy.synchronize(model)
    strategy.shutdown()
    results["weights"] = model.get_weights()
    results["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("hop_tf")]
    return results


def exit_after_fit(addresses):
    strategy = _make_strategy(addresses, on_peer_loss="continue")
    _fit(_make_model(strategy), callbacks=[_raise_at_batch(5)] * (strategy.rank == 2))
    if strategy.rank == 1:
        sys.exit(7)
    return strategy.report()["steps"]


def exit_in_a_custom_loop(addresses):
    strategy = _make_strategy(addresses)
    for step in _custom_loop(strategy, _make_model(strategy)):
        if (strategy.rank, step) == (1, 3):
            sys.exit(7)
        if (strategy.rank, step) == (2, 5):
            raise ValueError("on purpose")
    return strategy.report()["steps"]


# The tests.


class _ProcessesTestCase(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.gates = self.enter_context(tempfile.TemporaryDirectory())

    def reserve(self, num_addresses):
        """Returns addresses that no other process uses."""
        ports = self.enter_context(PortReservation(num_addresses))
        ports.release()
        return [f"127.0.0.1:{port}" for port in ports.ports]

    def start(self, target, num_workers, *args):
        return self.enter_context(MultiProcessRunner(target, num_workers, args=args, timeout_seconds=90))

    def wait_at(self, runner, rank, gate):
        """Waits until a process stops."""
        runner.wait_for_output(rank, f"stops at {gate}$")

    def open(self, gate):
        """Lets the process that stops there go on."""
        with open(f"{self.gates}/{gate}", "w"):
            pass

    def start_together(self, target, num_workers, *args):
        """Lets no process begin before all can be reached: starting has no deadline."""
        runner = self.start(target, num_workers, *args)
        for rank in range(num_workers):
            self.wait_at(runner, rank, f"start of {rank}")
        for rank in range(num_workers):
            self.open(f"start of {rank}")
        return runner

    def errors_within_contract(self, runner, ranks):
        """Returns the errors of the processes, all of which must end in time."""
        deadline = time.monotonic() + _CONTRACT_SECONDS
        for rank in ranks:
            runner.wait_for_output(rank, "^exits$", max(0.0, deadline - time.monotonic()))
        return [runner.wait_for_output(rank, "it raised (.*)")[1] for rank in ranks]


class LostRankTest(_ProcessesTestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("frozen", signal.SIGSTOP, 3),
        ("killed", signal.SIGKILL, 4),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_silent_rank_is_named_by_all_if(self, signum, num_workers):
        self._check_is_named_by_all(signum, num_workers, in_custom_loop=False)

    @pytest.mark.stress
    def test_a_rank_killed_in_a_custom_loop_is_named_by_all(self):
        self._check_is_named_by_all(signal.SIGKILL, 4, in_custom_loop=True)

    def _check_is_named_by_all(self, signum, num_workers, in_custom_loop):
        addresses = self.reserve(num_workers)
        args = (addresses, self.gates, _IMPATIENT | {"topology": "ring"}, None, in_custom_loop)
        runner = self.start_together(train_until_it_fails, num_workers, *args)
        self.wait_at(runner, 1, "middle")
        runner.send_signal(1, signum)
        loss = (
            rf"rank \d, step \d: \w+ \w+ on rank 1 at {addresses[1]} failed after .*\((silent for|no process listens)"
        )
        for error in self.errors_within_contract(runner, [0, *range(2, num_workers)]):
            self.assertRegex(error, f"PeerLostError: .*{loss}")
        exit_code = -signal.SIGKILL
        if signum == signal.SIGSTOP:
            runner.resume(1)
            self.open("middle")
            exit_code = 1  # The rank finds itself alone.
        exit_codes = [result.exit_code for result in runner.join().workers]
        self.assertEqual(exit_codes, [1, exit_code] + [1] * (num_workers - 2))

    @pytest.mark.slow
    def test_a_rank_that_is_never_started_is_named_by_all(self):
        addresses = self.reserve(3)
        runner = self.start_together(train_until_it_fails, 2, addresses, self.gates, _IMPATIENT)
        errors = self.errors_within_contract(runner, range(2))
        absence = rf"start of training on rank 2 at {addresses[2]} failed after .*\(it never appeared"
        for error in errors:
            self.assertRegex(error, absence)
        self.assertTrue(any(error.startswith("DeadlineExceededError") for error in errors), errors)
        self.assertEqual([result.exit_code for result in runner.join().workers], [1, 1])

    @pytest.mark.stress
    def test_a_restarted_rank_ends_the_job(self):
        addresses = self.reserve(3)
        runner = self.start_together(train_until_it_fails, 3, addresses, self.gates, {})
        self.wait_at(runner, 1, "middle")
        runner.kill(1)
        successor = self.start(train_until_it_fails, 1, addresses, self.gates, _IMPATIENT, 1)
        for rank in (0, 2):
            error = runner.wait_for_output(rank, "it raised (.*)")[1]
            # On a busy machine the restart may take so long that ranks notice the death first.
            noticed = r"(was restarted|failed after .* \(no process listens there any longer\))"
            self.assertRegex(error, rf"^PeerLostError: .*rank 1 at {addresses[1]} {noticed}")
        # Often the others are gone before they have told the successor that it is a restarted rank.
        successor.wait_for_output(0, "it raised (PeerLost|DeadlineExceeded)Error: .*rank [02] at ")
        self.assertEqual([result.exit_code for result in runner.join().workers], [1, -signal.SIGKILL, 1])
        self.assertEqual(successor.join()[0].exit_code, 1)


class DisagreementTest(_ProcessesTestCase):
    @pytest.mark.stress
    def test_ranks_that_disagree_are_refused_before_the_first_step(self):
        addresses = {case: self.reserve(3) for case in _DISAGREEMENTS}
        results = self.start(disagree, 2, addresses).join().raise_for_errors().values
        world = ",".join(addresses["world"])
        differences = {
            "option": ("'option max_iteration_gap'", "'2'", "'3'"),
            "model": ("variable 0", r"dense\S*/kernel\S* float32\[4, 3\]", r"dense\S*/kernel\S* float32\[4, 4\]"),
            "world": ("'cluster'", f"'{world.rpartition(',')[0]}'", f"'{world}'"),
        }
        for case, parts in differences.items():
            address = addresses[case][0].replace(".", r"\.")
            self.assertRegex(results[1][case]["raised"], f"^MismatchError: .*{address}")
            for rank in range(2):
                error = results[rank][case]["raised"]
                self.assertEqual(results[rank][case]["steps"], 0)
                for part in (f"rank {rank}", f"rank {1 - rank}", "MismatchError", *parts):
                    self.assertRegex(error, part)


class LeavingRankTest(_ProcessesTestCase):
    @pytest.mark.stress
    def test_the_others_go_on_without_an_interrupted_rank(self):
        runner = self.start(be_interrupted, 3, self.reserve(3), self.gates)
        for case, stopped in _INTERRUPTIONS.items():
            self.wait_at(runner, stopped, case)
            if stopped != 1:
                awaited = "start of training, step None" if case == "starting" else f"receive update, step {_STOP + 1}"
                runner.wait_for_output(1, f"{case}: {awaited}$")
            runner.interrupt(1)
            if stopped != 1:  # Rank 1 is still waiting.
                runner.wait_for_output(1, f"{case} raised KeyboardInterrupt", _INTERRUPT_SECONDS)
            self.open(case)
        first, interrupted, last = runner.join().raise_for_errors().values
        for case in _INTERRUPTIONS:
            self.assertEqual(interrupted[case]["raised"], "KeyboardInterrupt: ")
            for others in (first, last):
                self.assertEqual(others[case], {"raised": None, "steps": 2 if "many" in case else _NUM_STEPS})

    @pytest.mark.slow
    def test_the_others_go_on_without_a_rank_that_ends_early(self):
        first, leaver, last = self.start(leave_early, 3, self.reserve(3)).join().raise_for_errors().values
        self.assertEqual(leaver["exception"], {"raised": "ValueError: on purpose", "steps": 6})
        self.assertEqual(leaver["fewer_epochs"], {"raised": None, "steps": _NUM_STEPS})
        self.assertEqual(leaver["early_stopping"], {"raised": None, "steps": 2 * _NUM_STEPS})
        for others in (first, last):
            for num_epochs, case in enumerate(("exception", "fewer_epochs", "early_stopping"), start=1):
                self.assertEqual(others[case], {"raised": None, "steps": num_epochs * _NUM_STEPS})
        for results in (first, leaver, last):
            self.assertAllEqual(results["weights"][0], first["weights"][0])
            self.assertEqual(results["threads"], [])

    @pytest.mark.stress
    def test_a_process_ends_without_shutdown(self):
        self._check_ends(exit_after_fit)

    @pytest.mark.stress
    def test_a_process_ends_in_a_custom_loop_without_shutdown(self):
        self._check_ends(exit_in_a_custom_loop)

    def _check_ends(self, program):
        addresses = self.reserve(3)
        results = self.start(program, 3, addresses).join()
        self.assertEqual([result.exit_code for result in results.workers], [0, 7, 1])
        self.assertEqual(results[0].value, _NUM_STEPS)
        for address in addresses:
            host, _, port = address.rpartition(":")
            socket.create_server((host, int(port))).close()  # Raises, if the port is in use.


if __name__ == "__main__":
    tf.test.main()
