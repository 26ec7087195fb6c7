"""The folder of one run: run.json, metrics.jsonl, eval.safetensors and checkpoints, each written whole.

```
OUT/run.json  metrics.jsonl  eval.safetensors  corpus/ (text)  step_00000000/ ... step_00002000/
```
`metrics.jsonl` is the only file that grows; on resume it is cut back to the records of the checkpoint's step.
`.lock` is there while a process writes the folder.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Int
from torch import Tensor, nn

from experiments.config import ExperimentConfig, differing_keys
from experiments.files import TEMPORARY, write_atomically
from experiments.folder_lock import NAME as LOCK
from experiments.folder_lock import FolderLock
from models.checkpoint import model_tensors, read_tensors, save_model
from models.errors import CheckpointError, ConfigError

FORMAT = 1
_STATE_FILES = ("training.safetensors", "training.json")
# What a start makes before its first checkpoint.
_BEGUN = ("eval.safetensors", "metrics.jsonl", "run.json")


class RunFolder:
    """Files of a run. Only the main process of a distributed run writes, and holds the folder's lock."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = FolderLock(path)
        self._begun = self._made = False

    @property
    def corpus(self) -> Path:
        """Where the prepared tokens of a text run lie."""
        return self.path / "corpus"

    def open_new(self, record: dict[str, Any]) -> None:
        """Begin a run.

        Raises:
            CheckpointError: the folder holds anything already, is in use, or cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file; accepted: a new or an empty folder")
        # Nothing is touched in a folder that holds the files of others.
        self._refuse_files()
        self._made = not self.path.is_dir()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made: {error.strerror}") from error
        self._lock.take()
        self._clean()
        self._refuse_files()
        self._begun = True
        self._write("run.json", (json.dumps({"format": FORMAT, **record}, indent=2) + "\n").encode())

    def _refuse_files(self) -> None:
        found = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        leftovers = {LOCK, *(path.name for path in self._leftovers())}
        if others := [name for name in found if name not in leftovers]:
            raise CheckpointError(
                f"{self.path} is not empty (it holds {others[0]}); give an empty folder, or --resume"
            )

    def open_again(self, config: ExperimentConfig) -> None:
        """Take up a run again.

        Raises:
            CheckpointError: no run here, another format of run.json, or a folder in use.
            ConfigError: the run has another configuration (the message says which keys differ).
        """
        path = self.path / "run.json"
        if not path.is_file():
            raise CheckpointError(f"{self.path} holds no run.json, so there is nothing to resume")
        try:
            stored = json.loads(path.read_text("utf-8"))
            number, values = stored["format"], stored["config"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error!r}") from error
        if number != FORMAT:
            raise CheckpointError(f"{path} has format {number!r}; accepted: {FORMAT}")
        if differences := differing_keys(values, config.to_dict()):
            more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise ConfigError(
                f"{self.path} was begun with another configuration: {'; '.join(differences[:5])}{more}"
            )
        self._lock.take()
        self._clean()

    def discard(self) -> None:
        """Take back `open_new` of a run that has no checkpoint yet; files of others stay."""
        if not self._begun or self._steps():
            return
        for folder in (self.corpus, self.path / "tensorboard"):
            shutil.rmtree(folder, ignore_errors=True)
        self._clean()
        for name in _BEGUN:
            (self.path / name).unlink(missing_ok=True)
        self.release()
        if self._made and not any(self.path.iterdir()):
            self.path.rmdir()

    def release(self) -> None:
        """Let others write the folder."""
        self._lock.release()

    def save_windows(self, tokens: Int[Tensor, "window seq"]) -> None:
        """Write the held-out windows, the same for every checkpoint.

        Raises:
            CheckpointError: the folder has others: its checkpoints were measured on those.
        """
        path = self.path / "eval.safetensors"
        if path.is_file():
            kept = read_tensors(path).get("tokens")
            if kept is None or not torch.equal(kept.to(torch.int64), tokens.to(torch.int64)):
                raise CheckpointError(
                    f"{path} holds other windows than the run's data gives now: the text or this file was "
                    "changed"
                )
            return
        self._write("eval.safetensors", safetensors.torch.save({"tokens": tokens.to(torch.int32)}))

    def save_checkpoint(
        self,
        step: int,
        model: nn.Module,
        state: dict[str, Tensor],
        record: dict[str, Any],
        *,
        tokenizer_json: str | None = None,
    ) -> Path:
        """Write `step_XXXXXXXX/` with all that resuming needs.

        Raises:
            CheckpointError: the disk is full or not writable; earlier checkpoints are intact.
        """
        digests = {"model.safetensors": tensors_sha256(model_tensors(model))}
        if state:
            digests["training.safetensors"] = tensors_sha256(state)
        values = {"format": FORMAT, "step": step, "tensors_sha256": digests, **record}
        extra: dict[str, Any] = {"training.json": json.dumps(values) + "\n"}
        if state:
            extra["training.safetensors"] = state
        if tokenizer_json is not None:
            extra["tokenizer.json"] = tokenizer_json
        return save_model(self.path / f"step_{step:08d}", model, extra_files=extra)

    def latest(self) -> tuple[int, Path] | None:
        """Step and folder of the last checkpoint; None before the first."""
        return max(self._steps(), default=None)

    def to_resume(self) -> tuple[int, Path] | None:
        """The same, as the checkpoint to go on from.

        Raises:
            CheckpointError: it has no training state: going on from an earlier step, or from none, would
                write over checkpoints that are there.
        """
        found = self.latest()
        if found is None or (found[1] / "training.json").is_file():
            return found
        whole = [step for step, folder in self._steps() if (folder / "training.json").is_file()]
        earlier = f"remove the checkpoints after step {max(whole)}" if whole else "train in another folder"
        raise CheckpointError(
            f"{found[1]} has no training.json, so the run cannot go on from its last checkpoint; nothing was "
            f"changed. Put the file back, or {earlier}"
        )

    def _steps(self) -> list[tuple[int, Path]]:
        folders = self.path.glob("step_*")
        return [(int(p.name[5:]), p) for p in folders if p.name[5:].isdecimal() and p.is_dir()]

    def training_state(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `save_checkpoint` was given as `record` and `state`.

        Raises:
            CheckpointError: a file is damaged, or is not the one that was written with the others.
        """
        try:
            record = json.loads((checkpoint / "training.json").read_text("utf-8"))
            number, step = record["format"], int(record["step"])
            record["wall_s"] = float(record["wall_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint / 'training.json'} cannot be read: {error!r}") from error
        if step != int(checkpoint.name[5:]):
            raise CheckpointError(f"{checkpoint} holds the state of step {step}: its files were changed")
        if number != FORMAT:
            raise CheckpointError(f"{checkpoint / 'training.json'} has format {number!r}; accepted: {FORMAT}")
        tensors = checkpoint / "training.safetensors"
        # Only before the first update has the optimiser no state.
        if step > 0 and not tensors.is_file():
            raise CheckpointError(f"{tensors} is missing: the optimiser's state cannot be resumed from here")
        _check_digests(checkpoint, record.get("tensors_sha256", {}))
        return record, read_tensors(tensors) if tensors.is_file() else {}

    def drop_training_state(self, *, before: int) -> None:
        """Remove the optimiser state of checkpoints earlier than step `before`; their weights stay."""
        for folder in self.path.glob("step_*"):
            if folder.name[5:].isdecimal() and int(folder.name[5:]) < before:
                # training.json last: without it the checkpoint is no longer one to resume from.
                for name in reversed(_STATE_FILES):
                    (folder / name).unlink(missing_ok=True)

    def cut_metrics(self, step: int) -> None:
        """Keep the records up to `step`; a broken last line and all later ones go."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text("utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            kept.append(line + "\n")
        self._write("metrics.jsonl", "".join(kept).encode())

    def metrics_at(self, step: int) -> dict[str, Any]:
        """The last record of a step.

        Raises:
            CheckpointError: metrics.jsonl lacks it: the file is missing or damaged.
        """
        path, found = self.path / "metrics.jsonl", None
        for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else ():
            try:
                record = json.loads(line)
                found = record if record["step"] == step else found
            except (ValueError, KeyError, TypeError):
                break
        if found is None:
            raise CheckpointError(
                f"{path} has no record of step {step}, which the run goes on from: it is missing or damaged"
            )
        return found

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append one record.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        path = self.path / "metrics.jsonl"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error.strerror}") from error

    def _write(self, name: str, data: bytes) -> None:
        try:
            write_atomically(self.path / name, data)
        except OSError as error:
            raise CheckpointError(f"{self.path / name} could not be written: {error.strerror}") from error

    def _leftovers(self) -> list[Path]:
        return [*self.path.glob(f"{TEMPORARY}*"), *self.path.glob(".step_*.tmp-*")]

    def _clean(self) -> None:
        """Remove what a killed process left half-written."""
        for path in self._leftovers():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """Hash of names, dtypes, shapes and values of tensors on the CPU."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


def _check_digests(checkpoint: Path, digests: Any) -> None:
    """Refuse tensors other than those that were saved; checkpoints of older versions name no digests."""
    for name, digest in digests.items() if isinstance(digests, dict) else ():
        if tensors_sha256(read_tensors(checkpoint / name)) != digest:
            raise CheckpointError(
                f"{checkpoint / name} is not the file that was saved with this checkpoint, so the run cannot "
                "go on from it; put that file back"
            )
