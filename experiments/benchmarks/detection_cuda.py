"""`detect-induction` over 50 checkpoints of two-layer models on one GPU: wall time, its start included.

The command runs as a user runs it, in a process of its own, with all scores and the causal test; then the
same detection in this process says what one checkpoint takes.

    python -m experiments.benchmarks.detection_cuda [--checkpoints 50] [--kinds softmax mamba1] [--commands 2]
    python -m experiments.benchmarks.detection_cuda --first ...   where a new process spends its first
                                                                  checkpoint, instead of the table
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from experiments.benchmarks.contest import RESULTS, markdown_table

GOAL_S = 10.0
SEQ, N_WINDOWS = 512, 64
# Last step that is looked at one checkpoint at a time.
SAMPLED = 9
SIZES = {"gpu-text": (256, 8192), "demo": (64, 64)}
KINDS = ("softmax", "linear", "mamba1", "mamba2")


def write_series(root: Path, kind: str, size: str, n: int) -> None:
    """n checkpoints of one configuration with weights of their own, and evaluation windows."""
    from safetensors.torch import save_file

    from experiments.recipes import attention_only
    from models import LanguageModel, save_model
    from models.config import LinearAttentionConfig, Mamba1Config, Mamba2Config, SoftmaxAttentionConfig

    d_model, d_vocab = SIZES[size]
    seq = SEQ if size == "gpu-text" else 64
    mixer = {
        "softmax": SoftmaxAttentionConfig(n_heads=8 if size == "gpu-text" else 4),
        "linear": LinearAttentionConfig(n_heads=4, d_conv=4),
        "mamba1": Mamba1Config(),
        "mamba2": Mamba2Config(n_heads=8, d_state=64),
    }[kind]
    positions = "rope" if kind == "softmax" else "none"
    config = attention_only(
        (mixer, mixer), d_model=d_model, d_vocab=d_vocab, n_ctx=seq, positions=positions, init_std=0.1
    )
    model = LanguageModel(config)
    for step in range(n):
        model.reset_parameters(torch.Generator().manual_seed(step))
        save_model(root / f"step_{step:08d}", model)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, d_vocab, (N_WINDOWS, seq), generator=generator, dtype=torch.int32)
    save_file({"tokens": windows}, root / "eval.safetensors")


def command_seconds(root: Path, device: str) -> float:
    """Wall seconds of the command, from its start to its end."""
    command = [sys.executable, "-m", "interp.cli", str(root), "--device", device, "--quiet"]
    began = time.perf_counter()
    done = subprocess.run([*command, "--json", str(root / "report.json")], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"detect-induction ended with {done.returncode}: {done.stderr[-2000:]}")
    return seconds


def checkpoint_seconds(root: Path, device: str, scores: list[str] | None) -> float:
    """Median seconds of a checkpoint after the first, in this process."""
    from interp import detect

    moments = []
    detect(
        root,
        steps=f"0:{SAMPLED}",
        device=device,
        scores=scores,
        n_maps=0,
        progress=lambda done, total, step: moments.append(time.perf_counter()),
    )
    gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    return statistics.median(gaps[1:])


def start_seconds(device: str) -> float:
    """Seconds of a process that imports what the command imports and touches the device."""
    code = (
        f"import models; models.without_lens(); from interp.device_start import begin_device; "
        f"begin_device({device!r}); import interp.detection, interp.table, torch; "
        f"torch.zeros(1, device={device!r}).item()"
    )
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - began


FIRST = """
import cProfile, pstats, sys, time
began = time.perf_counter()
from models import without_lens
without_lens()
from interp.device_start import begin_device
if sys.argv[2].startswith("cuda"):
    begin_device(sys.argv[2])
from interp import detect
import interp.detection, interp.table
moments = [time.perf_counter() - began]
profile = cProfile.Profile()
profile.enable()
detect(sys.argv[1], steps="0:2", device=sys.argv[2],
    progress=lambda done, total, step: moments.append(time.perf_counter() - began))
profile.disable()
print("imports, checkpoints' starts and the last one's end, s:", *(f"{m:.2f}" for m in moments))
pstats.Stats(profile).sort_stats("tottime").print_stats(25)
"""


def first_checkpoint(root: Path, device: str) -> str:
    """Moments and profile of the first checkpoints in a process of their own, as text."""
    command = [sys.executable, "-c", FIRST, str(root), device]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(argv: list[str] | None = None) -> int:
    """Print each row as it is measured, and write `results/detection-cuda.md`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.detection_cuda")
    parser.add_argument("--checkpoints", type=int, default=50)
    parser.add_argument("--commands", type=int, default=2, help="runs of the command a row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--first", action="store_true", help="profile the first checkpoints instead")
    options = parser.parse_args(argv)
    n, device = options.checkpoints, options.device
    start = start_seconds(device)
    print(f"start {start:.2f} s", flush=True)
    rows = []
    for size in options.sizes:
        for kind in options.kinds:
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                write_series(root, kind, size, n)
                if options.first:
                    print(size, kind, first_checkpoint(root, device), flush=True)
                    continue
                wall = [command_seconds(root, device) for _ in range(options.commands)]
                each = checkpoint_seconds(root, device, None)
                plain = checkpoint_seconds(root, device, ["copying", "repeats", "in_context_learning"])
                heads = json.loads((root / "report.json").read_text())["checkpoints"][0]["heads"]
            walls = ", ".join(f"{seconds:.1f}" for seconds in wall)
            rows.append([size, kind, walls, f"{1e3 * each:.0f}", f"{1e3 * plain:.0f}", str(len(heads))])
            print(" | ".join(rows[-1]), flush=True)
    if options.first:
        return 0
    header = [
        "model",
        "mixer",
        "command, one after the other s",
        "a checkpoint ms",
        "without causal test ms",
        "rows a checkpoint",
    ]
    _write(markdown_table(header, rows), n, start, device)
    return 0


def _write(table: str, n: int, start: float, device: str) -> None:
    place = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"
    notes = (
        f"Goal: {GOAL_S:.0f} s for {n} checkpoints, start included. Two layers; gpu-text: d_model 256, "
        f"vocabulary 8,192, windows of {SEQ}; demo: d_model 64, vocabulary 64, windows of 64. All scores "
        "with the causal test, defaults otherwise. The commands follow one another: the first compiles the "
        "kernels that no row above it needed, later ones find them in Triton's cache. Start alone (imports "
        f"and the device's context): {start:.1f} s. A checkpoint: median of ten, in one process."
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    title = f"# detect-induction over {n} checkpoints on one GPU"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "detection-cuda.md"
    path.write_text(f"{title}\n\n{date.today()} · {place} · {versions}\n\n{table}\n\n{notes}\n")
    print(f"written: {path.name}")


if __name__ == "__main__":
    raise SystemExit(main())
