"""`serve`: the process of a `ps` task, which serves until the workers are done."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator

from absl import logging

from hop_tf.cluster import Cluster
from hop_tf.errors import ClusterConfigError, PeerLostError
from hop_tf.options import CommunicationOptions
from hop_tf.records import make_recorder
from hop_tf.runtime.rank_runtime import make_transport
from hop_tf.runtime.report import static_identity
from hop_tf.strategies.shat.server.server import ParameterServer
from hop_tf.strategies.shat.server.snapshots import SnapshotOptions, Snapshots
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.base import Transport
from hop_tf.transport.deadlines import problem_of

STRATEGY = "SHATParameterServerStrategy"
# Time between two checks of the workers.
_PERIOD_SECONDS = 0.1


def serve(
    cluster: Cluster,
    *,
    options: CommunicationOptions | None = None,
    snapshots: SnapshotOptions | None = None,
) -> None:
    """Serves shards in this process, which must be a `ps` task.

    Args:
      cluster: The cluster.
      options: Deadlines and credentials. Default: `CommunicationOptions()`.
      snapshots: The directory and the times of snapshots. Default: no snapshots.

    Blocks: until all workers have ended. The server does not wait for workers that are dead, or cannot be reached for
    `timeout_seconds`. SIGTERM, for example when the machine is taken away, ends the process earlier: after a last
    snapshot, with exit code 143.

    Raises:
      ClusterConfigError: If this process is not a `ps` task.
      HopError: If the server's address cannot be bound.
      PeerLostError: If all workers were lost.
      MismatchError: If workers have other versions.
    """
    if cluster.task_type != "ps":
        raise ClusterConfigError(
            f"a parameter server must be a task of type 'ps'. Received: task type={cluster.task_type!r}. "
            "Check the `task` entry of TF_CONFIG."
        )
    options, snapshots = options or CommunicationOptions(), snapshots or SnapshotOptions()
    service = _Service(cluster, options, snapshots)
    try:
        with _exit_on_termination():
            service.run()
    finally:
        service.close()


@contextlib.contextmanager
def _exit_on_termination() -> Iterator[None]:
    """Lets SIGTERM end the program as Ctrl-C does, unless the program handles or ignores it already."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Service:
    """A server with its transport, which watches the workers."""

    def __init__(self, cluster: Cluster, options: CommunicationOptions, snapshots: SnapshotOptions):
        self._options = options
        self._failures: list[BaseException] = []
        self._wake = threading.Event()
        pool = BufferPool()
        self._recorder = make_recorder(
            None if options.log_dir is None else pathlib.Path(options.log_dir) / f"ps_{cluster.task_id}",
            number=cluster.number,
            num_ranks=cluster.world_size,
            num_servers=len(cluster.servers),
            strategy=STRATEGY,
        )
        if self._recorder is not None:
            self._recorder.follows = True
        self._transport: Transport = make_transport(
            cluster,
            options,
            identity=static_identity(STRATEGY, cluster, {}),
            pool=pool,
            on_error=self._on_error,
            on_restart=self._on_restart,
            recorder=self._recorder,
            in_turn=False,  # Workers may have trained without the server before.
        )
        self._server = ParameterServer(
            transport=self._transport,
            num_workers=cluster.world_size,
            pool=pool,
            snapshots=Snapshots(snapshots, cluster.task_id) if snapshots.directory is not None else None,
        )
        self._transport.serve_reports(lambda: {"num_ranks": cluster.world_size, **self._transport.counters()})
        try:
            self._transport.start()
        except BaseException:
            self._close_records()
            raise
        logging.info("serves as ps %d for %d workers.", cluster.task_id, cluster.world_size)
        for worker in self._server.present:
            self._transport.connect(worker)

    def run(self) -> None:
        """See `serve`."""
        try:
            while not self._server.is_done:
                self._wake.wait(_PERIOD_SECONDS)
                if self._failures:
                    raise self._failures[0]
                for worker in self._server.present:
                    self._look_at(worker)
                self._server.take_snapshots()
        finally:
            self._server.end()
        if not self._server.has_served:
            reasons = "; ".join(self._server.lost.values())
            raise PeerLostError(f"rank {self._transport.rank}: all workers were lost: {reasons}")

    def _look_at(self, worker: int) -> None:
        problem = problem_of(
            self._transport.status(worker),
            None,
            0.0,
            self._options,
            rank=self._transport.rank,
            peer=f"rank {worker}",
            operation="serve",
            step=None,
        )
        if problem is not None:
            self._server.forget(worker, str(problem))

    def _on_error(self, error: BaseException) -> None:
        self._failures.append(error)
        self._wake.set()

    def _on_restart(self, worker: int) -> None:
        self._server.restarted(worker)

    def close(self) -> None:
        """Ends all connections."""
        self._transport.close()
        self._close_records()

    def _close_records(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
