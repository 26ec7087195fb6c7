"""One command on several processes (`accelerate launch`): who does which checkpoints, results together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PLACES = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


@dataclass(frozen=True)
class Ranks:
    """This process among `world` of them, numbered from 0."""

    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> list[Any]:
        """This process's part of a list: a run of neighbours, so that equal neighbours stay together."""
        n = len(items)
        return list(items[self.rank * n // self.world : (self.rank + 1) * n // self.world])

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all processes, in the order of the processes; every process gets them all."""
        if self.world == 1:
            return list(items)
        from accelerate.utils import gather_object

        _start()
        return gather_object(items)


def current_ranks() -> Ranks:
    """This process's place, from the environment that the launcher sets; nothing is imported.

    `accelerate launch --multi_gpu --num_processes N` (that option is what starts several processes, with or
    without GPUs) and torchrun set RANK and WORLD_SIZE, `accelerate launch --cpu` with an MPI host file the
    names of MPI.
    """
    for rank, world in _PLACES:
        if int(os.environ.get(world, "1")) > 1 and rank in os.environ:
            return Ranks(int(os.environ[rank]), int(os.environ[world]))
    return Ranks()


def _start() -> None:
    from datetime import timedelta

    from accelerate import InitProcessGroupKwargs, PartialState

    # The slowest process may have hours of checkpoints left when the first one is done.
    if not PartialState._shared_state:
        wait = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(days=7))
        PartialState(cpu=True, **wait.to_kwargs())
