"""Tests of the multi-process runner.

The processes load this file. So that they start at once, it imports neither TensorFlow nor NumPy.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time

import psutil
from absl.testing import absltest, parameterized

from hop_tf.tools.testing import MultiProcessError, MultiProcessRunner, start_fork_server, stop_fork_server
from hop_tf.tools.testing.multi_process import Results

# Fresh interpreters, and forks of a server with something small in it.
_FRESH = ()
_FORKED = ("absl.testing.parameterized", "numpy", "hop_tf.tools.testing")
_TENSORFLOW = ("tensorflow", "keras")


def setUpModule():
    start_fork_server(preload=_FORKED)


def tearDownModule():
    stop_fork_server(preload=_FORKED)


def describe(greeting, punctuation="."):
    config = json.loads(os.environ["TF_CONFIG"])
    print(greeting, config["task"]["type"], config["task"]["index"], punctuation, sep="")
    return config


def return_array(size):
    import numpy as np

    return np.arange(size) ** 2


def list_modules():
    return sorted({name.partition(".")[0] for name in sys.modules})


def fail_on_rank_one():
    if rank() == 1:
        print("about to fail")
        raise ValueError("on purpose")


def hang_on_rank_one():
    if rank() == 1:
        wait_where_nobody_comes()


def wait_where_nobody_comes():
    print("waiting")
    threading.Event().wait()


def count_lines():
    """Answers each line of its input file, a FIFO, so that a test can tell whether this process runs."""
    with open(os.environ["QUESTIONS"]) as questions:
        print("open")
        for line in questions:
            print("answer", line, end="")


def wait_for_interrupt():
    try:
        print("ready")
        signal.pause()
    except KeyboardInterrupt:
        return "interrupted"


def wait_as_server():
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
        signal.pause()


def leave_child():
    print("child", os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "3600"))


def read_variable(name):
    return os.environ.get(name)


def fit_a_model(num_steps, learning_rate):
    """Fits y = 3 x to the points x = 1 from w = rank, so that every step multiplies the error by 1 - 2 lr."""
    import keras
    import numpy as np

    ones = np.ones([8, 1], "float32")
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(learning_rate), "mse")
    model.build([None, 1])
    model.set_weights([np.full([1, 1], rank(), "float32")])
    model.fit(ones, 3 * ones, epochs=num_steps, batch_size=8, verbose=2)
    return float(model.get_weights()[0][0, 0])


def draw_from_every_generator():
    import random

    import numpy as np
    import tensorflow as tf

    return [random.random(), float(np.random.rand()), float(tf.random.uniform([]))]


def rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class MultiProcessRunnerTest(parameterized.TestCase):
    @parameterized.product(preload=(_FRESH, _FORKED), num_ps=(0, 2))
    def test_returns_what_each_process_returned_and_printed(self, preload, num_ps):
        with MultiProcessRunner(describe, 3, args=("I am ", "!"), num_ps=num_ps, preload=preload) as runner:
            results = runner.join().raise_for_errors()
        self.assertEqual([result.output for result in results.workers], [f"I am worker{i}!" for i in range(3)])
        self.assertEqual([result.output for result in results.ps], [f"I am ps{i}!" for i in range(num_ps)])
        self.assertEqual([config["task"] for config in results.values], [_task("worker", i) for i in range(3)])
        self.assertLen({json.dumps(result.value["cluster"]) for result in results.workers + results.ps}, 1)
        self.assertLen(results.values[0]["cluster"].get("ps", []), num_ps)

    @parameterized.parameters(_FRESH, _FORKED)
    def test_values_are_pickled(self, *preload):
        with MultiProcessRunner(return_array, 2, args=(4,), preload=preload) as runner:
            results = runner.join().raise_for_errors()
        self.assertEqual([value.tolist() for value in results.values], [[0, 1, 4, 9]] * 2)

    def test_child_does_not_need_the_test_runner(self):
        with MultiProcessRunner(list_modules, 1, preload=_FRESH) as runner:
            modules = runner.join().raise_for_errors().values[0]
        self.assertNotIn("pytest", modules)
        self.assertNotIn("_pytest", modules)

    @parameterized.parameters(_FRESH, _FORKED)
    def test_failure_is_described(self, *preload):
        with MultiProcessRunner(fail_on_rank_one, 2, preload=preload) as runner:
            results = runner.join()
        self.assertEqual([result.exit_code for result in results.workers], [0, 1])
        with self.assertRaisesRegex(
            MultiProcessError,
            r"(?s)worker 1 ended with exit code 1.*about to fail.*in fail_on_rank_one.*ValueError: on purpose",
        ):
            results.raise_for_errors()
        self.assertIs(results.raise_for_errors(except_ranks=[1]), results)

    def test_hang_is_described_by_the_stacks(self):
        with MultiProcessRunner(hang_on_rank_one, 2, preload=_FORKED, timeout_seconds=5) as runner:
            processes = self._processes(runner)
            runner.wait_for_output(1, "waiting")
            with self.assertRaisesRegex(
                MultiProcessError,
                r"(?s)worker 1 still ran after 5 s.*worker 0, last 0 of 0.*in wait_where_nobody_comes",
            ):
                runner.join()
        self._assert_dead(processes)

    def test_killed_process(self):
        with MultiProcessRunner(wait_for_interrupt, 2, preload=_FORKED) as runner:
            runner.wait_for_output(0, "ready")
            runner.kill(0)
            runner.wait_for_output(1, "ready")
            runner.interrupt(1)
            results = runner.join()
        self.assertEqual([result.exit_code for result in results.workers], [-signal.SIGKILL, 0])
        self.assertEqual(results.values, [None, "interrupted"])

    @parameterized.parameters(_FRESH, _FORKED)
    def test_an_interrupt_that_is_not_handled_ends_the_process(self, *preload):
        with MultiProcessRunner(wait_where_nobody_comes, 1, preload=preload) as runner:
            runner.wait_for_output(0, "^waiting$")
            runner.interrupt(0)
            result = runner.join()[0]
        self.assertEqual(result.exit_code, -signal.SIGINT, result.output)
        self.assertIn("KeyboardInterrupt", result.output)

    def test_paused_process_does_nothing_until_resumed(self):
        path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "questions")
        os.mkfifo(path)
        with MultiProcessRunner(count_lines, 1, env={"QUESTIONS": path}, preload=_FORKED) as runner:
            with open(path, "w", buffering=1) as questions:
                runner.wait_for_output(0, "open")
                runner.pause(0)
                (process,) = self._processes(runner)
                while process.status() != psutil.STATUS_STOPPED:
                    pass
                questions.write("1\n")
                runner.resume(0)
                runner.wait_for_output(0, "answer 1")
            runner.join().raise_for_errors()

    def test_servers_can_be_ended(self):
        with MultiProcessRunner(wait_as_server, 1, num_ps=1, preload=_FORKED) as runner:
            runner.kill(0, task_type="ps")
            results = runner.join()
        self.assertEqual((results[0].exit_code, results.ps[0].exit_code), (0, -signal.SIGKILL))

    def test_waiting_for_output_ends_with_the_process(self):
        with MultiProcessRunner(describe, 1, args=("hello ",), preload=_FORKED) as runner:
            self.assertEqual(runner.wait_for_output(0, r"worker(\d)")[1], "0")
            with self.assertRaisesRegex(
                MultiProcessError, r"(?s)worker 0 ended without printing a line like 'goodbye'.*hello worker0"
            ):
                runner.wait_for_output(0, "goodbye")

    def test_waiting_for_output_ends_with_the_time(self):
        with MultiProcessRunner(wait_where_nobody_comes, 1, preload=_FORKED) as runner:
            runner.wait_for_output(0, "^waiting$")
            with self.assertRaisesRegex(
                MultiProcessError, r"(?s)did not within 0.1 s print a line like 'more'.*in wait_where_nobody_comes"
            ):
                runner.wait_for_output(0, "more", timeout_seconds=0.1)

    def test_a_failing_test_leaves_no_process_and_logs_the_output(self):
        with (
            self.assertLogs("absl", "ERROR") as logs,
            self.assertRaisesRegex(ValueError, "in the test"),
            MultiProcessRunner(wait_where_nobody_comes, 2, preload=_FORKED) as runner,
        ):
            processes = self._processes(runner)
            runner.wait_for_output(1, "waiting")
            raise ValueError("in the test")
        self._assert_dead(processes)
        self.assertIn("worker 1, last 1 of 1 lines ----\nwaiting", logs.output[0])

    def test_children_of_processes_are_ended(self):
        with MultiProcessRunner(leave_child, 1, preload=_FORKED) as runner:
            child = psutil.Process(int(runner.wait_for_output(0, r"child (\d+)")[1]))
            runner.join().raise_for_errors()
        self._assert_dead([child])

    @parameterized.parameters(_FRESH, _FORKED)
    def test_environment(self, *preload):
        env = {"HOP_TF_TEST_VARIABLE": "1", "OMP_NUM_THREADS": "5"}
        for name, expected in (("HOP_TF_TEST_VARIABLE", "1"), ("OMP_NUM_THREADS", "5"), ("NOWHERE", None)):
            with MultiProcessRunner(read_variable, 1, args=(name,), env=env, preload=preload) as runner:
                self.assertEqual(runner.join().raise_for_errors().values, [expected])
        self.assertNotIn("HOP_TF_TEST_VARIABLE", os.environ)

    @parameterized.parameters(_FRESH, _FORKED)
    def test_script(self, *preload):
        directory = self.enter_context(tempfile.TemporaryDirectory())
        _write(os.path.join(directory, "neighbor.py"), "NAME = 'neighbor'")
        _write(
            os.path.join(directory, "script.py"),
            """
            import sys, neighbor
            if __name__ == "__main__":
                print(neighbor.NAME, sys.argv[1:])
                sys.exit(4)
            """,
        )
        with MultiProcessRunner(os.path.join(directory, "script.py"), 2, args=("--a", 1), preload=preload) as runner:
            results = runner.join()
        self.assertEqual([result.exit_code for result in results.workers], [4, 4])
        self.assertEqual([result.output for result in results.workers], ["neighbor ['--a', '1']"] * 2)

    def test_function_of_an_importable_module_is_imported_by_name(self):
        with MultiProcessRunner(json.dumps, 1, args=([1],), preload=_FRESH) as runner:
            self.assertEqual(runner.join().raise_for_errors().values, ["[1]"])

    def test_logs_stay_in_log_dir(self):
        log_dir = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "logs")
        with MultiProcessRunner(describe, 1, args=("",), num_ps=1, log_dir=log_dir, preload=_FORKED) as runner:
            runner.join().raise_for_errors()
        with open(os.path.join(log_dir, "ps_0.log")) as file:
            self.assertEqual(file.read(), "ps0.\n")

    def test_starts_only_once(self):
        runner = MultiProcessRunner(describe, 1, args=("",), preload=_FORKED)
        with self.assertRaisesRegex(RuntimeError, "must be started"):
            runner.join()
        with runner.start(), self.assertRaisesRegex(RuntimeError, "only once"):
            runner.start()

    def test_refuses_ranks_that_do_not_exist(self):
        with MultiProcessRunner(describe, 1, args=("",), preload=_FORKED) as runner:
            for method in (runner.kill, runner.pause, runner.resume, runner.interrupt):
                with self.assertRaisesRegex(ValueError, "`rank` must be .* Received: worker 1."):
                    method(1)
            with self.assertRaisesRegex(ValueError, "Received: ps 0."):
                runner.wait_for_output(0, "", task_type="ps")

    def test_refuses_arguments(self):
        with self.assertRaisesRegex(ValueError, "`num_workers` must be at least 1. Received: num_workers=0"):
            MultiProcessRunner(describe, 0)
        with self.assertRaisesRegex(ValueError, "`timeout_seconds` must be positive. Received: timeout_seconds=0"):
            MultiProcessRunner(describe, 1, timeout_seconds=0)
        with self.assertRaisesRegex(ValueError, "`target` must be a file or a function. Received: target='/nowhere'"):
            MultiProcessRunner("/nowhere", 1)
        for target in (lambda: None, self._processes, 3, Results):
            with self.assertRaisesRegex(TypeError, "`target` must be a function of a module's top level, or a path"):
                MultiProcessRunner(target, 1)

    def _processes(self, runner):
        return [psutil.Process(process.pid) for process in runner._processes.values()]

    def _assert_dead(self, processes):
        """Waits for the ends of processes that are not children; whether anyone reaps them is another matter."""
        deadline = time.monotonic() + 30
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                while process.status() != psutil.STATUS_ZOMBIE:
                    self.assertLess(time.monotonic(), deadline, f"{process} still runs.")


class TensorFlowTest(absltest.TestCase):
    """Forks of a server that has imported TensorFlow."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        start_fork_server(preload=_TENSORFLOW)

    @classmethod
    def tearDownClass(cls):
        stop_fork_server(preload=_TENSORFLOW)
        super().tearDownClass()

    def test_server_can_fork(self):
        self.assertTrue(start_fork_server(preload=_TENSORFLOW).can_fork)

    def test_models_train(self):
        with MultiProcessRunner(fit_a_model, 2, args=(10, 0.1), preload=_TENSORFLOW) as runner:
            values = runner.join().raise_for_errors().values
        for rank, value in enumerate(values):
            self.assertAlmostEqual(value, 3 + (rank - 3) * 0.8**10, places=5)

    def test_processes_draw_different_numbers(self):
        with MultiProcessRunner(draw_from_every_generator, 2, preload=_TENSORFLOW) as runner:
            values = runner.join().raise_for_errors().values
        for first, second in zip(*values, strict=True):
            self.assertNotEqual(first, second)


def _task(task_type, index):
    return {"type": task_type, "index": index}


def _write(path, text):
    with open(path, "w") as file:
        file.write(textwrap.dedent(text))


if __name__ == "__main__":
    absltest.main()
