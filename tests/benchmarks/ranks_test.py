"""`benchmarks/ranks.py`: processes that are forked, their results, and their ends.

A fork is made in a process of its own, because that of the tests has run operations of TensorFlow.
"""

import os
import signal
import subprocess
import sys

from absl.testing import absltest, parameterized

from support import host_device

_BENCHMARKS = host_device.ROOT / "benchmarks"
_RUN = """
import os, signal, sys, time
import psutil, ranks

def answer(case, rank):
    host, port = case["addresses"][0][rank].split(":")
    return case["factor"] * rank, host, os.environ["NAME"]

def fail(case, rank):
    if rank == 1:
        raise ValueError("on purpose")
    time.sleep(100)

def die(case, rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(100)

def wait(case, rank):
    if not os.fork():
        time.sleep(100)
    time.sleep(100)

def run(function, seconds=60.0):
    try:
        case, environment = {"factor": 3}, {"NAME": "n"}
        print(ranks.run(function, case, 2, "loopback", num_ports=1, environment=environment, timeout_seconds=seconds))
    except RuntimeError as error:
        print(error)
    print(len(psutil.Process().children(recursive=True)), "left")
"""


class RanksTest(parameterized.TestCase):
    @parameterized.parameters(
        ("answer", "[(0, '127.0.0.1', 'n'), (3, '127.0.0.1', 'n')]"),
        ("fail", "rank 1 ended without a result, with exit code -9."),
        ("die", f"rank 1 ended without a result, with exit code -{int(signal.SIGSEGV)}."),
        ("wait, 0.5", "ranks [0, 1] take too long."),
    )
    def test_results_and_ends(self, arguments, expected):
        command = [sys.executable, "-c", f"{_RUN}\nrun({arguments})"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_BENCHMARKS), str(host_device.ROOT)])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
        self.assertEqual(done.stdout.splitlines(), [expected, "0 left"])
        self.assertEqual("ValueError: on purpose" in done.stderr, arguments == "fail")


if __name__ == "__main__":
    absltest.main()
