"""Checkpoints that were scored, on disk: a detection that was stopped goes on where it was."""

import dataclasses
import hashlib
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interp.errors import DetectionError
from interp.records import AttentionMap, CheckpointScores, ProbeRecord, to_plain, write_text

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a report says once for all its checkpoints, as found on one of them."""

    mixers: tuple[str, ...]
    n_layers: int
    n_heads: int
    probe: ProbeRecord
    notes: tuple[str, ...]
    text: str | None
    origin: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One scored checkpoint; `maps` where it was the last of its series."""

    scores: CheckpointScores
    facts: Facts
    maps: tuple[AttentionMap, ...] | None = None


class FinishedFolder:
    """A folder with one JSON file for each scored checkpoint.

    A file is used again only by a detection with the same settings on the same weights; others are left
    alone.

    Args:
        settings: Everything that a score depends on besides the weights.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]):
        self.folder = Path(folder)
        text = json.dumps(settings, sort_keys=True, default=str)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DetectionError(f"resume folder {self.folder} cannot be made: {error.strerror}") from None

    def get(self, step: int, weight_sha256: str | None) -> Finished | None:
        """The scores of a step, if they are there and of these weights (never for weights without a hash).

        Raises:
            DetectionError: a file that is damaged.
        """
        path = self._path(step)
        if weight_sha256 is None or not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT or values["weights"] != weight_sha256:
                return None
            finished = _rebuilt(Finished, values["finished"], "finished")
            if finished.scores.step != step:
                raise ValueError(f"it holds step {finished.scores.step}")
            return finished
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DetectionError(
                f"{path} cannot be used ({' '.join(str(error).split())}); remove it to compute the step again"
            ) from None

    def put(self, finished: Finished, weight_sha256: str | None) -> None:
        """Keep the scores of a step: the file appears whole or not at all."""
        if weight_sha256 is None:
            return
        values = {"format": FORMAT, "weights": weight_sha256, "finished": to_plain(finished, samples=True)}
        write_text(self._path(finished.scores.step), json.dumps(values, allow_nan=False) + "\n")

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.{self.key}.json"


def _rebuilt(kind: Any, value: Any, name: str) -> Any:
    """A record of type `kind` from its plain form: the inverse of `to_plain` for the records used here.

    Raises:
        TypeError: the value called `name` is not of that type.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is not None and type(None) in args:
        return None if value is None else _rebuilt(next(a for a in args if a is not type(None)), value, name)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {field.name for field in dataclasses.fields(kind)}
        if not isinstance(value, dict) or not value.keys() <= fields:
            raise TypeError(f"{name} is {_shown(value)}, not a {kind.__name__}")
        return kind(**{key: _rebuilt(hints[key], inner, key) for key, inner in value.items()})
    if origin is tuple:
        n = len(value) if isinstance(value, list) else -1
        if n < 0 or (args[-1] is not Ellipsis and n != len(args)):
            raise TypeError(f"{name} is {_shown(value)}, not a list" + (" of its length" if n >= 0 else ""))
        kinds = [args[0]] * n if args[-1] is Ellipsis else args
        if args == (float, Ellipsis) and all(type(item) is float for item in value):
            return tuple(value)
        return tuple(_rebuilt(inner, item, name) for inner, item in zip(kinds, value, strict=True))
    accepted = {float: (float, int), dict: (dict,)}.get(origin or kind, (kind,))
    if type(value) not in accepted:
        raise TypeError(f"{name} is {_shown(value)}, not {(origin or kind).__name__}")
    return value


def _shown(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 40 else f"{said[:36]} ..."
