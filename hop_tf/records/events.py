"""The format of events, and the meaning of their kinds."""

from __future__ import annotations

import enum
import struct

import numpy as np

# Files contain this number, and readers refuse others.
FORMAT = 1
# Stands for a missing number, such as the step before the first step, or the peer of an event that has no peer.
NONE = -1


class Kind(enum.IntEnum):
    """The kinds of events, the same under every strategy. `docs/see.md` has a table.

    Times are seconds since 1970 on the machine's clock. Each kind has a begin and a duration.
    """

    # A step of Keras's loop, or several with `steps_per_execution`, from the callbacks before it to the callbacks after
    # it.
    STEP = 1
    # From the step's batch to its gradients.
    COMPUTE = 2
    # The step has its gradients and waits for the result of the exchange: communication that is not hidden.
    RESULT = 3
    # The communication of a group of variables in a step, from submission to result. `number` is the segment.
    EXCHANGE = 4
    # Within an exchange: a rank waits for `peer`, the last peer that is missing. `name` is the operation.
    WAIT = 5
    # Within an exchange: the processor encodes or decodes values (encoding in the graph is a part of COMPUTE).
    ENCODE = 6
    # A message is sent, from when the connection takes it until the system has all of it. Before that, the message was
    # in the queue of its lane for `queued` seconds.
    SEND = 7
    # A message has arrived completely. The duration is that of its handler, which blocks the lane.
    RECEIVE = 8
    # `model.evaluate` within `fit`.
    VALIDATION = 9
    # Since the previous step, the outcome `name` has happened `number` times: see `OUTCOMES`.
    OUTCOME = 10
    # A session begins: see `hop_tf.membership`.
    SESSION = 11
    # `peer` was lost, has left by an exception, or takes part again.
    LOSS = 12
    LEAVE = 13
    JOIN = 14


# The outcomes of updates and steps. A strategy counts those that it knows: see `Exchange.outcomes`.
OUTCOMES = {
    "late": "updates that were too old when they arrived",
    "dropped": "updates that were not sent, or are lost",
    "skipped": "steps that the rank has skipped",
    "jumps": "number of times that it has skipped steps",
    "merged": "messages whose values were merged",
    "retried": "requests that were sent again",
}

# A row of a file.
EVENT = np.dtype(
    [
        ("begin", "<f8"),
        ("num_bytes", "<u8"),  # Bytes of a message: header and payload.
        ("seconds", "<f4"),
        ("step", "<i4"),  # Step of the session; NONE before the first step.
        ("number", "<u4"),  # Number of a message on its lane, or as the kind says.
        ("queued", "<f4"),
        ("name", "<u2"),  # Index in the table of names.
        ("peer", "<i2"),
        ("kind", "u1"),
        ("lane", "u1"),
        ("session", "<u2"),  # Modulo 2^16.
    ]
)
PACKER = struct.Struct("<dQfiIfHhBBH")


def process_name(number: int, num_ranks: float) -> str:
    """The readable name of a process with index `number` in the cluster: first ranks, then parameter servers."""
    return f"rank {number}" if number < num_ranks else f"ps {number - num_ranks}"
