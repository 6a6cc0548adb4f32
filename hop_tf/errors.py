"""Errors that hop_tf raises at run time.

Mistakes in arguments are `ValueError` or `TypeError`, raised when the object is made. Everything that goes wrong
between ranks derives from `HopError`, so that one `except` clause catches it, and says which rank, which step, which
peer or queue, and what to check.
"""

from __future__ import annotations


class HopError(RuntimeError):
    """Base class of all run-time errors of hop_tf."""


class ClusterConfigError(HopError, ValueError):
    """The cluster description (`TF_CONFIG` or a `ClusterResolver`) cannot be used as it stands."""


class MismatchError(HopError):
    """Two ranks disagree on something that must be equal: versions, strategy, options, or variables."""


class PeerLostError(HopError):
    """A peer died, was restarted, or has been silent for longer than the deadline."""


class PeerFailedError(PeerLostError):
    """A peer's `fit` has ended by an exception, and ranks do not go on without it. All of them may call `fit` again."""


class DeadlineExceededError(HopError):
    """A living peer did not deliver what was awaited before the deadline, or a peer never appeared."""


class ProtocolError(HopError):
    """A peer sent something that the protocol does not allow."""


def describe_failure(
    *, rank: int, step: int | None, operation: str, target: str, seconds: float, state: str, advice: str
) -> str:
    """Formats a run-time failure the way every error of hop_tf reads.

    Args:
      rank: The rank that reports the failure.
      step: The training step it was in, or None outside of a step.
      operation: What it was doing, for instance "receive update".
      target: The peer (rank and address) or queue concerned.
      seconds: How long it had waited.
      state: What is known of the other side, for instance "silent for 31.0 s".
      advice: What the user should check.

    Returns:
      One line of text.
    """
    where = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
    return f"{where}: {operation} on {target} failed after {seconds:.1f} s ({state}). {advice}"
