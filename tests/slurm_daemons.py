"""A Slurm cluster of two nodes on this machine, for tests: real daemons, in namespaces of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time

import psutil

NODES = ("node1", "node2")
GPUS_PER_NODE = 2
_CONTROLLER = "controller"
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare", "nsenter", "setpriv", "ip")
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
# What is started by this ends with the one who has started it.
_BOUND = ("setpriv", "--pdeathsig", "KILL")
_NETWORK = ("--net", "--mount", "--uts")
# With their first process, all processes of this namespace end.
_PROCESSES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def reason_to_skip():
    """Why there can be no cluster here; an empty text if there can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"needs slurm-wlm, util-linux and iproute2: no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to start Slurm's daemons in namespaces"
    tried = subprocess.run([*_PROCESSES, "--net", "true"], capture_output=True, text=True)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class SlurmCluster:
    """A controller and two nodes, in a network, with names and processes that nothing else sees.

    When it is closed, and when this process is killed, the kernel ends all that was started there.

    Args:
      directory: Where its files are. They are the caller's to remove.
    """

    def __init__(self, directory):
        self._directory = directory
        self._daemons = {}
        self._environment = {**os.environ, "SLURM_CONF": os.path.join(directory, "slurm.conf")}
        self._write_files()
        commands = ["ip link set lo up", *(f"ip address add {address} dev lo" for address in _ADDRESSES.values())]
        commands += [f"mount --bind {directory}/hosts /etc/hosts", f"hostname {_CONTROLLER}", "exec sleep infinity"]
        self._holder = subprocess.Popen([*_BOUND, "unshare", *_NETWORK, "sh", "-c", " && ".join(commands)])
        try:
            self._wait_for_network()
            self._inside = (*_BOUND, "nsenter", "--target", str(self._holder.pid), *_NETWORK, f"--wd={directory}")
            self._start(_CONTROLLER, "slurmctld", "-D", "-c")
            for node in NODES:
                self.start_node(node)
            self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 2", "the nodes are idle")
        except BaseException:
            self.close()
            raise

    def run(self, *command, **variables):
        """What a command prints that is run on the controller; it must succeed."""
        completed = subprocess.run(
            [*self._inside, *command],
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
        """Ends all processes of a node at once, and says so to the controller: else it would wait for SlurmdTimeout."""
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
        self._holder.kill()
        self._holder.wait()

    def _start(self, name, *command):
        """Starts a daemon in a process namespace of its own, where a shell waits for what the daemon leaves behind."""
        with open(os.path.join(self._directory, f"{name}.out"), "ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*self._inside, *_PROCESSES, "sh", "-c", '"$@" & wait', name, *command],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _wait_for_network(self):
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while psutil.Process(self._holder.pid).name() != "sleep":
            if self._holder.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no namespaces: their first process has ended with {self._holder.poll()}")
            time.sleep(0.01)

    def _write_files(self):
        path = os.path.join
        os.mkdir(path(self._directory, "state"))
        files = {
            "slurm.conf": _CONFIG.format(controller=_CONTROLLER, directory=self._directory, gpus=GPUS_PER_NODE),
            "gres.conf": f"Name=gpu File={self._directory}/gpu[0-{GPUS_PER_NODE - 1}]\n",
            "hosts": "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in _ADDRESSES.items()),
        }
        for name, text in files.items():
            with open(path(self._directory, name), "w") as file:
                file.write(text)
        for number in range(GPUS_PER_NODE):  # Slurm wants devices, and does not use them.
            os.mknod(path(self._directory, f"gpu{number}"), 0o020600, os.makedev(1, 3))

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
