"""Named runs trained where they are missing, for experiments over runs and seeds; resumable."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.config import ExperimentConfig, with_settings
from experiments.runs import load_run
from models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run at one seed: `seeds.init` and `seeds.data` are `seed`, the held-out windows stay the same.

    Attributes:
        settings: Further `key=value` settings, as of `train-lm --set`.
        series: Keep the run's checkpoints; else only the first and the last.
    """

    run: str
    seed: int
    settings: tuple[str, ...] = ()
    series: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.run}-s{self.seed}"

    def config(self, device: str) -> ExperimentConfig:
        """What is trained. On a GPU the whole step is captured in a graph, toy models in float32."""
        own = [f"seeds.init={self.seed}", f"seeds.data={self.seed}"]
        if not self.series:
            own += ["checkpoints.log_spaced=0", "checkpoints.windows=[]", "checkpoints.training_state=last"]
        config = load_run(self.run)
        if device == "cuda":
            own.append("training.cuda_graph=true")
            if config.data.kind != "text":
                own.append("training.precision=fp32")
        return with_settings(config, [*own, *self.settings])


def available_device(device: str) -> str:
    """`cuda` where `auto` finds one, else what was asked for."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def trained(
    jobs: Sequence[Job], out: Path, *, device: str, n_processes: int = 1
) -> Iterator[tuple[Job, Path]]:
    """Each job and its run folder as soon as it is trained; folders with the last checkpoint are not trained.

    Several processes share the device: small models leave most of a GPU idle. The first error is raised once
    those that had begun have ended.
    """
    if n_processes < 1:
        raise ConfigError(f"{n_processes} processes; accepted: 1 or more")
    if n_processes == 1:
        for job in jobs:
            _train(job, out / job.name, device)
            yield job, out / job.name
        return
    with ProcessPoolExecutor(n_processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_train, job, out / job.name, device): job for job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future], out / futures[future].name
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _train(job: Job, folder: Path, device: str) -> None:
    from experiments.train import train

    config = job.config(device)
    if (folder / f"step_{config.training.steps:08d}").is_dir():
        return
    resume = (folder / "run.json").is_file()
    print(f"{'going on with' if resume else 'training'} {job.name}", flush=True)
    train(config, folder, name=job.run, resume=resume, device=device)
