"""What an event holds, and what its kinds mean."""

from __future__ import annotations

import enum
import struct

import numpy as np

# The files say so, and readers refuse others.
FORMAT = 1
# Of what has no number, such as a step before the first one, or a peer where there is none.
NONE = -1


class Kind(enum.IntEnum):
    """What has happened. The same under every strategy; `docs/see.md` has the table.

    Times are seconds since 1970 on the machine's clock. Each kind has a begin and a duration.
    """

    # A step as Keras's loop makes it, from the callbacks before it to those behind it; of several steps where
    # `steps_per_execution` asks for that.
    STEP = 1
    # From the step's batch to its gradients.
    COMPUTE = 2
    # The gradients are there, and the step waits for what other ranks sent: communication that is not hidden.
    RESULT = 3
    # The communication of a step (`number`: its segment) of a group, from when it was handed out to its result.
    EXCHANGE = 4
    # Within it: a rank waits for `peer`, the last one that is missing; `name` says for what.
    WAIT = 5
    # Within it: values are encoded, or decoded, by the processor (what the graph encodes is a part of COMPUTE).
    ENCODE = 6
    # A message leaves, from when the connection takes it until the system has all of it. Before that it was in the
    # queue of its lane for `queued` seconds.
    SEND = 7
    # A message has come as a whole; the duration is that of its handler, which holds up the lane.
    RECEIVE = 8
    # `model.evaluate` within `fit`.
    VALIDATION = 9
    # Since the step before, so many (`number`) things have happened that `name` says: see `OUTCOMES`.
    OUTCOME = 10
    # A session begins: see `hop_tf.membership`.
    SESSION = 11
    # `peer` was lost, has left by an exception, or takes part again; `name` says which of them.
    LOSS = 12
    LEAVE = 13
    JOIN = 14


# What may become of updates and steps. A strategy counts those that it knows: see `Exchange.outcomes`.
OUTCOMES = {
    "late": "updates that came, and were too old to be used",
    "dropped": "updates that were not sent, or are lost",
    "skipped": "steps that the rank has passed over",
    "jumps": "how often it has passed over steps",
    "merged": "messages whose values were merged",
    "retried": "requests that were sent again",
}

# A row of a file.
EVENT = np.dtype(
    [
        ("begin", "<f8"),
        ("num_bytes", "<u8"),  # Of a message: header and payload.
        ("seconds", "<f4"),
        ("step", "<i4"),  # Of the session; NONE before the first one.
        ("number", "<u4"),  # Of a message on its lane; or as above.
        ("queued", "<f4"),
        ("name", "<u2"),  # Its place in the table of names.
        ("peer", "<i2"),
        ("kind", "u1"),
        ("lane", "u1"),
        ("session", "<u2"),  # Modulo 2^16.
    ]
)
PACKER = struct.Struct("<dQfiIfHhBBH")


def process_name(number: int, num_ranks: float) -> str:
    """How people call a process of a job, by its place in the cluster: ranks come first, then parameter servers."""
    return f"rank {number}" if number < num_ranks else f"ps {number - num_ranks}"
