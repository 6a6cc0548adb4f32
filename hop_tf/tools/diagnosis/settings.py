"""A strategy's settings, read from records: the recorded texts are parsed into values."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from hop_tf import codecs
from hop_tf.runtime.choosing import AUTO

# Ranks that choose these settings themselves begin with these values.
_UNTIL_CHOSEN = {"codec": codecs.Identity(), "algorithm": "mesh", "pipeline_width": 1, "delay": 0, "interval": 1}


def read_settings(about: Mapping[str, object]) -> dict[str, object] | None:
    """Reads the arguments of the strategy that has written records.

    Args:
      about: `ProcessLog.about`.

    Returns:
      The arguments by name, except arguments that have no text. None if the records have no settings.
    """
    texts = about.get("settings")
    if not isinstance(texts, Mapping):
        return None
    settings = {str(name): _read(str(text)) for name, text in texts.items()}
    if isinstance(settings.get("topology"), str):
        settings["topology"] = settings["topology"].split(" ")[0]  # A digest of the graph follows the name.
    return settings


def settings_in_effect(settings: Mapping[str, object], lines: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The settings that ranks train with: the last choice replaces "auto".

    Args:
      settings: The settings from `read_settings`.
      lines: `ProcessLog.lines`.
    """
    chosen = [line for line in lines if line.get("kind") == "chosen"]
    automatic = {name: default for name, default in _UNTIL_CHOSEN.items() if settings.get(name) == AUTO}
    if chosen:
        automatic = {name: _read(str(chosen[-1][name])) for name in automatic}
    return {**settings, **automatic}


def _read(text: str) -> object:
    """Parses a value: a literal, or a codec or the like with literals as its arguments. Otherwise returns the text."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        make = _makers().get(node.func.id)
        if make is None:
            return text
        arguments = {each.arg: _read(ast.unparse(each.value)) for each in node.keywords}
        try:
            return make(**arguments)
        except (TypeError, ValueError):  # The records are of another version.
            return text
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        return text


def _makers() -> dict[str, Callable]:
    from hop_tf.strategies.hop.settings import SkipIterations

    return {each: getattr(codecs, each) for each in codecs.__all__} | {"SkipIterations": SkipIterations}
