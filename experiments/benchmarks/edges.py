"""Prefix matching of one layer at 2k to 128k tokens, on chosen edges and through the materialised pattern.

    python -m experiments.benchmarks.edges [--device cuda] [--lengths 2048 8192] [--rounds 3] [--seconds 8]

Needs torch, numpy, einops, jaxtyping and safetensors only. One GPU runs the whole list in about a minute.
"""

import argparse
import importlib.util
import platform
import resource
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from interp import prefix_matching
from interp.edge_scores import edge_scores
from interp.sequences import RepeatedTokens, repeated_tokens
from models.config import (
    LinearAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    RopeConfig,
    SoftmaxAttentionConfig,
)
from models.mixers import MIXERS as CLASSES
from models.mixers.base import Mixer

LENGTHS = {"cuda": (2048, 8192, 32768, 131072), "cpu": (512, 2048, 8192)}
D_MODEL, N_HEADS, REPEATS = 128, 4, 4
CONFIGS = {
    "softmax": SoftmaxAttentionConfig(n_heads=N_HEADS),
    "linear": LinearAttentionConfig(n_heads=N_HEADS, d_conv=4),
    "mamba2": Mamba2Config(d_head=2 * D_MODEL // N_HEADS),
    "mamba1": Mamba1Config(),
}
CASES = (
    ("softmax", "pattern"),
    ("linear", "pattern"),
    ("mamba2", "ssm"),
    ("mamba2", "block"),
    ("mamba1", "ssm"),
)
# Largest pattern that is materialised, bytes.
DENSE_BYTES = {"cuda": 20e9, "cpu": 80e6}
HEADER = [
    "mixer", "reading", "weights", "T", "edges s", "edges MiB", "pattern GB", "dense s", "dense MiB",
    "largest difference", "Triton s",
]  # fmt: skip
NOTES = f"""\
One layer, random weights, d_model {D_MODEL}, {N_HEADS} heads, float32, one sequence: a block of T / {REPEATS}
distinct tokens, {REPEATS} times. Prefix matching by three aggregations, previous token and position 0;
the time is the median of a few calls and includes the layer's projections. MiB: peak above what was held
before the call (CPU: growth of the process's peak, so 0 where an earlier cell took more). pattern GB:
computed size of one layer's materialised weights [head dest src] (Mamba-1: one unit). dense: the same scores
from those weights, where they fit. Largest difference: of the `rowsum` scores, relative to the largest.
Triton s: the fused sums over matching sources, `rowsum` only, where there are such.

none: the attention weights themselves, linear time but for softmax's denominators. abs_row: |A| over its
row sum, added up in blocks: quadratic time, linear memory. contribution: norms of contributions over their
row sum, for which no linear form exists: quadratic time, linear memory.
"not run": the square of the length predicts a time beyond the limit a cell."""


def build(name: str, device: str) -> Mixer:
    """A random mixer."""
    torch.manual_seed(0)
    rope = RopeConfig() if name == "softmax" else None
    mixer = CLASSES[name](CONFIGS[name], D_MODEL, n_ctx=max(LENGTHS["cuda"]), rope=rope)
    generator = torch.Generator().manual_seed(0)
    mixer.reset_parameters(std=0.2, out_std=0.2, generator=generator)
    return mixer.to(device).eval()


def inputs(seq: int, device: str) -> tuple[RepeatedTokens, Tensor]:
    """The probe and an embedding of each of its tokens."""
    period = seq // REPEATS
    probe = repeated_tokens(1, period, REPEATS, ids=torch.arange(period), seed=0).to(device)
    table = torch.randn(period, D_MODEL, generator=torch.Generator().manual_seed(1))
    return probe, table.to(device)[probe.tokens]


def by_edges(mixer: Mixer, reading: str, probe: RepeatedTokens, x: Tensor) -> Tensor:
    """Scores on edges [unit]."""
    return edge_scores(mixer.read(x, reading), probe).rowsum[0, :, 0]


def dense(mixer: Mixer, reading: str, probe: RepeatedTokens, x: Tensor) -> Tensor:
    """The same through all weights."""
    return prefix_matching.prefix_matching_score(mixer.read(x, reading).weights(), probe)


def fused(name: str, mixer: Mixer, probe: RepeatedTokens, x: Tensor) -> Tensor:
    """The same by the Triton kernels that add up matching sources."""
    from kernels.edges import linear_denominator
    from kernels.triton import edges as triton_edges

    entries = mixer.read(x, "pattern").entries
    label_src = torch.cat([torch.full_like(probe.tokens[:, :1], -1), probe.tokens[:, :-1]], dim=1)
    q, k, labels = entries.q, entries.k, (probe.tokens, label_src)
    if name == "softmax":
        sums = triton_edges.softmax_matches(q, k, *labels, scale=entries.scale)
    else:
        below = linear_denominator(q, k, n_heads=N_HEADS, scale=entries.scale, eps=entries.eps)
        sums = triton_edges.linear_matches(q, k, *labels, scale=entries.scale) / below.transpose(1, 2)
    return sums[0].double().sum(-1) / (probe.n_earlier[0] > 0).sum()


def measured(call: Callable[[], Tensor], device: str, rounds: int) -> tuple[Tensor, float, float]:
    """Result, median seconds, and peak MiB above what was held (CPU: growth of the process's peak)."""
    seconds = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    while len(seconds) < rounds and sum(seconds) < 3:
        start = time.perf_counter()
        result = call().cpu()
        seconds.append(time.perf_counter() - start)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # The first call warms up.
    return result, statistics.median(seconds[1:] or seconds), (peak - before) / 2**20


def row(name: str, reading: str, seq: int, device: str, rounds: int) -> tuple[list[str], float]:
    """A line of the table, and the seconds on edges."""
    mixer = build(name, device)
    probe, x = inputs(seq, device)
    found = mixer.read(x, reading)
    size = 4.0 * found.n_units * seq**2
    labels = [name, reading, found.normalisation, f"{seq:,}"]
    del found
    score, seconds, peak = measured(partial(by_edges, mixer, reading, probe, x), device, rounds)
    cells = [f"{seconds:.4f}", f"{peak:,.0f}", f"{size / 1e9:.3g}"]
    if size <= DENSE_BYTES[device]:
        reference, *cost = measured(partial(dense, mixer, reading, probe, x), device, rounds)
        difference = f"{_difference(score, reference):.1e}"
        cells += [f"{cost[0]:.4f}", f"{cost[1]:,.0f}", difference]
    else:
        cells += ["-", "-", "-"]
    return [*labels, *cells, _triton_cell(name, reading, mixer, probe, x, device, rounds, score)], seconds


def _row_that_fits(name: str, reading: str, seq: int, device: str, rounds: int) -> tuple[list[str], float]:
    try:
        return row(name, reading, seq, device, rounds)
    except torch.OutOfMemoryError:
        cells = [name, reading, "", f"{seq:,}", "out of memory"]
        return [*cells, *["-"] * (len(HEADER) - len(cells))], float("inf")


def _difference(found: Tensor, reference: Tensor) -> float:
    """Largest difference relative to the largest score (a head that forgets has scores of 0)."""
    return float((found - reference).abs().max() / reference.abs().max().clamp_min(1e-30))


def _triton_cell(
    name: str,
    reading: str,
    mixer: Mixer,
    probe: RepeatedTokens,
    x: Tensor,
    device: str,
    rounds: int,
    score: Tensor,
) -> str:
    if device != "cuda" or reading != "pattern" or importlib.util.find_spec("triton") is None:
        return "-"
    try:
        found, seconds, _ = measured(partial(fused, name, mixer, probe, x), device, rounds)
    except Exception as error:
        return f"{type(error).__name__}"
    return f"{seconds:.4f} (difference {_difference(found, score):.1e})"


def _write(device: str, table: str) -> Path:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, one thread"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    path = Path(__file__).parent / "results" / f"edges-{device}.md"
    path.parent.mkdir(exist_ok=True)
    title = "# Prefix matching without the pattern"
    path.write_text(f"{title}\n\n{date.today()} · {name} · {versions}\n\n{table}\n\n{NOTES}\n")
    return path


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Print each line as it is measured, and write `results/edges-<device>.md`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; each a multiple of 4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="limit a cell, by what a shorter one took")
    options = parser.parse_args(argv)
    device = torch.device(options.device).type
    if device == "cpu":
        torch.set_num_threads(1)
    lines = [HEADER, ["---"] * len(HEADER)]
    for name, reading in CASES:
        last: tuple[int, float] | None = None
        for seq in options.lengths or LENGTHS[device]:
            expected = 0.0 if last is None else last[1] * (seq / last[0]) ** 2
            if expected > options.seconds:
                cells = [name, reading, "", f"{seq:,}", f"not run (about {expected:.0f})"]
                cells += ["-"] * (len(HEADER) - len(cells))
            else:
                cells, seconds = _row_that_fits(name, reading, seq, device, options.rounds)
                last = (seq, seconds)
            lines.append(cells)
            print(" | ".join(cells), flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
    path = _write(device, "\n".join("| " + " | ".join(line) + " |" for line in lines))
    print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
