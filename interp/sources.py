"""From a path to the models behind it: one checkpoint, a series of them, a Hugging Face folder, a `.gguf`
file.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from interp.errors import DetectionError
from interp.subject import LanguageModelSubject, Subject
from models.errors import CheckpointError

WAYS = ("auto", "bridge", "mixers")
ACCEPTED = (
    "a checkpoint folder, a run folder with step_<number> checkpoints, a Hugging Face model folder, a "
    "folder of its "
    "revisions, or a .gguf file"
)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# owner/name on the Hugging Face hub, perhaps with @revision.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is not loaded yet.

    `open` loads it: in a series into the model of the checkpoint that was opened before, whose subject then
    reads
    the new weights. `weight_files` are what its identity is hashed from, unless `identity` computes it.
    `prepare` may be called in another thread while the checkpoint before is in use: `open` is then quicker.
    """

    step: int
    tokens: int | None
    weight_files: tuple[Path, ...]
    open: Callable[[], Subject]
    identity: Callable[[], str | None] | None = None
    prepare: Callable[[], None] | None = None

    def sha256(self) -> str | None:
        """Hash of the weights as they lie on disk; None for a model in memory."""
        if self.identity is not None:
            return self.identity()
        if not self.weight_files:
            return None
        digest = hashlib.sha256()
        for path in self.weight_files:
            with open(path, "rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a path holds: its checkpoints in step order, and the run's own evaluation windows where it has
    them.

    `lenient`: steps that are missing, or whose files cannot be read, are named in the report instead of
        ending it
    (series of revisions that others made).
    """

    path: str
    checkpoints: tuple[Checkpoint, ...]
    windows: Int[Tensor, "window seq"] | None = None
    windows_from: str | None = None
    notes: tuple[str, ...] = ()
    lenient: bool = False

    def at_steps(
        self, steps: "Sequence[int] | str | None", missing: list[int] | None = None
    ) -> Iterator[Checkpoint]:
        """The checkpoints that `steps` selects; `missing` as in `select_steps`."""
        chosen = set(select_steps([checkpoint.step for checkpoint in self.checkpoints], steps, missing))
        return (checkpoint for checkpoint in self.checkpoints if checkpoint.step in chosen)


def select_steps(
    available: Sequence[int],
    steps: "Sequence[int] | int | str | None",
    missing: list[int] | None = None,
) -> list[int]:
    """The steps that a selection names.

    Args:
        steps: None or `all`; `last`; a number or several; or text of numbers and ranges `low:high` (both ends
            included, either may be missing), with commas between.
        missing: Takes the numbers that there is no checkpoint of; None refuses them.

    Raises:
        DetectionError: the text is none of these, or names a step that there is not, or nothing is left.
    """
    if steps is None:
        return list(available)
    if isinstance(steps, int):
        steps = [steps]
    parts = steps.split(",") if isinstance(steps, str) else [str(step) for step in steps]
    chosen: set[int] = set()
    names = {"all": ":", "last": str(available[-1])}
    for part in (names.get(part.strip(), part.strip()) for part in parts):
        low, colon, high = part.partition(":")
        try:
            if not part:
                raise ValueError
            ends = (int(low) if low else available[0], int(high) if high else available[-1])
        except ValueError:
            raise DetectionError(
                f"steps {part!r}: accepted are all, last, numbers, and ranges low:high, with commas between"
            ) from None
        found = [step for step in available if ends[0] <= step <= ends[1]] if colon else [ends[0]]
        if missing is not None and not colon and ends[0] not in available:
            missing.append(ends[0])
            continue
        if not found or not set(found) <= set(available):
            raise DetectionError(
                f"no checkpoint at steps {part}; there are: {', '.join(map(str, available))}"
            )
        chosen |= set(found)
    if not chosen:
        raise DetectionError(f"no checkpoint at steps {steps}; there are: {', '.join(map(str, available))}")
    return sorted(chosen)


def open_source(
    target: Any, *, device: str = "cpu", bos: int | None | str = "auto", steps: Any = None, via: str = "auto"
) -> Source:
    """What stands at a path or hub name; or a LanguageModel, TransformerBridge or Subject, as a source of one
    checkpoint.

    `steps` decides for a hub name whether its series of revisions is meant.

    Raises:
        DetectionError, models.CheckpointError, models.ConfigError: nothing there that can be read.
    """
    if via not in WAYS:
        raise DetectionError(f"via {via!r}; accepted: {', '.join(WAYS)}")
    if not isinstance(target, str | Path):
        return _in_memory(target, bos)
    if not str(target):
        raise DetectionError(f"path ''; accepted: {ACCEPTED}")
    path = Path(target)
    if not path.exists():
        if isinstance(target, str) and _HUB_NAME.fullmatch(target):
            if _holds_runs(path.parent):
                raise DetectionError(f"{path} does not exist; {path.parent} is a folder of runs here")
            from interp.foreign import hub_source

            return hub_source(target, steps=steps, device=device, bos=bos, via=via)
        raise DetectionError(
            f"{path} does not exist; accepted: {ACCEPTED}, or an owner/name[@revision] on the hub"
        )
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise DetectionError(f"{path} is a file of another kind; accepted: {ACCEPTED}")
        return _hugging_face(path, device, bos, via)
    if not path.is_dir():
        raise DetectionError(f"{path} is a device or a pipe; accepted: {ACCEPTED}")
    return _folder(path, device, bos, via)


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is a run or has runs in it, so that no owner of the hub is meant by its name."""
    return any(next(folder.glob(inside), None) for inside in ("run.json", "*/run.json", "step_*/config.json"))


def _folder(path: Path, device: str, bos: int | None | str, via: str) -> Source:
    steps = [entry for entry in path.glob("step_*") if entry.is_dir()]
    config = path / "config.json"
    ggufs = sorted(path.glob("*.gguf"))
    found = [*(["step_* checkpoints"] if steps else []), *(["config.json"] if config.exists() else [])]
    found += [gguf.name for gguf in ggufs]
    if len(found) > 1:
        raise DetectionError(f"{path} mixes models: it holds {', '.join(found)}; give the path of one")
    if steps:
        return _series(path, device, bos)
    if ggufs:
        return _hugging_face(ggufs[0], device, bos, via)
    if not config.exists():
        from interp.foreign import foreign_series

        revisions = foreign_series(path, device=device, bos=bos, via=via)
        if revisions is not None:
            return revisions
        empty = "is empty" if not any(path.iterdir()) else "holds no model"
        inside = sorted(p.parent.name for p in path.glob("*/run.json"))
        runs = f" itself, but runs: {', '.join(inside[:8])}" if inside else ""
        raise DetectionError(f"{path} {empty}{runs}; accepted: {ACCEPTED}")
    if "model_type" in _read_json(config) and "format" not in _read_json(config):
        return _hugging_face(path, device, bos, via)
    # "." and links are the folder that they lead to.
    place = path.resolve()
    step, tokens = _place_in_run(place)
    checkpoint = _checkpoint(path, step, _Loader(device=device), bos, tokens)
    windows, windows_from = _windows(place.parent)
    return Source(path=str(path), checkpoints=(checkpoint,), windows=windows, windows_from=windows_from)


def _series(path: Path, device: str, bos: int | None | str) -> Source:
    from models.checkpoint import list_checkpoints

    tokens = _tokens_by_step(path / "metrics.jsonl")
    loader = _Loader(device=device)
    checkpoints = tuple(
        _checkpoint(folder, step, loader, bos, tokens.get(step)) for step, folder in list_checkpoints(path)
    )
    windows, windows_from = _windows(path)
    return Source(path=str(path), checkpoints=checkpoints, windows=windows, windows_from=windows_from)


@dataclass(kw_only=True)
class _Loader:
    """Loads checkpoints of one configuration, all into one model: building it takes longer than scoring
    it."""

    device: str
    model: Any = None
    # Checked, and pinned where they go to a GPU.
    _ready: tuple[Path, dict[str, Tensor]] | None = None

    def __call__(self, folder: Path) -> Any:
        from models.checkpoint import load_model, load_weights

        ready, self._ready = self._ready, None
        if self.model is None:
            self.model = load_model(folder, device=self.device)
        elif ready is not None and ready[0] == folder:
            # From pinned memory: begun, and not waited for.
            tensors = {name: tensor.to(self.device, non_blocking=True) for name, tensor in ready[1].items()}
            self.model.load_state_dict(tensors)
            self.model.folder = folder.resolve()
        else:
            load_weights(folder, self.model)
        return self.model

    def prepare(self, folder: Path) -> None:
        """Read and check the weights of the checkpoint that comes next; what is wrong is said on loading."""
        from models.checkpoint import CheckpointError, ConfigError, read_weights

        if self.model is None:
            return
        with contextlib.suppress(CheckpointError, ConfigError):
            tensors = read_weights(folder, self.model)
            if torch.device(self.device).type == "cuda":
                tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
            self._ready = folder, tensors


def _checkpoint(
    folder: Path, step: int, loader: _Loader, bos: int | None | str, tokens: int | None
) -> Checkpoint:
    def load() -> Subject:
        return read_by(loader(folder), bos)

    weights = folder / "model.safetensors"
    files = (weights,) if weights.exists() else ()
    return Checkpoint(
        step=step, tokens=tokens, weight_files=files, open=load, prepare=lambda: loader.prepare(folder)
    )


def read_by(model: Any, bos: int | None | str) -> Subject:
    """A LanguageModel as a subject; `bos` other than "auto" replaces its own."""
    subject = LanguageModelSubject(model)
    if bos != "auto":
        subject.special = (subject.special - {subject.bos}) | ({bos} if bos is not None else set())
        subject.bos = bos
    return subject


def _hugging_face(path: Path, device: str, bos: int | None | str, via: str) -> Source:
    from interp.foreign import foreign_checkpoint

    checkpoint = foreign_checkpoint(path, step=0, device=device, bos=bos, via=via)
    return Source(path=str(path), checkpoints=(checkpoint,))


def _in_memory(model: Any, bos: int | None | str) -> Source:
    def load() -> Subject:
        if isinstance(model, Subject):
            return model
        if hasattr(model, "original_model"):
            from interp.bridge_subject import BridgeSubject

            return BridgeSubject(model, bos=None if bos == "auto" else bos, tokenizer=model.tokenizer)
        if not hasattr(model, "config"):
            raise DetectionError(
                f"{model!r} is no path and no model; accepted: {ACCEPTED}, or a LanguageModel"
            )
        return read_by(model, bos)

    # A model of a run is read on the run's own windows, as the run's folder is.
    inner = model.model if isinstance(model, LanguageModelSubject) else model
    folder = getattr(inner, "folder", None) if hasattr(inner, "config") else None
    step, tokens, windows, windows_from, notes = 0, None, None, None, ()
    if folder is not None:
        folder = Path(folder)
        if _holds(folder, inner):
            step, tokens = _place_in_run(folder)
        else:
            notes = (f"step not known: the weights are not, or no longer, those of {folder}",)
        try:
            windows, windows_from = _windows(folder.parent)
        except (CheckpointError, DetectionError) as error:
            notes = (*notes, f"not read on its run's windows: {error}")
    return Source(
        path=type(model).__name__,
        checkpoints=(Checkpoint(step=step, tokens=tokens, weight_files=(), open=load),),
        windows=windows,
        windows_from=windows_from,
        notes=notes,
    )


def _holds(folder: Path, model: Any) -> bool:
    """Whether a model has the weights of a checkpoint folder, in its own dtype."""
    from models.checkpoint import read_tensors, unwrapped

    try:
        stored, own = read_tensors(folder / "model.safetensors"), unwrapped(model).state_dict()
    except CheckpointError:
        return False
    return stored.keys() == own.keys() and all(
        torch.equal(tensor.to(own[name].dtype), own[name].cpu()) for name, tensor in stored.items()
    )


def _windows(run_folder: Path) -> tuple[Int[Tensor, "window seq"] | None, str | None]:
    path = run_folder / "eval.safetensors"
    if not path.exists():
        return None, None
    from models.checkpoint import read_tensors

    tensors = read_tensors(path)
    tokens = tensors.get("tokens")
    if tokens is None or tokens.ndim != 2 or tokens.dtype not in _INTEGERS or not tokens.numel():
        held = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise DetectionError(f"{path} must hold integers `tokens` [window seq]; it holds {held or 'nothing'}")
    return tokens.to(torch.int64), path.name


def _tokens_by_step(metrics: Path) -> dict[int, int]:
    """Tokens trained on at each step, from a run's metrics; empty where there are none."""
    if not metrics.exists():
        return {}
    found = {}
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        # The last line of a run that was killed may be cut off.
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and all(type(record.get(key)) is int for key in ("step", "tokens")):
            found[record["step"]] = record["tokens"]
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DetectionError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise DetectionError(f"{path} holds a {type(values).__name__}; accepted: a JSON object")
    return values


def _place_in_run(folder: Path) -> tuple[int, int | None]:
    """A checkpoint's step, and the tokens it was trained on where its run says so."""
    name = folder.name.removeprefix("step_")
    step = int(name) if name.isdecimal() else 0
    return step, _tokens_by_step(folder.parent / "metrics.jsonl").get(step)
