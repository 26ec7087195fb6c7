"""Time other block sizes for the parts of `kernels/triton/config_table.py`: python -m
experiments.benchmarks.tune

Compiles candidates in processes of their own first (compilation is most of the time), then times each part's
candidates with the others left as they are, and prints the table entries in order of time.
"""

import argparse
import concurrent.futures
import itertools
import sys
import time

import torch

from experiments.benchmarks.kernels.contests import Contest, contests
from experiments.benchmarks.kernels.timing import device_time
from kernels.triton import config_table

# Rows and columns of a tile, warps, stages, and the most registers of a thread where they are capped.
CANDIDATES = {
    "attention_fwd": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 8, 3),
    (128, 64, 8, 3, 128), (128, 128, 8, 2)],
    "attention_bwd_key": [(64, 64, 4, 2), (64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 64, 4, 2, 128),
    (64, 128, 8, 2), (32, 64, 4, 3, 168), (32, 128, 8, 2, 128)],
    "attention_bwd_query": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3, 128), (64, 128, 4, 2), (128, 64, 4,
    2), (128, 64, 8, 3, 128), (128, 64, 8, 2, 128)],
    "linear_state": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3), (64,
    64, 8, 3)],
    "linear_output": [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2), (64, 32, 4, 2), (128,
    64, 8, 1), (64, 64, 4, 3)],
    "linear_gradient": [(64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3)],
    "linear_gradient_plain": [(64, 64, 4, 3), (64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 32, 4, 3, 168)],
    "linear_gradient_normalised": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, 168), (64, 32, 4, 3)],
}  # fmt: skip


def _run(contest: Contest):
    inputs = [x.detach().requires_grad_() for x in contest.inputs]
    ours = contest.entrants["ours"]
    cotangent = torch.randn_like(ours(*inputs))
    return lambda: torch.autograd.grad(ours(*inputs), inputs, cotangent)


def _config(candidate: tuple[int, ...]) -> config_table.Config:
    names = ("block_m", "block_n", "warps", "stages", "registers")
    return config_table.Config(**dict(zip(names, candidate, strict=False)))


def compile_one(job: tuple[str, tuple[str, ...], tuple[int, int, int], tuple[int, ...]]) -> str:
    """Run one candidate once in this process, so that the compiled kernels are in Triton's cache."""
    name, operators, key, candidate = job
    config_table.overrides[key] = _config(candidate)
    try:
        for contest in contests(operators, False):
            if f"{contest.operator} {contest.shape}" == name:
                _run(contest)()
                torch.cuda.synchronize()
    except Exception as problem:
        return f"{key} {candidate}: {type(problem).__name__} {str(problem)[:100]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time candidates of the configuration table.")
    parser.add_argument("--only", default="softmax,linear")
    parser.add_argument("--contests", default="", help="'operator shape', comma-separated; default all")
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune: no CUDA device here")
    operators = tuple(options.only.split(","))
    chosen = [n.strip() for n in options.contests.split(";") if n.strip()]
    prefixes = {"softmax": "attention", "linear": "linear", "scan": "scan", "conv": "conv"}
    parts = [p for p in CANDIDATES if any(p.startswith(prefixes[o]) for o in operators if o in prefixes)]
    found = [c for c in contests(operators, False) if not chosen or f"{c.operator} {c.shape}" in chosen]
    jobs = []
    for contest, part in itertools.product(found, parts):
        key = (part, _width(contest), 2)
        jobs += [(f"{contest.operator} {contest.shape}", operators, key,
            candidate) for candidate in CANDIDATES[part]]
    start = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=_spawn()) as pool:
        for problem in pool.map(compile_one, jobs):
            if problem:
                print(problem, flush=True)
    print(f"compiled {len(jobs)} candidates in {time.perf_counter() - start:.0f} s", flush=True)
    for contest in found:
        for part in parts:
            _time_part(contest, part)


def _width(contest: Contest) -> int:
    return max(x.shape[-1] for x in contest.inputs if x.ndim == 4)


def _spawn():
    import multiprocessing

    return multiprocessing.get_context("spawn")


def _time_part(contest: Contest, part: str) -> None:
    times = []
    key = (part, _width(contest), 2)
    for candidate in CANDIDATES[part]:
        config_table.overrides[key] = _config(candidate)
        try:
            times.append((device_time(_run(contest), 10)[0], candidate))
        except Exception as problem:
            print(contest.operator, contest.shape, part, candidate, type(problem).__name__, flush=True)
    config_table.overrides.clear()
    line = " ".join(f"{c}:{t:.0f}" for t, c in sorted(times))
    print(f"{contest.operator} {contest.shape} {part}: {line}", flush=True)


if __name__ == "__main__":
    main()
