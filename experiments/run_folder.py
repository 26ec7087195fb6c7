"""The folder of one run: run.json, metrics.jsonl, eval.safetensors and checkpoints, each written whole.

```
OUT/run.json  metrics.jsonl  eval.safetensors  corpus/ (text)  step_00000000/ ... step_00002000/
```
`metrics.jsonl` is the only file that grows; on resume it is cut back to the records of the checkpoint's step.
"""

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
from models.checkpoint import read_tensors, save_model
from models.errors import CheckpointError, ConfigError

FORMAT = 1
_STATE_FILES = ("training.safetensors", "training.json")


class RunFolder:
    """Files of a run. Only the main process of a distributed run writes."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def corpus(self) -> Path:
        """Where the prepared tokens of a text run lie."""
        return self.path / "corpus"

    def open_new(self, record: dict[str, Any]) -> None:
        """Begin a run.

        Raises:
            CheckpointError: the folder holds anything already, or cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file; accepted: a new or an empty folder")
        self._clean()
        if self.path.is_dir() and (found := sorted(p.name for p in self.path.iterdir())):
            raise CheckpointError(
                f"{self.path} is not empty (it holds {found[0]}); give an empty folder, or --resume"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made: {error.strerror}") from error
        self._write("run.json", (json.dumps({"format": FORMAT, **record}, indent=2) + "\n").encode())

    def open_again(self, config: ExperimentConfig) -> None:
        """Take up a run again.

        Raises:
            CheckpointError: no run here, or another format of run.json.
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
        self._clean()

    def discard(self) -> None:
        """Take back `open_new`, of a run that could not begin; files of others stay."""
        shutil.rmtree(self.corpus, ignore_errors=True)
        for name in ("eval.safetensors", "run.json"):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def save_windows(self, tokens: Int[Tensor, "window seq"]) -> None:
        """Write the held-out windows, the same for every checkpoint."""
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
        extra: dict[str, Any] = {
            "training.json": json.dumps({"format": FORMAT, "step": step, **record}) + "\n"
        }
        if state:
            extra["training.safetensors"] = state
        if tokenizer_json is not None:
            extra["tokenizer.json"] = tokenizer_json
        return save_model(self.path / f"step_{step:08d}", model, extra_files=extra)

    def latest(self) -> tuple[int, Path] | None:
        """Step and folder of the last checkpoint that can be resumed from; None before the first."""
        steps = (p for p in self.path.glob("step_*") if p.name[5:].isdecimal())
        found = [p for p in steps if (p / "training.json").is_file()]
        return max(((int(p.name[5:]), p) for p in found), default=None)

    def training_state(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `save_checkpoint` was given as `record` and `state`.

        Raises:
            CheckpointError: a file is damaged.
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

    def _clean(self) -> None:
        """Remove what a killed process left half-written."""
        if not self.path.is_dir():
            return
        leftovers = [*self.path.glob(f"{TEMPORARY}*"), *self.path.glob(".step_*.tmp-*")]
        for path in leftovers:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
