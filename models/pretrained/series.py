"""Series of checkpoints: branches of a model on the hub, or a local folder with one folder for each revision.

One revision is on the disk at a time: what was downloaded for a step is removed when the step is done.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from models.errors import CheckpointError
from models.pretrained.hub import branches, download, hub_files, is_pretrained, local, refuse_pickled

# step1000 (Pythia), checkpoint-1000 (stanford-crfm, transformers' Trainer), step_00001000 (here), 1000.
_STEP = re.compile(r"(?:.*[-_/])?(?:step|checkpoint|ckpt|iter)[-_]?(\d+)|(\d+)", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Revision:
    """One checkpoint of a series: its step, and its branch, tag or folder name."""

    step: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Series:
    """A series of checkpoints, in step order; weights are opened one at a time.

    Attributes:
        path: The folder or the hub name.
        on_hub: Whether revisions are downloaded.
        skipped: Names that look like no step, and why they were left out.
    """

    path: str
    on_hub: bool
    revisions: tuple[Revision, ...]
    skipped: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps of the series."""
        return tuple(revision.step for revision in self.revisions)

    def missing(self, wanted: list[int]) -> list[int]:
        """Those of the wanted steps that the series has not."""
        return sorted(set(wanted) - set(self.steps))

    def at(self, step: int) -> Revision:
        """The revision of a step.

        Raises:
            CheckpointError: there is none; names the nearest.
        """
        for revision in self.revisions:
            if revision.step == step:
                return revision
        near = sorted(self.steps, key=lambda other: abs(other - step))[:3]
        raise CheckpointError(f"{self.path} has no step {step}; nearest: {', '.join(map(str, sorted(near)))}")

    def fingerprint(self, revision: Revision) -> str | None:
        """A text that is equal for revisions with equal weight files, without a download; None where unknown.

        Raises:
            CheckpointError: the hub cannot be reached, or the revision has pickled weights only.
        """
        if not self.on_hub:
            return None
        files = hub_files(self.path, revision.name)
        refuse_pickled(self.path, revision.name, files.names)
        return files.fingerprint

    @contextmanager
    def folder(self, revision: Revision) -> Iterator[Path]:
        """The revision's folder, for as long as the block runs; a download is removed afterwards.

        Raises:
            CheckpointError: it cannot be downloaded.
        """
        if not self.on_hub:
            yield Path(self.path) / revision.name
            return
        temporary = Path(tempfile.mkdtemp(prefix="revision-"))
        try:
            yield Path(download(self.path, revision.name, folder=temporary))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def open_series(path_or_name: str | Path) -> Series | None:
    """The series at a path or hub name; None where it is a single model.

    A local folder is a series when it is no model itself and has folders of models whose names end in a step.

    Raises:
        CheckpointError: nothing there, the hub cannot be reached, or two revisions of one step.
    """
    folder = local(path_or_name)
    if folder is None:
        return _series(str(path_or_name), branches(str(path_or_name)), on_hub=True)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    inner = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    models = [name for name in inner if (folder / name / "config.json").is_file()]
    if not models or not all(is_pretrained(folder / name) for name in models):
        return None
    found = _series(str(folder), models, on_hub=False)
    bare = [name for name in inner if name not in models and _STEP.fullmatch(name)]
    notes = tuple(f"{name}: no config.json" for name in bare)
    return (
        None
        if found is None
        else Series(
            path=found.path, on_hub=False, revisions=found.revisions, skipped=(*found.skipped, *notes)
        )
    )


def step_of(name: str) -> int | None:
    """The step that a branch, tag or folder name ends in, or None."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match.group(1) or match.group(2))


def _series(path: str, names: list[str], *, on_hub: bool) -> Series | None:
    found: dict[int, str] = {}
    skipped = []
    for name in names:
        step = step_of(name)
        if step is None:
            skipped.append(f"{name}: no step in the name")
            continue
        if step in found:
            raise CheckpointError(f"{path} has two revisions of step {step}: {found[step]!r} and {name!r}")
        found[step] = name
    if not found:
        return None
    revisions = tuple(sorted(Revision(step, name) for step, name in found.items()))
    return Series(path=path, on_hub=on_hub, revisions=revisions, skipped=tuple(skipped))
