"""`Request` and `Configuration`: what a worker asks parameter servers, and what it tells them to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.shards import ShardView


@dataclasses.dataclass(frozen=True)
class Request:
    """What some servers are asked, each of which answers.

    Attributes:
      queue: Where servers take it: CONFIGURE, PUSH or PULL of `hop_tf.strategies.shat.server.server`.
      operation: What is awaited, for error messages.
      message: `message(shard, is_missing)` gives header and payload; `is_missing` is False where the server may have
        got the request before.
      is_answer: Whether what a server has answered is about this request.
      shards: What the servers that are asked keep.
      sources: Ranks that servers wait for: while an answer is missing they must be there, or leave properly.
      step: The training step, where it is of one.
      retries: Whether to ask again where an answer takes long.
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
    """What a server is told to keep.

    Attributes:
      description: What it is.
      state: What to begin with; empty where others give that.
    """

    description: pb.Configure
    state: Sequence[np.ndarray]
