"""Where training runs: one process on one device, or several through `accelerate launch` or `torchrun`.

Several processes are data-parallel: the global batch is split by rank, gradients are averaged by accelerate's
DistributedDataParallel. One process needs no accelerate.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """This process's device, rank and the number of processes."""

    device: torch.device
    rank: int = 0
    n_processes: int = 1
    accelerator: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def part(self, batch: int) -> tuple[int, int]:
        """Rows of the global batch that are this process's.

        Raises:
            ConfigError: the batch does not divide evenly.
        """
        if batch % self.n_processes:
            raise ConfigError(
                f"training.batch is {batch}; accepted: a multiple of the {self.n_processes} processes"
            )
        rows = batch // self.n_processes
        return self.rank * rows, (self.rank + 1) * rows

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model whose backward averages gradients over processes (the model itself for one process)."""
        return model if self.accelerator is None else self.accelerator.prepare_model(model)

    def without_sync(self, model: nn.Module) -> contextlib.AbstractContextManager:
        """A context in which backward only accumulates."""
        return contextlib.nullcontext() if self.accelerator is None else self.accelerator.no_sync(model)

    def summed(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a scalar over processes."""
        return value if self.accelerator is None else self.accelerator.reduce(value, reduction="sum")

    def wait(self) -> None:
        """Wait for every process."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the process group."""
        if self.accelerator is not None:
            self.accelerator.end_training()


def place(device: str = "auto") -> Placement:
    """The placement of this process; "auto" is CUDA where there is one.

    Raises:
        ConfigError: a device that is not there, or several processes without accelerate.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; accepted: auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device; accepted here: auto, cpu")
    cuda = device != "cpu" and torch.cuda.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Placement(
            device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        )
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ConfigError("several processes need the package accelerate, which is not installed") from error
    accelerator = Accelerator(cpu=not cuda, mixed_precision="no")
    return Placement(
        device=accelerator.device,
        rank=accelerator.process_index,
        n_processes=accelerator.num_processes,
        accelerator=accelerator,
    )
