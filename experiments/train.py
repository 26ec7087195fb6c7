"""The training loop: update, measure, save, resume.

Batches are a function of (seed, step), nothing random happens in between, and a checkpoint holds weights and
optimiser state: so a run that was killed and resumed gives the same weights, bit for bit, on a CPU with as
many threads.
"""

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.clamping import clamped
from experiments.config import ExperimentConfig, differing_keys
from experiments.data import synthetic_task
from experiments.data.batch import Batch
from experiments.errors import TrainingError
from experiments.objective import evaluate, loss_weights
from experiments.optimiser import build_optimiser, load_state_tensors, set_learning_rate, state_tensors
from experiments.placement import Placement, place
from experiments.progress import Progress
from experiments.provenance import run_record
from experiments.run_folder import RunFolder
from experiments.schedule import checkpoint_steps, learning_rate
from experiments.step import make_step
from models.checkpoint import load_model
from models.config import LanguageModelConfig
from models.errors import CheckpointError
from models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Where the run lies, its last record of metrics.jsonl, and whether this is the process that wrote
    them.
    """

    path: Path
    record: dict[str, Any]
    is_main: bool


def train(
    config: ExperimentConfig,
    out: str | Path,
    *,
    name: str = "",
    resume: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> TrainingResult:
    """Train a model as `config` says and leave its checkpoints in `out`.

    Args:
        name: The run's name, for run.json.
        resume: Go on from the last checkpoint in `out`; else `out` must be new or empty.
        device: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: settings that do not fit together, this machine, or the run that is resumed.
        CheckpointError: `out` is not empty, has nothing to resume, is damaged, another process trains in it,
            or its disk is full.
        TrainingError: the loss or a gradient is no longer finite.
    """
    placement, folder = place(device), RunFolder(Path(out))
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    try:
        run = _Run(config, folder, placement, progress or Progress())
        run.open(name, resume)
        return run.train()
    except BaseException:
        # Without a checkpoint, else the corrected command would find the folder taken.
        with contextlib.suppress(OSError):
            folder.discard()
        raise
    finally:
        folder.release()
        placement.close()


class _Run:
    def __init__(self, config: ExperimentConfig, folder: RunFolder, placement: Placement, progress: Progress):
        self.config, self.folder, self.placement, self.progress = config, folder, placement, progress
        self.rows = placement.part(config.training.batch)
        self.steps = config.training.steps
        self.step, self.wall_s = 0, 0.0
        self.record: dict[str, Any] = {}
        self.tokenizer_json: str | None = None
        # Before the folder is made: an explicit request may be refused.
        self._captured = config.captures_step(placement.device.type, placement.n_processes)

    # Opening.

    def open(self, name: str, resume: bool) -> None:
        """Make or take up the folder, then data, model, optimiser and the state to begin from."""
        self._open_folder(name, resume)
        latest = self.folder.to_resume() if resume else None
        self._open_data()
        device = self.placement.device
        config = self.config.model.replace(seed=self.config.seeds.init)
        self.model = (LanguageModel(config) if latest is None else _loaded(latest[1], config)).to(device)
        self.model.train()
        self.optimiser = build_optimiser(
            self.model, self.config.optimiser, device, capturable=self._captured
        )
        if latest is not None:
            record, state = self.folder.training_state(latest[1])
            load_state_tensors(self.model, self.optimiser, state)
            self.step, self.wall_s = latest[0], record["wall_s"]
        # Every process must have read the last checkpoint before the main one goes on.
        self.placement.wait()
        if latest is not None and self.placement.is_main:
            self.record = self.folder.metrics_at(self.step)
        if resume and self.placement.is_main:
            self.folder.cut_metrics(self.step if latest is not None else -1)
        self._update = make_step(self.model, self.optimiser, self.config, self.placement)

    def _open_folder(self, name: str, resume: bool) -> None:
        if self.placement.is_main:
            if resume:
                self.folder.open_again(self.config)
            else:
                self.folder.open_new(run_record(name, self.config, self.placement))
        self.placement.wait()

    def _open_data(self) -> None:
        data, seeds = self.config.data, self.config.seeds
        common = {"batch": self.config.training.batch, "data_seed": seeds.data, "eval_seed": seeds.eval}
        if data.kind == "text":
            from experiments.data.prepared import prepare_corpus
            from experiments.data.text import TextTask

            # The main process tokenises; the others then read its files.
            if self.placement.is_main:
                prepare_corpus(data, self.folder.corpus, split_seed=seeds.eval)
            self.placement.wait()
            corpus = prepare_corpus(data, self.folder.corpus, split_seed=seeds.eval)
            self.tokenizer_json = corpus.tokenizer_json
            self.task = TextTask(data, corpus.train, corpus.held_out, **common)
        else:
            self.task = synthetic_task(data, **common)
        self.held_out = self.task.held_out(self.config.evaluation.n_windows)
        if self.placement.is_main:
            self.folder.save_windows(torch.from_numpy(self.held_out.tokens))

    # The loop.

    def train(self) -> TrainingResult:
        """Run every step that is left."""
        saved = set(checkpoint_steps(self.steps, self.config.checkpoints))
        window = _Window(self.placement)
        with self.progress:
            if self.step == 0:
                self._save(window)
            while self.step < self.steps:
                window.add(*self._advance())
                at_checkpoint = self.step in saved
                if at_checkpoint or self.step % self.config.training.log_every == 0:
                    self._measure(window, at_checkpoint)
        self.placement.wait()
        return TrainingResult(path=self.folder.path, record=self.record, is_main=self.placement.is_main)

    def _advance(self) -> tuple[Tensor, Tensor]:
        batch = self.task.batch(self.step)
        weights = loss_weights(batch)
        start, stop = self.rows
        part: Batch = batch.part(start, stop)
        set_learning_rate(self.optimiser, learning_rate(self.step, self.steps, self.config.optimiser))
        result = self._update(torch.from_numpy(part.tokens), torch.from_numpy(weights[start:stop]))
        self.step += 1
        return result

    def _measure(self, window: "_Window", at_checkpoint: bool) -> None:
        loss, norm, seconds, n_steps = window.close()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            latest = self.folder.latest()
            where = f"; checkpoints up to step {latest[0]} are intact" if latest else ""
            raise TrainingError(
                f"the loss is {loss:g} and the gradient's norm {norm:g} by step {self.step}: "
                f"lower optimiser.lr (now {self.config.optimiser.lr:g}) or warm up longer{where}"
            )
        per_step = self.config.training.batch * self.config.data.seq
        self.wall_s += seconds
        values = {
            "loss_nats": loss,
            "lr": learning_rate(self.step - 1, self.steps, self.config.optimiser),
            "grad_norm": norm,
            "tokens_per_s": round(n_steps * per_step / seconds, 1),
        }
        if at_checkpoint:
            self._save(window, values)
        else:
            self._report(values)

    def _save(self, window: "_Window", values: dict[str, float] | None = None) -> None:
        """Measure on the held-out windows, then write the record and the checkpoint, in this order."""
        if self.placement.is_main:
            measured = self._evaluate()
            if self.step == 0:
                self.folder.cut_metrics(-1)
            self._report({**(values or {}), **measured})
            self.folder.save_checkpoint(
                self.step,
                self.model,
                state_tensors(self.model, self.optimiser),
                {"tokens": self.record["tokens"], "wall_s": self.wall_s},
                tokenizer_json=self.tokenizer_json,
            )
            if self.config.checkpoints.training_state == "last":
                self.folder.drop_training_state(before=self.step)
        self.placement.wait()
        window.restart()

    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        values = evaluate(
            clamped(self.model, self.config.clamp),
            self.held_out,
            device=self.placement.device,
            precision=self.config.training.precision,
            batch=self.config.evaluation.batch,
        )
        self.model.train()
        return values

    def _report(self, values: dict[str, float]) -> None:
        if not self.placement.is_main:
            return
        tokens = self.step * self.config.training.batch * self.config.data.seq
        self.record = {"step": self.step, "tokens": tokens, "wall_s": round(self.wall_s, 3), **values}
        self.folder.add_metrics(self.record)
        self.progress.update(self.record)


def _loaded(checkpoint: Path, config: LanguageModelConfig) -> LanguageModel:
    """A checkpoint's model, if it is the one that the run trains."""
    model = load_model(checkpoint)
    if differences := differing_keys(model.config.to_dict(), config.to_dict()):
        raise CheckpointError(
            f"{checkpoint} holds another model than the run trains: {'; '.join(differences[:5])}"
        )
    return model


class _Window:
    """Mean loss, last gradient norm and time since the last record; a device is waited for only at its
    end.
    """

    def __init__(self, placement: Placement):
        self._placement = placement
        self.restart()

    def restart(self) -> None:
        self._total: Tensor | None = None
        self._norm: Tensor | None = None
        self._n, self._began = 0, time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor) -> None:
        # Cloned because a captured step overwrites its results.
        self._total = loss.clone() if self._total is None else self._total + loss
        self._norm = norm
        self._n += 1

    def close(self) -> tuple[float, float, float, int]:
        """Mean loss in nats over all processes, gradient norm, seconds, number of steps; then begin anew."""
        loss = float(self._placement.summed(self._total)) / self._n
        norm, n = float(self._norm), self._n
        seconds = max(time.perf_counter() - self._began, 1e-9)
        self.restart()
        return loss, norm, seconds, n
