"""Tables of preprocessing layers, such as vocabularies. They are not weights, so no broadcast makes them equal."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.preprocessing.index_lookup import IndexLookup

from hop_tf.errors import MismatchError
from hop_tf.keras_hook.ownership import Owner, mark_of

_CLAIM = "tables of preprocessing layers"
_MAX_NUMBERS = 1000  # Ranks compare at most this many numbers of a table, evenly spaced: enough to notice other data.
_TOLERANCE = 1e-3  # Machines add numbers in different orders.
_REMEDIES = {
    keras.layers.TextVectorization: "set_vocabulary(tokens)",
    IndexLookup: "set_vocabulary(tokens)",
    keras.layers.Discretization: "Discretization(bin_boundaries=...)",
    keras.layers.Normalization: "Normalization(mean=..., variance=...)",
}


# The layers with tables that the process has created, numbered in order of creation. A thread that is a rank of its own
# (`become_rank`) keeps its layers in `_thread.layers` instead.
_layers: weakref.WeakValueDictionary[int, keras.Layer] = weakref.WeakValueDictionary()
_thread = threading.local()
_counter = itertools.count()


def become_rank() -> None:
    """Makes this thread a rank of its own, as in `InProcessCluster`: layers that it creates are visible only to it."""
    _thread.layers = weakref.WeakValueDictionary()


@functools.cache
def watch_tables() -> None:
    """Records Keras's layers with tables, existing ones and all later ones. Many of them belong to no model."""
    for each in gc.get_objects():
        if issubclass(type(each), tuple(_REMEDIES)):
            _note(each)
    for kind in _REMEDIES:
        kind.__new__ = staticmethod(_noting(kind))  # `__init__` stays, because Keras inspects its arguments.


def _noting(kind: type) -> Callable:
    def new(cls, *args, **kwargs):
        layer = super(kind, cls).__new__(cls, *args, **kwargs)
        _note(layer)
        return layer

    return new


def _note(layer: keras.Layer) -> None:
    getattr(_thread, "layers", _layers)[next(_counter)] = layer


@dataclasses.dataclass(frozen=True)
class _Table:
    """The table that a layer has learned from data.

    Attributes:
      remedy: The call or the arguments that give the layer a table.
      tokens: The vocabulary, in the order of the tokens' indices.
      numbers: Triples of a name, a value, and a scale. Ranks compare differences of the value with the scale.
    """

    remedy: str
    tokens: Sequence[str] = ()
    numbers: Sequence[tuple[str, float, float]] = ()

    @functools.cached_property
    def digest(self) -> list:
        """A short form for other ranks: a checksum of the tokens, both lengths, and up to `_MAX_NUMBERS` numbers."""
        step = len(self.numbers) // _MAX_NUMBERS + 1
        return [zlib.crc32("\0".join(self.tokens).encode()), len(self.tokens), len(self.numbers), self.numbers[::step]]


# For each layer, the object that identifies the table (see `_source_of`), and the table.
_tables: weakref.WeakKeyDictionary[keras.Layer, tuple[object, _Table]] = weakref.WeakKeyDictionary()


def _table_of(layer: keras.Layer) -> _Table | None:
    """The table of a layer; None if the layer has no table yet. A large vocabulary is read once."""
    source, read = _source_of(layer)
    if source is None:
        return None
    known = _tables.get(layer)
    if known is None or known[0] is not source:
        known = _tables[layer] = (source, read(layer))
    return known[1]


def _source_of(layer: keras.Layer) -> tuple[object | None, Callable[[keras.Layer], _Table]]:
    """An object that identifies the layer's present table (None without one), and a function that reads the table."""
    if isinstance(layer, (keras.layers.TextVectorization, IndexLookup)):
        table = getattr(_lookup_of(layer), "lookup_table", None)
        return (table if table is not None and int(table.size()) else None), _read_lookup
    if isinstance(layer, keras.layers.Discretization):
        return getattr(layer, "bin_boundaries", None), _read_boundaries
    mean = getattr(layer, "mean", None)
    return (mean if tf.is_tensor(mean) and not tf.is_symbolic_tensor(mean) else None), _read_moments


def _lookup_of(layer: keras.layers.TextVectorization | IndexLookup) -> IndexLookup | None:
    """The layer that has the table: a `TextVectorization` keeps the table in an inner layer."""
    return layer if isinstance(layer, IndexLookup) else getattr(layer, "_lookup_layer", None)


def _read_lookup(layer: keras.layers.TextVectorization | IndexLookup) -> _Table:
    weights = getattr(_lookup_of(layer), "idf_weights_const", None)
    numbers = [] if weights is None else np.asarray(weights).tolist()
    return _Table(
        _REMEDIES[IndexLookup],
        tokens=[str(token) for token in layer.get_vocabulary()],
        numbers=[(f"idf weight {index}", value, abs(value)) for index, value in enumerate(numbers)],
    )


def _read_boundaries(layer: keras.layers.Discretization) -> _Table:
    values = np.asarray(layer.bin_boundaries, np.float64)
    scale = float(np.ptp(values)) if values.size else 0.0
    numbers = [(f"bin boundary {index}", value, scale) for index, value in enumerate(values.tolist())]
    return _Table(_REMEDIES[keras.layers.Discretization], numbers=numbers)


def _read_moments(layer: keras.layers.Normalization) -> _Table:
    means, variances = (
        np.asarray(tf.cast(each, tf.float64)).reshape(-1).tolist() for each in (layer.mean, layer.variance)
    )
    numbers = []
    for index, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        numbers += [(f"mean {index}", mean, abs(mean) + variance**0.5), (f"variance {index}", variance, variance)]
    return _Table(_REMEDIES[keras.layers.Normalization], numbers=numbers)


class AdaptedLayers:
    """This rank's layers with tables, right before training begins.

    Ranks compare corresponding layers. Layers correspond if they have the same class and name, and if both ranks have
    the same number of such layers.

    Attributes:
      claims: The claims for the session. If any rank makes them, all ranks have to compare.
    """

    def __init__(self):
        self._tables: dict[str, _Table] = {}
        layers = _layers_of_users()
        tables = [(_describe(layer), table) for layer in layers if (table := _table_of(layer)) is not None]
        for name, of_name in itertools.groupby(sorted(tables, key=lambda each: each[0]), key=lambda each: each[0]):
            same = [table for _, table in of_name]
            self._tables.update((f"{name}, {index + 1} of {len(same)}", each) for index, each in enumerate(same))
        self.claims = [_CLAIM] if self._tables else []

    def is_needed(self, owners: Collection[str]) -> bool:
        """True if any rank has layers with tables. `owners` are the claims of all ranks."""
        return _CLAIM in owners

    def compare(self, share: Callable[[bytes], Sequence[bytes]]) -> None:
        """Compares the tables with rank 0's. A collective.

        Args:
          share: Sends this rank's bytes to all ranks, and returns the bytes of every rank.

        Raises:
          MismatchError: On all ranks, if a rank's table differs from rank 0's.
        """
        digests = {name: table.digest for name, table in self._tables.items()}
        first, *others = (json.loads(data) for data in share(json.dumps(digests).encode()))
        for rank, theirs in enumerate(others, start=1):
            for name in sorted(first.keys() & theirs.keys()):
                if not _are_alike(first[name], theirs[name]):
                    tokens = share(json.dumps(list(self._tables[name].tokens) if name in self._tables else []).encode())
                    self._refuse(
                        name, rank, first[name], theirs[name], *(json.loads(tokens[each]) for each in (0, rank))
                    )

    def _refuse(self, name: str, rank: int, first: list, theirs: list, tokens: list, their_tokens: list) -> None:
        remedy = self._tables[name].remedy if name in self._tables else "by its arguments"
        difference = _first_difference([*_in_words(tokens), *first[3]], [*_in_words(their_tokens), *theirs[3]])
        raise MismatchError(
            f"the layer {name.removesuffix(', 1 of 1')} has another table on rank {rank} than on rank 0: {difference}. "
            "Ranks do not average tables, so they would train on different inputs. Call `adapt` with the same data on "
            f"all ranks. Or give all ranks the table of one rank: {remedy}. To keep a table of its own on each rank, "
            "call hop_tf.state(layer, 'own')."
        )


def _layers_of_users() -> list[keras.Layer]:
    """The layers with tables in order of creation, without inner layers and without layers marked as "own"."""
    # `valuerefs` is atomic: other threads may create layers meanwhile.
    noted = [_layers, _thread.layers] if hasattr(_thread, "layers") else [_layers]
    layers = [reference() for each in noted for reference in each.valuerefs()]
    made = [layer for layer in layers if layer is not None and mark_of(layer) is not Owner.OWN]
    inner = {id(_lookup_of(layer)) for layer in made if isinstance(layer, keras.layers.TextVectorization)}
    return [layer for layer in made if id(layer) not in inner]


def _describe(layer: keras.Layer) -> str:
    return f"{layer.name!r} ({type(layer).__name__})"


def _are_alike(one: list, other: list) -> bool:
    return one[:3] == other[:3] and all(map(_is_close, one[3], other[3]))


def _is_close(one: Sequence, other: Sequence) -> bool:
    (_, value, scale), (_, of_other, _) = one, other
    are_nan = value != value and of_other != of_other  # The data had NaN values.
    return value == of_other or are_nan or abs(value - of_other) <= _TOLERANCE * scale


def _in_words(tokens: Sequence[str]) -> list[tuple[str, str, float]]:
    return [(f"token {index}", token, 0.0) for index, token in enumerate(tokens)]


def _first_difference(first: Sequence[Sequence], theirs: Sequence[Sequence]) -> str:
    for own, other in zip(first, theirs, strict=False):
        if own[1] != other[1] and (isinstance(own[1], str) or not _is_close(own, other)):
            return f"{own[0]} is {other[1]!r} there and {own[1]!r} on rank 0"
    return f"it has {len(theirs)} entries there and {len(first)} on rank 0"
