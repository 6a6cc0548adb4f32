"""Decides when waiting for a peer is no longer of use."""

from __future__ import annotations

from hop_tf.errors import DeadlineExceededError, PeerLostError, describe_failure
from hop_tf.options import CommunicationOptions
from hop_tf.transport.base import PeerStatus

# A process whose address refuses connections for this long counts as dead, even if a connection to it is still open. A
# living peer is never silent for this long.
_REFUSED_SECONDS = 2.0
# A peer exits only when everything it has sent has arrived here. Its last messages may reach the handler a moment
# later.
_HANDOVER_SECONDS = 5.0
_PROGRESS_ADVICE = "Check that rank's log: it is alive but does not deliver (see progress_timeout_seconds)."
_LOST_ADVICE = "Check whether that process runs and can be reached (see timeout_seconds)."
_PATIENCE_ADVICE = "It is left behind, and joins the others when it wakes (see patience_seconds)."
_RETURN_ADVICE = "It was not started again in time (see timeout_seconds). Start the whole job again."
_ONE_WAY_ADVICE = "Check firewalls, and with TLS the certificate, in that direction (see timeout_seconds)."


def is_dead(status: PeerStatus) -> bool:
    """True if the peer's process has died: its address refuses connections, and its connections are closed.

    Everything that the peer has sent has then been read, because a connection counts as open until its last byte is
    read. If connections are refused for `_REFUSED_SECONDS`, the peer counts as dead even if a connection to it is still
    open.
    """
    return (status.refused_seconds > 0 and not status.connected) or status.was_refused_for(_REFUSED_SECONDS)


def problem_of(
    status: PeerStatus,
    ended: str | None,
    waited: float,
    options: CommunicationOptions,
    *,
    rank: int,
    peer: str,
    operation: str,
    step: int | None,
    patience_seconds: float | None = None,
) -> Exception | None:
    """Returns the error that ends waiting for a peer, or None if waiting may still succeed.

    Args:
      status: The peer's status.
      ended: The reason why the peer has exited for good; None if it has not.
      waited: Seconds waited so far.
      options: Deadlines.
      rank: The rank that waits.
      peer: The peer, in words.
      operation: The operation that waits.
      step: The training step; None outside of a step.
      patience_seconds: Silence after which ranks continue without a peer that was met. None: only the deadlines of
        `options` count.
    """
    if status.failure is not None:
        return status.failure
    found = _find(status, ended, waited, options, rank, step, patience_seconds)
    if found is None:
        return None
    error, state, advice = found
    return error(
        describe_failure(
            rank=rank,
            step=step,
            operation=operation,
            target=f"{peer} at {status.address}",
            seconds=waited,
            state=state,
            advice=advice,
        )
    )


def _find(
    status: PeerStatus,
    ended: str | None,
    waited: float,
    options: CommunicationOptions,
    rank: int,
    step: int | None,
    patience_seconds: float | None,
) -> tuple[type[Exception], str, str] | None:
    """The error's class, the state of the peer in words, and advice; None if waiting may still succeed."""
    problem = f": {status.last_problem}" if status.last_problem else ""
    if ended is not None:
        if waited <= _HANDOVER_SECONDS:
            return None
        return PeerLostError, f"it has ended: {ended}", "Start the job again."
    if is_dead(status) and not status.may_return:
        return PeerLostError, "no process listens there any longer", _LOST_ADVICE
    if patience_seconds is not None and status.ever_connected and status.was_silent_for(patience_seconds):
        return PeerLostError, f"silent for {status.silent_seconds:.1f} s{problem}", _PATIENCE_ADVICE
    if status.was_silent_for(options.timeout_seconds):
        if status.ever_connected:
            advice = _RETURN_ADVICE if status.may_return else _LOST_ADVICE
            return PeerLostError, f"silent for {status.silent_seconds:.1f} s{problem}", advice
        # Within a step, only a rank that has just joined has never met a peer.
        error = DeadlineExceededError if step is None else PeerLostError
        return error, f"it never appeared{problem}", _LOST_ADVICE
    # Incoming heartbeats must not hide that outgoing connections fail.
    if status.was_unreached_for(options.timeout_seconds):
        state = f"it is heard, but rank {rank} has not reached it for {status.unreached_seconds:.1f} s{problem}"
        return PeerLostError, state, _ONE_WAY_ADVICE
    if status.has_not_reached_this_for(options.timeout_seconds):
        there = f": {status.problem_there}" if status.problem_there else ""
        state = f"it is heard, but has not reached rank {rank} for {status.unreached_by_seconds:.1f} s{there}"
        return PeerLostError, state, _ONE_WAY_ADVICE
    if waited > options.progress_timeout_seconds:
        return DeadlineExceededError, "it is alive", _PROGRESS_ADVICE
    return None
