"""Cold start: seconds of the first forward and backward of each operator in a process with an empty cache.

    python -m experiments.benchmarks.kernels.cold [--only softmax,linear] [--one-by-one]

Each operator runs in a process of its own whose cache of compiled kernels is an empty folder. Imports and the
device's context are not counted. The processes run side by side, as compiling uses one core each, unless
they are asked to follow one another.
"""

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time

import torch

from experiments.benchmarks.kernels.contests import Contest, contests

GOAL_S = 5.0
# As in `kernels/contests.py`; of each the first contest of every name.
FAMILIES = ("softmax", "linear", "scan", "conv")


def first_contests(family: str) -> dict[str, Contest]:
    """The first contest of each operator of a family."""
    found: dict[str, Contest] = {}
    for contest in contests((family,), False):
        found.setdefault(contest.operator, contest)
    return found


def first_call(family: str, operator: str) -> float:
    """Seconds of the first forward and backward of this process."""
    contest = first_contests(family)[operator]
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in contest.inputs]
    torch.cuda.synchronize()
    began = time.perf_counter()
    output = contest.entrants["ours"].run(*inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_own_process(family: str, operator: str) -> str:
    """The same in a new process with an empty cache; its seconds, or the last line of its error."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "experiments.benchmarks.kernels.cold", "--child", family, operator]
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"ended with {done.returncode}"


def cold_starts(families: tuple[str, ...], workers: int) -> list[tuple[str, str]]:
    """(operator, seconds) of all operators of the families, each in a process of its own."""
    names = [(family, operator) for family in families for operator in first_contests(family)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        seconds = list(pool.map(lambda name: in_own_process(*name), names))
    return [(operator, found) for (_, operator), found in zip(names, seconds, strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Print one row of Markdown for each operator."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.kernels.cold")
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, comma-separated")
    parser.add_argument("--one-by-one", action="store_true", help="one process after the other")
    parser.add_argument("--child", nargs=2, metavar=("FAMILY", "OPERATOR"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("cold: no CUDA device here")
    if options.child:
        print(f"{first_call(*options.child):.1f}")
        return 0
    workers = 1 if options.one_by_one else max(1, (os.cpu_count() or 2) // 2)
    print(f"| operator | first forward and backward s (goal {GOAL_S:.0f}) |\n|---|---|")
    for operator, seconds in cold_starts(tuple(options.only.split(",")), workers):
        print(f"| {operator} | {seconds} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
