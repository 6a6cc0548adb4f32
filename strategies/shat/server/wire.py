"""Conversion of codecs to JSON and back."""

from __future__ import annotations

import dataclasses
import json

from hop_tf import codecs
from hop_tf.errors import ProtocolError


def codec_to_json(codec: codecs.Codec) -> str:
    """Describes a codec in JSON. Its settings must be values that JSON can hold."""
    return json.dumps({"name": codec.name, "settings": dataclasses.asdict(codec)})


def codec_from_json(text: str) -> codecs.Codec:
    """Returns the codec that `codec_to_json` has described.

    Raises:
      ProtocolError: If there is no such codec here.
    """
    try:
        description = json.loads(text)
        return dataclasses.replace(codecs.get(description["name"]), **description["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"{text!r} describes no codec: {error}.") from error
