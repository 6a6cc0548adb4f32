"""Converts the state that one rank under Canary sends to another rank to bytes, and back."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.strategies.canary.gei import GEIRows
from hop_tf.tensors.payloads import join, split


def join_tables(tables: Mapping[bytes, np.ndarray], freed: Container[bytes]) -> list[np.ndarray]:
    """Joins the tables of ledgers, the keys of their layouts, and flags for the layouts that were freed."""
    keys = np.frombuffer(b"".join(tables), np.uint8)
    are_freed = np.array([key in freed for key in tables], np.uint8)
    return join([keys, are_freed, *(table.ravel() for table in tables.values())])


def split_tables(payload: np.ndarray, world_size: int, num_columns: int) -> tuple[dict[bytes, np.ndarray], set[bytes]]:
    """Splits the result of `join_tables` into tables of `num_columns` columns, by key, and the keys of freed layouts.

    Raises:
      ProtocolError: If the payload does not have such parts.
    """
    if len(parts := split(payload)) < 2:
        raise ProtocolError(f"received ledgers in {len(parts)} parts.")
    keys, are_freed, *tables = parts
    if keys.nbytes != world_size * len(tables) or are_freed.nbytes != len(tables):
        raise ProtocolError(f"received a state with {keys.nbytes} bytes of keys for {len(tables)} ledgers.")
    if any(table.nbytes % (8 * num_columns) for table in tables):
        raise ProtocolError(f"received a state with ledgers that do not have {num_columns} columns.")
    reshaped = [table.view(np.int64).reshape(-1, num_columns) for table in tables]
    keys = _divide(keys, world_size)
    return dict(zip(keys, reshaped, strict=True)), set(itertools.compress(keys, are_freed))


def join_index(index: GEIRows) -> list[np.ndarray]:
    """Joins the arrays of a gradient exchange index."""
    return join([each.ravel() for each in (index.iterations, index.bits, index.parts, index.completed)])


def split_index(payload: np.ndarray, world_size: int, num_colayers: int) -> GEIRows:
    """Splits the result of `join_index`.

    Raises:
      ProtocolError: If the payload is not an index, or its ranks or colayers do not match.
    """
    try:
        iterations, bits, parts, completed = split(payload)
        index = GEIRows(
            iterations.view(np.int64),
            bits.reshape(-1, num_colayers, -(-world_size // 8)),
            parts.view(np.int64).reshape(-1, 4),
            completed.view(np.int64),
        )
    except ValueError as error:
        raise ProtocolError(f"received a malformed gradient exchange index: {error}") from error
    _, ranks, colayers, _ = index.parts.T
    if len(index.iterations) != len(index.bits) or index.completed.size != world_size:
        raise ProtocolError(
            f"received a gradient exchange index of {index.completed.size} ranks. Expected: {world_size} ranks."
        )
    if np.any((ranks < 0) | (ranks >= world_size) | (colayers < 0) | (colayers >= num_colayers)):
        raise ProtocolError("received a gradient exchange index with pieces of unknown ranks or colayers.")
    return index


def join_snapshots(snapshots: Mapping[tuple[bytes, int], np.ndarray]) -> list[np.ndarray]:
    """Joins the snapshots of pieces, the keys of their layouts and the numbers of the pieces."""
    keys = np.frombuffer(b"".join(key for key, _ in snapshots), np.uint8)
    return join([keys, np.array([piece for _, piece in snapshots], np.int64), *snapshots.values()])


def split_snapshots(payload: np.ndarray, world_size: int) -> dict[tuple[bytes, int], np.ndarray]:
    """Splits the result of `join_snapshots`. The values remain bytes.

    Raises:
      ProtocolError: If the numbers of keys, pieces and values differ.
    """
    if len(parts := split(payload)) < 2:
        raise ProtocolError(f"received snapshots in {len(parts)} parts.")
    keys, numbers, *values = parts
    if keys.nbytes != world_size * len(values) or numbers.nbytes != 8 * len(values):
        raise ProtocolError(f"received {len(values)} snapshots with {keys.nbytes} bytes of keys.")
    return dict(zip(zip(_divide(keys, world_size), numbers.view(np.int64).tolist(), strict=True), values, strict=True))


def _divide(keys: np.ndarray, world_size: int) -> list[bytes]:
    """Splits the concatenated keys of layouts."""
    return [keys[start : start + world_size].tobytes() for start in range(0, keys.size, world_size)]
