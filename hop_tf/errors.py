"""Errors that hop_tf raises at run time.

Mistakes in arguments are `ValueError` or `TypeError`, raised when the object is made. Errors between ranks derive from
`HopError`, so that one `except` clause catches all of them. Their texts name the rank, the step, the peer or queue, and
the user's next check.
"""

from __future__ import annotations


class HopError(RuntimeError):
    """Base class of all run-time errors of hop_tf."""


class ClusterConfigError(HopError, ValueError):
    """The cluster description (`TF_CONFIG` or a `ClusterResolver`) cannot be used."""


class MismatchError(HopError):
    """Two ranks disagree on something that must be equal: versions, strategy, options, or variables."""


class PeerLostError(HopError):
    """A peer died, was restarted, or has been silent for longer than the deadline."""


class PeerFailedError(PeerLostError):
    """A peer's `fit` has raised an error, and the job does not continue without it. All ranks may call `fit` again."""


class DeadlineExceededError(HopError):
    """A living peer did not deliver an awaited message before the deadline, or a peer never appeared."""


class ProtocolError(HopError):
    """A peer sent a message that the protocol does not allow."""


def describe_failure(
    *, rank: int, step: int | None, operation: str, target: str, seconds: float, state: str, advice: str
) -> str:
    """Formats a run-time failure in the form that all errors of hop_tf share.

    Args:
      rank: The rank that reports the failure.
      step: The rank's training step, or None outside of a step.
      operation: The rank's operation that failed, for instance "receive update".
      target: The peer (rank and address) or queue concerned.
      seconds: Seconds that the rank had waited.
      state: The known state of the other side, for instance "silent for 31.0 s".
      advice: The check that the user should make next.

    Returns:
      One line of text.
    """
    where = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
    return f"{where}: {operation} on {target} failed after {seconds:.1f} s ({state}). {advice}"
