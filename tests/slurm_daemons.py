"""A Slurm cluster of two nodes on this machine, for tests: real daemons, in namespaces of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time

import psutil

import private_network

NODES = ("node1", "node2")
GPUS_PER_NODE = 2
_CONTROLLER = "controller"
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
_DEADLINE_SECONDS = 60.0
_POLL_SECONDS = 0.1
# Only processes in the namespaces reach the daemons, so they need no munge. A job that is queued again starts
# after `cred_expire` seconds.
_CONFIG = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,bf_resolution=1,bf_hetjob_immediate
MpiDefault=none
ReturnToService=2
SlurmdTimeout=120
KillWait=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node1 NodeAddr=node1 NodeHostname=node1 Port=6818 CPUs=8 Gres=gpu:{gpus}
NodeName=node2 NodeAddr=node2 NodeHostname=node2 Port=6819 CPUs=8 Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_ADDRESSES = {_CONTROLLER: "10.0.0.1", "node1": "10.0.0.2", "node2": "10.0.0.3"}
# With their first process, all processes of this namespace end.
_PROCESSES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def reason_to_skip():
    """Returns the reason why this machine cannot run a cluster; an empty text if it can."""
    return private_network.reason_to_skip(*_PROGRAMS) or _reason_without_devices()


def _reason_without_devices():
    """Returns the reason why device files cannot be made, as in the sandbox of a build system; or an empty text."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            _make_device(os.path.join(directory, "device"))
        except OSError as error:
            return f"cannot make device files: {error.strerror}"
    return ""


def _make_device(path):
    os.mknod(path, 0o020600, os.makedev(1, 3))


class SlurmCluster:
    """A controller and two nodes in a network of their own, with names and processes that are hidden from all others.

    When the cluster is closed, and when this process is killed, the kernel ends all processes of the cluster.

    Args:
      directory: Directory of the cluster's files, which the caller removes.
    """

    def __init__(self, directory):
        self._directory = directory
        self._daemons = {}
        self._environment = {**os.environ, "SLURM_CONF": os.path.join(directory, "slurm.conf")}
        self._write_files()
        self._network = private_network.PrivateNetwork(directory, _ADDRESSES)
        try:
            self._start(_CONTROLLER, "slurmctld", "-D", "-c")
            for node in NODES:
                self.start_node(node)
            self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 2", "the nodes are idle")
        except BaseException:
            self.close()
            raise

    def run(self, *command, **variables):
        """Runs a command on the controller, which must succeed; returns its output."""
        completed = subprocess.run(
            [*self._network.inside, *command],
            capture_output=True,
            env=self._environment | variables,
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
        if completed.returncode and "Unable to contact slurm controller" not in completed.stderr:
            raise AssertionError(f"{command}: {completed.stdout}{completed.stderr}{self._logs()}")
        return completed.stdout.strip()

    def submit(self, *arguments, **variables):
        """The number of a job that `sbatch` has queued."""
        return self.run("sbatch", "--parsable", *arguments, **variables)

    def state_of(self, job):
        """The state of a job: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        described = self.run("scontrol", "show", "job", job)
        return described.partition("JobState=")[2].split()[0]

    def start_node(self, node):
        """Starts a node that is down."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node):
        """Ends all processes of a node at once, and tells the controller. Otherwise it would wait for SlurmdTimeout."""
        _end(self._daemons.pop(node))
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def wait_until(self, predicate, what, seconds=_DEADLINE_SECONDS):
        """Waits; raises AssertionError with the logs of daemons and jobs after that time."""
        deadline = time.monotonic() + seconds
        while not predicate():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s until {what}.{self._logs()}")
            time.sleep(_POLL_SECONDS)

    def close(self):
        """Ends the daemons and all jobs."""
        for daemon in self._daemons.values():
            _end(daemon)
        self._daemons.clear()
        self._network.close()

    def _start(self, name, *command):
        """Starts a daemon in a process namespace of its own, where a shell waits for what the daemon leaves behind."""
        with open(os.path.join(self._directory, f"{name}.out"), "ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*self._network.inside, *_PROCESSES, "sh", "-c", '"$@" & wait', name, *command],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _write_files(self):
        path = os.path.join
        os.mkdir(path(self._directory, "state"))
        files = {
            "slurm.conf": _CONFIG.format(controller=_CONTROLLER, directory=self._directory, gpus=GPUS_PER_NODE),
            "gres.conf": f"Name=gpu File={self._directory}/gpu[0-{GPUS_PER_NODE - 1}]\n",
        }
        for name, text in files.items():
            with open(path(self._directory, name), "w") as file:
                file.write(text)
        for number in range(GPUS_PER_NODE):  # Slurm wants devices, and does not use them.
            _make_device(path(self._directory, f"gpu{number}"))

    def _logs(self):
        texts = []
        for name in sorted(os.listdir(self._directory)):
            if name.endswith((".log", ".out")):
                with open(os.path.join(self._directory, name), errors="replace") as file:
                    texts.append(f"\n--- {name}\n{file.read()[-3000:]}")
        return "".join(texts)


def _end(daemon):
    """Kills the first process of a namespace, and so all; `unshare` then ends."""
    with contextlib.suppress(psutil.NoSuchProcess):  # It has ended by itself.
        for child in psutil.Process(daemon.pid).children():
            child.kill()
    daemon.wait(_DEADLINE_SECONDS)
