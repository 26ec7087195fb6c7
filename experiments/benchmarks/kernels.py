"""Check and time the Triton kernels and every peer that can be imported: python -m
experiments.benchmarks.kernels

    --check        every output and gradient against float64
    --time         device time (CUDA graph), host time, memory and cold start, beside the peers
    --only A,B     some of: softmax, linear, scan, conv, split, tables, decode, edges
    --out FILE     where the Markdown table goes (default experiments/benchmarks/results/kernels-<gpu>.md)
"""

import argparse
import datetime
import platform
import sys
import time
from pathlib import Path

import torch

from experiments.benchmarks.kernel_contests import contests
from experiments.benchmarks.kernel_jobs import OPERATORS, run_checks
from experiments.benchmarks.kernel_reads import read_times
from experiments.benchmarks.kernel_timing import measure


def check(operators: tuple[str, ...]) -> list[str]:
    """Run every check; print failures as they come; give the lines of the report."""
    start = time.perf_counter()
    worst: dict[str, tuple[float, str]] = {}
    failed = total = 0
    for found in run_checks(operators):
        total += 1
        key = f"{found.case.split()[0]} {found.case.split()[3] if len(found.case.split()) > 3 else ''}"
        share = found.error / found.bound if found.bound else 0.0
        if share > worst.get(key, (0.0, ""))[0]:
            worst[key] = (share, f"{found.case} {found.tensor}: {found.error:.1e}")
        if not found.passed:
            failed += 1
            print(f"FAILED {found.case}: {found.tensor} error {found.error:.2e}, bound {found.bound:.1e}",
                flush=True)
    seconds = time.perf_counter() - start
    lines = [f"{total} comparisons with float64, {failed} above their bound, {seconds:.0f} s. Worst:", ""]
    lines += [f"* {line} ({share:.2f} of the bound)" for share, line in worst.values()]
    print("\n".join(lines), flush=True)
    return lines


def times(operators: tuple[str, ...], peers: bool) -> list[str]:
    """Time ours and the peers; the ratio is ours over the best peer of the same row."""
    head = "| operator | shape | who | fwd µs | fwd+bwd µs | host µs | cold s | peak MB | ours / best peer |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for contest in contests(operators, peers):
        found = {}
        for who, operator in contest.entrants.items():
            try:
                found[who] = measure(operator, contest.inputs)
            except Exception as problem:
                text = f"{type(problem).__name__} {str(problem)[:200]}"
                print(f"{contest.operator} {contest.shape} {who}: {text}", flush=True)
                torch.cuda.synchronize()
        others = [t.both for who, t in found.items() if who != "ours"]
        ratio = f"{found['ours'].both / min(others):.2f}" if others and "ours" in found else ""
        for who, t in found.items():
            row = (contest.operator, contest.shape, who, f"{t.forward:.1f}", f"{t.both:.1f}", f"{t.host:.0f}",
                   f"{t.cold / 1e6:.1f}", f"{t.peak_mb:.0f}", ratio if who == "ours" else "")  # fmt: skip
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels.")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--time", action="store_true", help="time ours and the peers")
    parser.add_argument("--no-peers", action="store_true", help="time ours only")
    parser.add_argument("--only", default=",".join(OPERATORS), help="operators, comma-separated")
    parser.add_argument("--out", type=Path, help="Markdown file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels: no CUDA device here")
    import triton

    operators = tuple(options.only.split(","))
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    out = options.out or Path(__file__).parent / "results" / f"kernels-{gpu.lower().replace(' ', '-')}.md"
    lines = [
        f"# Kernels on one {gpu}", "",
        f"{datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}. `python -m experiments.benchmarks.kernels --check --time`. Times are "
        "medians of "
        "CUDA-graph replays, host is the time "
        "to enqueue one eager forward and backward, cold the first forward and backward.", "",
    ]  # fmt: skip
    if options.check:
        lines += ["## Checks", "", *check(operators), ""]
    if options.time:
        lines += ["## Times", "", *times(operators, not options.no_peers), ""]
        if {"decode", "edges"} & set(operators):
            lines += ["## Forward only", "", *read_times(operators), ""]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
