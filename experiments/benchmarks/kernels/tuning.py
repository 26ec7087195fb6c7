"""The peers' autotuning: what they tune, the search shortened, or its candidates compiled beforehand."""

import functools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from experiments.benchmarks.kernels.contests import Contest, contests

PACKAGES = ("fla.", "mamba_ssm.")
# Entrants that tune kernels of these packages.
TUNED = ("fla", "mamba_ssm")
# By the name of the option: what is done to the peers' tuners, and how the report says it.
TUNINGS = {
    "full": "",
    "quick": " The peers' tuning times each configuration for 20 ms instead of 100.",
    "short": " The peers' tuning is shortened to three configurations a kernel.",
}


def tuners() -> Iterator[Any]:
    """Every kernel of the imported peers that Triton's autotuner stands around, once."""
    from triton.runtime.autotuner import Autotuner

    seen = set()
    for module in [m for name, m in list(sys.modules.items()) if name.startswith(PACKAGES) and m]:
        for tuned in list(vars(module).values()):
            # A kernel may have heuristics around its tuner.
            while type(tuned).__module__.startswith("triton") and not isinstance(tuned, Autotuner):
                tuned = getattr(tuned, "fn", None)
            if isinstance(tuned, Autotuner) and id(tuned) not in seen:
                seen.add(id(tuned))
                yield tuned


def quicken_tuning() -> None:
    """Leave all configurations, each timed for 20 ms instead of 100."""
    from triton.testing import do_bench

    for tuned in tuners():
        tuned._do_bench = functools.partial(do_bench, warmup=5, rep=20)


def shorten_tuning() -> None:
    """Leave each kernel the two configurations nearest to four warps and three stages with tiles of 64.

    And the smallest: the two may need more shared memory than there is.
    """

    def distance(config: Any) -> float:
        tiles = sum(abs(math.log2(size / 64)) for size in config.kwargs.values() if _is_size(size))
        return tiles + abs(math.log2(config.num_warps / 4)) + 0.5 * abs(config.num_stages - 3)

    for tuned in tuners():
        nearest = sorted(tuned.configs, key=distance)
        tuned.configs = nearest[:2] + sorted(nearest[2:], key=_size)[:1]


def _size(config: Any) -> int:
    return math.prod(size for size in config.kwargs.values() if _is_size(size)) * config.num_stages


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def set_tuning(name: str) -> None:
    """Apply "full" (nothing), "quick" or "short" to the peers imported so far."""
    {"full": lambda: None, "quick": quicken_tuning, "short": shorten_tuning}[name]()


def compile_candidates(operators: tuple[str, ...], workers: int, tuning: str, limit: float = 200.0) -> None:
    """Run every contest in processes of their own, each with a part of the peers' candidates.

    What they compile is in Triton's and torch's caches afterwards, so that the whole search takes seconds. A
    process that faults, or runs longer than `limit` seconds, ends alone.
    """
    context = multiprocessing.get_context("spawn")
    jobs = [(operators, part, workers, tuning) for part in range(workers)]
    running = [context.Process(target=compile_part, args=job) for job in jobs]
    for process in running:
        process.start()
    deadline = time.monotonic() + limit
    for part, process in enumerate(running):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()
            print(f"compiling part {part}: stopped after {limit:.0f} s", flush=True)
        elif process.exitcode:
            print(f"compiling part {part}: ended with {process.exitcode}", flush=True)


def compile_part(operators: tuple[str, ...], part: int, parts: int, tuning: str) -> None:
    """A part of the candidates of each tuned kernel, and every parts-th contest of what tunes nothing (of
    everything if the tuning is short)."""
    # Each of these processes would start its own pool of compilers.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    sliced: set[int] = set()
    for index, contest in enumerate(contests(operators, True)):
        set_tuning(tuning)
        quicken_tuning()
        for tuned in tuners() if tuning != "short" else ():
            if id(tuned) not in sliced:
                sliced.add(id(tuned))
                tuned.configs = sliced_configs(tuned.configs, part, parts)
        for who in contest.entrants:
            if (who.startswith(TUNED) and tuning != "short") or index % parts == part:
                _run_once(contest, who)
        torch.cuda.empty_cache()


def sliced_configs(configs: list[Any], part: int, parts: int) -> list[Any]:
    """Two or more of them where there are as many, small and large ones.

    One that does not fit the shared memory is passed over only if it is not alone.
    """
    slices = max(1, min(parts, len(configs) // 2))
    return sorted(configs, key=_size)[part % slices :: slices]


def _run_once(contest: Contest, who: str) -> None:
    entrant = contest.entrants[who]
    inputs = [x.detach().requires_grad_() for x in entrant.layout.own(contest.inputs)]
    try:
        with entrant.context():
            with torch.no_grad():
                entrant(*inputs)
            o = entrant(*inputs)
            torch.autograd.grad(o, inputs, torch.ones_like(o))
        torch.cuda.synchronize()
    except Exception as problem:
        print(f"{contest.operator} {contest.shape} {who}: {type(problem).__name__}", flush=True)
