"""Models of other projects as sources: our own readers where there are some, the bridge for the rest."""

import hashlib
from pathlib import Path
from typing import Any, ClassVar

from interp.errors import DetectionError
from interp.sources import Checkpoint, Source, read_by
from interp.subject import Subject


def foreign_checkpoint(path: Path, *, step: int, device: str, bos: int | None | str, via: str) -> Checkpoint:
    """A Hugging Face folder or a `.gguf` file, not loaded yet."""
    model = _OnDisk(path)

    def load() -> Subject:
        return open_foreign(path, device=device, bos=bos, via=via, opened=model.taken())

    return Checkpoint(step=step, tokens=None, weight_files=(), open=load, identity=model.sha256)


def foreign_series(path: Path, *, device: str, bos: int | None | str, via: str) -> Source | None:
    """A local folder with one Hugging Face folder for each revision; None where it is none."""
    from models.pretrained import open_series

    series = open_series(path)
    return None if series is None else _source(series, device, bos, via)


def hub_source(name: str, *, steps: Any, device: str, bos: int | None | str, via: str) -> Source:
    """A model on the hub: NAME@REVISION, or NAME for its main branch; with `steps`, NAME's series.

    Raises:
        CheckpointError: the hub cannot be reached, has no such model, or its weights are pickled.
        DetectionError: steps are asked for, but no branch or tag of the model names a step.
    """
    from models.pretrained import open_series
    from models.pretrained.hub import download
    from models.pretrained.series import step_of

    name, _, revision = name.partition("@")
    if steps is not None and not revision:
        series = open_series(name)
        if series is None:
            raise DetectionError(
                f"{name} has no revision that names a step: leave out the steps, or give {name}@REVISION"
            )
        return _source(series, device, bos, via)

    def load() -> Subject:
        folder = Path(download(name, revision or None))
        return open_foreign(folder, device=device, bos=bos, via=via, name=name, revision=revision or None)

    checkpoint = Checkpoint(step=step_of(revision) or 0, tokens=None, weight_files=(), open=load)
    return Source(path=f"{name}@{revision}" if revision else name, checkpoints=(checkpoint,))


def open_foreign(
    path: Path,
    *,
    device: str,
    bos: int | None | str,
    via: str = "auto",
    name: str | None = None,
    revision: str | None = None,
    opened: Any = None,
) -> Subject:
    """Load into our own mixers (`via` "mixers") or through the bridge ("bridge"); `origin` says which.

    "auto" takes our mixers, and the bridge for kinds of models that have no reader here. `opened`: the same
    path, if it is open already.

    Raises:
        CheckpointError, ConfigError, DetectionError: one line on what cannot be read.
    """
    from models.pretrained import UnsupportedArchitecture, load_opened, open_pretrained

    if via == "bridge":
        return _through_bridge(path, "asked for", device, bos, name, revision)
    try:
        opened = opened or open_pretrained(path)
    except UnsupportedArchitecture as error:
        if via == "mixers":
            raise
        return _through_bridge(path, str(error), device, bos, name, revision)
    return read_by(load_opened(opened, device=device, name=name, revision=revision), bos)


def _through_bridge(
    path: Path, reason: str, device: str, bos: int | None | str, name: str | None, revision: str | None
) -> Subject:
    from interp.bridge_subject import open_bridge
    from models.pretrained.weights import dtypes, open_safetensors, sha256

    # Before transformers opens anything: it would load pickled weights.
    weights = None if path.is_file() else open_safetensors(path)
    try:
        subject = open_bridge(path, device=device, bos=bos)
    except DetectionError as error:
        raise DetectionError(f"{reason}; TransformerBridge cannot read it either: {error}") from None
    subject.origin = {
        "path": name or str(path),
        "revision": revision,
        "reader": "TransformerBridge",
        "reason": reason,
        "stored_dtype": None if weights is None else dtypes(weights),
        "dtype": "float32",
        "bos": subject.bos,
        "special": sorted(subject.special),
        "norm_folding": "none",
        "weight_sha256": None if weights is None else sha256(weights),
        "notes": ["softmax instruments only"],
    }
    return subject


def _source(series: Any, device: str, bos: int | None | str, via: str) -> Source:
    checkpoints = tuple(_revision(series, revision, device, bos, via) for revision in series.revisions)
    return Source(
        path=series.path,
        checkpoints=checkpoints,
        notes=tuple(f"left out of the series: {reason}" for reason in series.skipped),
        lenient=True,
    )


def _revision(series: Any, revision: Any, device: str, bos: int | None | str, via: str) -> Checkpoint:
    if not series.on_hub:
        path = Path(series.path) / revision.name
        return foreign_checkpoint(path, step=revision.step, device=device, bos=bos, via=via)

    def load() -> Subject:
        with series.folder(revision) as folder:
            return open_foreign(
                folder, device=device, bos=bos, via=via, name=series.path, revision=revision.name
            )

    def identity() -> str | None:
        # From the hub's own list of files: equal weights are not downloaded twice.
        files = series.fingerprint(revision)
        return None if files is None else hashlib.sha256(files.encode()).hexdigest()

    return Checkpoint(step=revision.step, tokens=None, weight_files=(), open=load, identity=identity)


class _OnDisk:
    """A local model, opened once for its hash and for loading it: a GGUF header takes seconds to parse.

    One model is held open at a time, whatever the number of checkpoints.
    """

    _held: ClassVar[tuple[Path, Any] | None] = None

    def __init__(self, path: Path):
        self.path = path

    def sha256(self) -> str | None:
        """Hash of the weights as stored; None for a GGUF file of an architecture that is not read here."""
        from models.pretrained import UnsupportedArchitecture, open_pretrained
        from models.pretrained.weights import open_safetensors, sha256

        try:
            opened = open_pretrained(self.path)
        except UnsupportedArchitecture:
            return sha256(open_safetensors(self.path)) if self.path.is_dir() else None
        _OnDisk._held = (self.path, opened)
        return sha256(opened.stored)

    def taken(self) -> Any:
        """The opened model, which is not held any longer; None where it was not opened last."""
        held, _OnDisk._held = _OnDisk._held, None
        return held[1] if held is not None and held[0] == self.path else None
