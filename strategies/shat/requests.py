"""`ServerRequest` and `Configuration`: requests of a worker to parameter servers, and the state that servers keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.shards import ShardView


@dataclasses.dataclass(frozen=True)
class ServerRequest:
    """A request to some servers, each of which answers.

    Attributes:
      queue: The servers' queue: CONFIGURE, PUSH or PULL of `hop_tf.strategies.shat.server.server`.
      operation: The awaited operation, for error messages.
      message: `message(shard, is_missing)` returns header and payload. `is_missing` is False if the server may have the
        request already.
      is_answer: `is_answer(answer)` returns True if a server's answer is to this request.
      shards: The shards of the servers that are asked.
      sources: Ranks that the servers wait for. While an answer is missing, they must be there or have left properly.
      step: The training step, or None if the request belongs to none.
      retries: True to ask again if an answer takes long.
    """

    queue: str
    operation: str
    message: Callable[[ShardView, bool], tuple[bytes, Sequence[np.ndarray]]]
    is_answer: Callable[[object], bool]
    shards: Sequence[ShardView]
    sources: Sequence[int] = ()
    step: int | None = None
    retries: bool = False


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The group that a server is to keep.

    Attributes:
      description: The description of the group.
      state: The state to begin with. Empty if another rank gives it.
    """

    description: pb.Configure
    state: Sequence[np.ndarray]
