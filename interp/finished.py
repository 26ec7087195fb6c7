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
            return _rebuilt(Finished, values["finished"])
        except (ValueError, KeyError, TypeError) as error:
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


def _rebuilt(kind: Any, value: Any) -> Any:
    """A record of type `kind` from its plain form: the inverse of `to_plain` for the records used here."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if value is None or kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _rebuilt(hints[name], inner) for name, inner in value.items()})
    if origin is tuple:
        inner = args[0] if args[-1] is Ellipsis else None
        return tuple(_rebuilt(inner or args[n], item) for n, item in enumerate(value))
    if origin is not None and type(None) in args:
        return _rebuilt(next(arg for arg in args if arg is not type(None)), value)
    return value
