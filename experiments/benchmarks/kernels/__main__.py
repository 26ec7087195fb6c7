"""Check and time the Triton kernels and every peer that can be imported: python -m
experiments.benchmarks.kernels

    --check         every output and gradient against float64
    --time          device time (CUDA graph), host time, memory, cold start, share of the measured ceiling and
                    error, beside the peers
    --only A,B      some of: softmax, linear, scan, conv, block, split, tables, decode, edges
    --workers N     compile the peers' candidates in N processes first; alone their tuning takes minutes
    --tuning KIND   full: as the peers do it; quick: configurations are timed for less long; short: three each
    --out FILE      where the Markdown table goes (default experiments/benchmarks/results/kernels-<gpu>.md)
"""

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from experiments.benchmarks.kernels import peers as kernel_peers
from experiments.benchmarks.kernels.contests import Contest, contests
from experiments.benchmarks.kernels.errors import error_cells
from experiments.benchmarks.kernels.floors import Ceilings, measured_ceilings
from experiments.benchmarks.kernels.jobs import OPERATORS, run_checks
from experiments.benchmarks.kernels.peers import Entrant
from experiments.benchmarks.kernels.reads import read_times
from experiments.benchmarks.kernels.timing import Timing, device_time, measure
from experiments.benchmarks.kernels.tuning import TUNINGS, compile_candidates, set_tuning

HEAD = ("operator", "shape", "who", "fwd µs", "fwd+bwd µs", "ours / it", "share of ceiling, fwd, f+b",
        "host µs", "cold s", "peak MB", "error, 1e-3")  # fmt: skip
NOTES = """Device times are medians of CUDA-graph replays ("eager" where capture failed: then the host's
delays may count), each with the device kept busy while the host enqueues; host is the time to
enqueue one eager forward and backward, cold the first forward and backward, peak MB the memory
above the inputs of a forward and backward. "ours / it" compares forward and backward; ours has
the ratio to the best peer. The share is the least time that bytes, products and exponentials
need at the measured ceilings (`kernels/floors.py` has the formulas), over the time. Errors are
relative RMS against float64 at a small shape (512 tokens), the largest and then each output and
gradient. Every entrant gets its inputs in its natural layout, made beforehand. mamba_ssm and
causal-conv1d may be builds of their released sources for this GPU alone."""


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


def times(operators: tuple[str, ...], peers: bool, ceilings: Ceilings, tuning: str) -> Iterator[list[str]]:
    """Rows of ours and the peers, given operator by operator since errors are measured after the times."""
    for operator in operators:
        rows: list[list[str]] = []
        for contest in contests((operator,), peers):
            set_tuning(tuning)
            rows += _rows(contest, _measured(contest), ceilings)
            torch.cuda.empty_cache()
        cells = error_cells((operator,), peers)
        for row in rows:
            yield [*row, cells.get((row[0], row[2]), "")]


def _measured(contest: Contest) -> dict[str, tuple[Timing, bool]]:
    """By entrant: its times, and whether forward and backward could be captured in a CUDA graph."""
    found = {}
    for who, entrant in contest.entrants.items():
        try:
            with entrant.context():
                inputs = entrant.layout.own(contest.inputs)
                found[who] = measure(entrant, inputs), _captured(entrant, inputs)
        except Exception as problem:
            text = f"{type(problem).__name__} {str(problem)[:200]}"
            print(f"{contest.operator} {contest.shape} {who}: {text}", flush=True)
            torch.cuda.synchronize()
    return found


def _captured(entrant: Entrant, inputs: list[Tensor]) -> bool:
    inputs = [x.detach().requires_grad_() for x in inputs]
    cotangent = torch.randn_like(entrant(*inputs))
    return device_time(lambda: torch.autograd.grad(entrant(*inputs), inputs, cotangent), 1)[1]


def _rows(
    contest: Contest, found: dict[str, tuple[Timing, bool]], ceilings: Ceilings
) -> list[list[str]]:
    rows = []
    peers = [t.both for who, (t, _) in found.items() if not who.startswith("ours")]
    forward, both = (ceilings.floor(work) for work in contest.work)
    for who, (t, captured) in found.items():
        compared = min(peers, default=None) if who == "ours" else t.both
        ratio = f"{found['ours'][0].both / compared:.2f}" if compared and "ours" in found else ""
        eager = "" if captured else " (eager)"
        rows.append([
            contest.operator, contest.shape, who, f"{t.forward:.1f}", f"{t.both:.1f}{eager}",
            f"**{ratio}**" if ratio and who == "ours" else ratio,
            f"{forward / t.forward:.0%}, {both / t.both:.0%}", f"{t.host:.0f}", f"{t.cold / 1e6:.1f}",
            f"{t.peak_mb:.0f}",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    options = _options()
    if not torch.cuda.is_available():
        sys.exit("kernels: no CUDA device here")
    operators, peers = tuple(options.only.split(",")), not options.no_peers
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    out = options.out or Path(__file__).parents[1] / "results" / f"kernels-{gpu.lower().replace(' ', '-')}.md"
    lines = _title(gpu, options)
    if options.check:
        lines += ["## Checks", "", *check(operators), ""]
    if options.time:
        if options.workers and peers:
            start = time.perf_counter()
            compile_candidates(operators, options.workers, options.tuning)
            print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
        ceilings = measured_ceilings()
        print(ceilings, flush=True)
        lines += ["## Times", "", NOTES, "", f"Ceilings measured in the same run: {ceilings}.", ""]
        lines += _table_head(HEAD)
        reads = read_times(operators, peers, ceilings) if {"decode", "edges"} & set(operators) else []
        reads = ["", "## Forward only", "", *reads] if reads else []
        for row in times(operators, peers, ceilings, options.tuning):
            lines.append("| " + " | ".join(row) + " |")
            # A run that is stopped leaves what it has.
            _write(out, lines + reads)
        lines += reads
    _write(out, lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels.")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--time", action="store_true", help="time ours and the peers")
    parser.add_argument("--no-peers", action="store_true", help="time ours only")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile for the peers first")
    parser.add_argument("--tuning", choices=tuple(TUNINGS), default="full", help="how the peers tune")
    parser.add_argument("--only", default=",".join(OPERATORS), help="operators, comma-separated")
    parser.add_argument("--out", type=Path, help="Markdown file")
    return parser.parse_args()


def _title(gpu: str, options: argparse.Namespace) -> list[str]:
    import triton

    tuning = TUNINGS[options.tuning]
    flags = "".join(f" --{n}" for n in ("check", "time") if getattr(options, n))
    if options.workers:
        tuning += " Kernels were compiled beforehand: cold does not hold compilation."
    return [
        f"# Kernels on one {gpu}", "",
        f"{datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}, {kernel_peers.versions()}. "
        f"`python -m experiments.benchmarks.kernels --only {options.only}{flags}`.{tuning}", "",
    ]  # fmt: skip


def _table_head(columns: tuple[str, ...]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def _write(out: Path, lines: list[str]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
