"""The peers' autotuning: what they tune, the search shortened, or its candidates compiled beforehand."""

import concurrent.futures
import functools
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from experiments.benchmarks.kernel_contests import Contest, contests

PACKAGES = ("fla.", "mamba_ssm.")
# Entrants that tune kernels of these packages.
TUNED = ("fla", "mamba_ssm")
# By the name of the option: what is done to the peers' tuners, and how the report says it.
TUNINGS = {
    "full": "",
    "quick": " The peers' tuning times each configuration for 20 ms instead of 100.",
    "short": " The peers' tuning is shortened to two configurations a kernel.",
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


def shorten_tuning(kept: int = 2) -> None:
    """Leave each kernel the configurations nearest to four warps and three stages with tiles of 64."""

    def distance(config: Any) -> float:
        tiles = sum(abs(math.log2(size / 64)) for size in config.kwargs.values() if _is_size(size))
        return tiles + abs(math.log2(config.num_warps / 4)) + 0.5 * abs(config.num_stages - 3)

    for tuned in tuners():
        tuned.configs = sorted(tuned.configs, key=distance)[:kept]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def set_tuning(name: str) -> None:
    """Apply "full" (nothing), "quick" or "short" to the peers imported so far."""
    {"full": lambda: None, "quick": quicken_tuning, "short": shorten_tuning}[name]()


def compile_candidates(operators: tuple[str, ...], workers: int, tuning: str) -> None:
    """Run every contest's peers in processes of their own, each with a part of the candidates.

    What they compile is in Triton's and torch's caches afterwards, so that the whole search takes seconds.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        done = [pool.submit(compile_part, operators, part, workers, tuning) for part in range(workers)]
        for part, future in enumerate(done):
            try:
                future.result()
            except Exception as problem:
                print(f"compiling part {part}: {type(problem).__name__} {str(problem)[:120]}", flush=True)


def compile_part(operators: tuple[str, ...], part: int, parts: int, tuning: str) -> None:
    """Candidates part, part + parts, ... of what is tuned, and every parts-th contest of what is not."""
    # Each of these processes would start its own pool of compilers.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    sliced: set[int] = set()
    for index, contest in enumerate(contests(operators, True)):
        if tuning == "short":
            shorten_tuning()
        quicken_tuning()
        for tuned in tuners():
            if id(tuned) not in sliced:
                sliced.add(id(tuned))
                tuned.configs = tuned.configs[part::parts] or tuned.configs[:1]
        for who in contest.entrants:
            if who.startswith(TUNED) or index % parts == part:
                _run_once(contest, who)
        torch.cuda.empty_cache()


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
