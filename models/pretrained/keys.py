"""Reading another project's configuration: each key by name, with its type, default and older names."""

import json
import math
from pathlib import Path
from typing import Any

from models.errors import CheckpointError, ConfigError

_REQUIRED = object()


class UnsupportedArchitecture(ConfigError):
    """A model that has no reader here; softmax ones may still be read through TransformerLens's bridge."""


class Keys:
    """The keys of a `config.json`, or of a GGUF header in the same names."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values = values
        self.where = where

    def integer(self, name: str, default: Any = _REQUIRED, *, also: tuple[str, ...] = ()) -> int:
        """A positive integer; `also` lists older names of the key."""
        value = self.get(name, default, also=also)
        if value is default or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise self.refused(name, "a positive integer")

    def number(self, name: str, default: Any = _REQUIRED, *, also: tuple[str, ...] = ()) -> float:
        """A number."""
        value = self.get(name, default, also=also)
        if value is default or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise self.refused(name, "a number")

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refused(name, "true or false")
        return value

    def one_of(self, name: str, accepted: dict[str, str], default: str) -> str:
        """A name, translated by the table of accepted names."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in accepted:
            raise self.refused(name, ", ".join(sorted(accepted)))
        return accepted[value]

    def get(self, name: str, default: Any = _REQUIRED, *, also: tuple[str, ...] = ()) -> Any:
        """The value as it is. A null counts as absent."""
        for key in (name, *also):
            if self.values.get(key) is not None:
                return self.values[key]
        if default is _REQUIRED:
            raise ConfigError(f"{self.where} lacks the key {name!r}")
        return default

    def refused(self, name: str, accepted: str) -> ConfigError:
        """The error for a value that is not accepted."""
        return ConfigError(f"{self.where}: {name} is {self.values.get(name)!r}; accepted: {accepted}")

    def refuse(self, name: str, *accepted: Any) -> None:
        """Refuses any value of a key but those given: what would change the result unseen."""
        value = self.values.get(name)
        if value is not None and value not in accepted:
            raise self.refused(name, " or ".join(map(str, accepted)) if accepted else "absent")

    def token(self, name: str, d_vocab: int) -> int | None:
        """A token id, or None where there is none, or the id lies outside the vocabulary."""
        value = self.values.get(name)
        if isinstance(value, list) and value:
            value = value[0]
        inside = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < d_vocab
        return value if inside else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; numbers that JSON lacks may be written as {"__float__": "Infinity"}.

    Raises:
        CheckpointError: the file cannot be read or does not hold a JSON object.
    """
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise CheckpointError(f"{path}: {reason}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds {type(values).__name__}; accepted: a JSON object")
    return _plain_floats(values)


def _plain_floats(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return {"Infinity": math.inf, "-Infinity": -math.inf}.get(value["__float__"], math.nan)
        return {key: _plain_floats(inner) for key, inner in value.items()}
    return [_plain_floats(inner) for inner in value] if isinstance(value, list) else value
