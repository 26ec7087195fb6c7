"""One command on several processes (`accelerate launch`): who does which checkpoints, and how results come together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
    """This process's place, from the environment that `accelerate launch` (or torchrun) sets; nothing is imported."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return Ranks(int(os.environ.get("RANK", "0")), world) if world > 1 else Ranks()


def _start() -> None:
    from datetime import timedelta

    from accelerate import InitProcessGroupKwargs, PartialState

    # The slowest process may have hours of checkpoints left when the first one is done.
    if not PartialState._shared_state:
        wait = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(days=7))
        PartialState(cpu=True, **wait.to_kwargs())
