"""A path that is open in the dashboard: its checkpoints, what can be chosen in them, the loaded models."""

import threading
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from interp.dashboard.cache import BoundedCache
from interp.dashboard.messages import attempt
from interp.dashboard.run_source import open_run
from interp.errors import DetectionError
from interp.sources import Checkpoint, Source, open_source
from interp.subject import LanguageModelSubject, Subject

# Numbers of loaded models, in weights: some hundred demo models, one or two pretrained ones.
MOST_WEIGHTS = 300_000_000
# Numbers of channel clusters that Mamba-1 layers offer as units, beside `layer` and `state`.
CLUSTERS = (4, 8)


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What can be chosen in one layer: its readings, and the number of units by kind of unit."""

    kind: str
    readings: tuple[str, ...]
    n_units: dict[str, int]


class Loaded:
    """A model in memory. `lock` is held while it runs: hooks of two requests must not meet."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.lock = threading.RLock()


class Run:
    """A path as `detect-induction` accepts it, opened; checkpoints are loaded when asked for.

    Attributes:
        name: Last part of the path.
        steps: Of its checkpoints, rising; a single model has one.
        refused: Why the folder of a step is no checkpoint, for those left out of `steps`.

    Raises:
        DetectionError, CheckpointError, ConfigError: nothing at the path that can be read.
    """

    def __init__(self, path: str, *, models: BoundedCache | None = None):
        self.path = path
        self.source: Source
        self.source, self.refused = open_run(path)
        self._on_disk = Path(path).exists()
        self.name = Path(path.rstrip("/")).name or path
        self.steps = tuple(checkpoint.step for checkpoint in self.source.checkpoints)
        self._models = model_cache() if models is None else models
        self.library_windows: Any = None

    def key(self, index: int) -> tuple[Any, ...]:
        """Names a checkpoint as it lies on disk now: another file there has another key.

        Raises:
            DetectionError: the checkpoint is gone.
        """
        checkpoint = self._checkpoint(index)
        changed = []
        for path in self._files(checkpoint):
            try:
                status = path.stat()
            except OSError:
                raise DetectionError(
                    f"{self.name}: the checkpoint of step {checkpoint.step:,} is gone ({path} does not exist "
                    "any more); choose another one"
                ) from None
            changed += [status.st_size, status.st_mtime_ns]
        return (self.path, index, *changed)

    def load(self, index: int) -> Loaded:
        """The model of a checkpoint, from memory where it is there.

        Raises:
            DetectionError, CheckpointError, ConfigError: it is gone, or cannot be read.
        """
        return self._models.get(self.key(index), lambda: Loaded(self._open(index)))

    def fingerprint(self) -> tuple[Any, ...]:
        """Steps, and size and time of change of each one's weights: other files have another one."""
        found = []
        for checkpoint in self.source.checkpoints:
            for path in self._files(checkpoint):
                try:
                    status = path.stat()
                except OSError:
                    found.append((checkpoint.step, None, None))
                else:
                    found.append((checkpoint.step, status.st_size, status.st_mtime_ns))
        return (self.steps, *found)

    def newest(self) -> int:
        """Place of the newest checkpoint that can be read; loads it.

        Raises:
            DetectionError, CheckpointError, ConfigError: none can be read; said of the newest.
        """
        last = len(self.steps) - 1
        for index in range(last, -1, -1):
            if attempt(lambda index=index: self.load(index))[1] is None:
                return index
        self.load(last)
        return last

    def unreadable(self, first: int = 0) -> dict[int, str]:
        """Why checkpoints cannot be read, by step: those from one place on, and the ones left out."""
        found = {}
        for index in range(first, len(self.steps)):
            why = attempt(lambda index=index: self.load(index))[1]
            if why is not None:
                found[self.steps[index]] = why
        return dict(sorted({**self.refused, **found}.items()))

    def look_again(self) -> None:
        """Take in the checkpoints that were written after the last one known.

        Those known stay where they are, deleted ones too: open windows name them by their place.
        """
        own = all(checkpoint.weight_files for checkpoint in self.source.checkpoints)
        if not own or next(Path(self.path).glob("step_*"), None) is None:
            return
        found, self.refused = open_run(self.path)
        later = tuple(one for one in found.checkpoints if one.step > self.steps[-1])
        if later:
            self.source = replace(found, checkpoints=(*self.source.checkpoints, *later))
            self.steps = tuple(checkpoint.step for checkpoint in self.source.checkpoints)

    @cached_property
    def layers(self) -> tuple[LayerFacts, ...]:
        """What each layer offers; loads the newest checkpoint that can be read."""
        subject = self.load(self.newest()).subject
        if not isinstance(subject, LanguageModelSubject):
            facts = LayerFacts(kind="softmax", readings=("pattern",), n_units={"head": subject.n_heads})
            return (facts,) * subject.n_layers
        return tuple(_facts(block.attn) for block in subject.model.blocks)

    def _checkpoint(self, index: int) -> Checkpoint:
        if not 0 <= index < len(self.steps):
            raise DetectionError(f"{self.name} has checkpoints 0..{len(self.steps) - 1}; asked for {index}")
        return self.source.checkpoints[index]

    def _files(self, checkpoint: Checkpoint) -> tuple[Path, ...]:
        if checkpoint.weight_files:
            return checkpoint.weight_files
        return (Path(self.path),) if self._on_disk else ()

    def _open(self, index: int) -> Subject:
        checkpoint = self._checkpoint(index)
        # `Checkpoint.open` of a series reads weights into the model opened before, which may be in use.
        if checkpoint.weight_files:
            return open_source(checkpoint.weight_files[0].parent).checkpoints[0].open()
        return checkpoint.open()


def model_cache() -> BoundedCache:
    """Room for loaded models of `MOST_WEIGHTS` weights together."""
    return BoundedCache(MOST_WEIGHTS, lambda loaded: loaded.subject.n_weights)


def _facts(mixer: Any) -> LayerFacts:
    if mixer.kind != "mamba1":
        return LayerFacts(kind=mixer.kind, readings=tuple(mixer.readings), n_units={"head": mixer.n_heads})
    d_state = mixer.A_log.shape[1]
    clusters = {f"cluster:{k}": k for k in CLUSTERS if k <= mixer.n_heads}
    return LayerFacts(
        kind=mixer.kind,
        readings=tuple(mixer.readings),
        n_units={"layer": 1, **clusters, "state": d_state},
    )
