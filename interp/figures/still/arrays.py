"""Arrays out of plotly's base64 form."""

import base64
from typing import Any

import numpy as np


def unpacked(value: Any) -> Any:
    """A figure's JSON with every packed array (`dtype`, `bdata`, perhaps `shape`) as a numpy array."""
    if isinstance(value, dict):
        if "bdata" in value:
            array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
            shape = value.get("shape")
            return array if shape is None else array.reshape([int(n) for n in str(shape).split(",")])
        return {key: unpacked(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [unpacked(part) for part in value]
    return value
