"""Training whole language models on one GPU: ours, flash-linear-attention's and plain PyTorch's.

Forward, backward, clipping and AdamW under bfloat16 autocast, the same for all; models in `contenders`.
Ours runs as `train-lm` runs it, the whole step captured as a CUDA graph. Peers run eagerly, and captured as
well where that can be done, so that the peer's quicker way counts.

    python -m experiments.benchmarks.whole_models [--shapes small middle large] [--kinds linear] [--losses N]
    python -m experiments.benchmarks.whole_models --losses N --same-weights ...
                                                                 N losses of both from our initial weights too
    python -m experiments.benchmarks.whole_models --warm ...     compile everything, measure nothing
    python -m experiments.benchmarks.whole_models --profile ...  kernels of one of our steps, by time
"""

import argparse
import dataclasses
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.whole_models.contenders import (
    D_VOCAB,
    KINDS,
    SEQ,
    SHAPES,
    Contender,
    Shape,
    ours,
    peer,
    peer_name,
)
from experiments.benchmarks.whole_models.same_weights import peer_with_our_weights
from experiments.optimiser import clip_gradients

# Batches of data that training goes through again and again.
N_BATCHES = 16
# Steps before timing, steps timed; a peer slower than this a step is timed over fewer.
WARM_UP, TIMED, SLOW_S = 4, 12, 0.5


def bigram_tokens(batch: int, device: str) -> Tensor:
    """[N_BATCHES batch SEQ] tokens of a random chain with eight successors a token: something to learn."""
    generator = torch.Generator(device).manual_seed(0)
    successors = torch.randint(0, D_VOCAB, (D_VOCAB, 8), device=device, generator=generator)
    rows = N_BATCHES * batch
    choices = torch.randint(0, 8, (SEQ, rows), device=device, generator=generator)
    tokens = [torch.randint(0, D_VOCAB, (rows,), device=device, generator=generator)]
    for choice in choices[1:]:
        tokens.append(successors[tokens[-1], choice])
    return torch.stack(tokens, 1).view(N_BATCHES, batch, SEQ)


class Trainer:
    """Steps of one contender, eager, or captured once as a CUDA graph."""

    def __init__(self, contender: Contender, data: Tensor):
        self.contender, self.data, self.n = contender, data, 0
        self.tokens = data[0].clone()
        lr = torch.tensor(1e-3, device=data.device)
        parameters = contender.model.parameters()
        options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True, "capturable": True}
        self.optimiser = torch.optim.AdamW(parameters, lr=lr, **options)
        self.graph: torch.cuda.CUDAGraph | None = None

    def body(self) -> Tensor:
        """One update of the batch in `tokens`; its loss before it."""
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = self.contender.loss(self.tokens)
        loss.backward()
        clip_gradients(self.contender.model, 1.0)
        self.optimiser.step()
        return loss.detach()

    def capture(self) -> None:
        """Make later steps replays of a graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.body()
        torch.cuda.current_stream().wait_stream(side)
        self.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self.body()
        self.graph = graph

    def step(self) -> Tensor:
        """One update on the next batch."""
        self.tokens.copy_(self.data[self.n % N_BATCHES])
        self.n += 1
        if self.graph is None:
            return self.body()
        self.graph.replay()
        return self._loss

    def seconds(self) -> tuple[float, float]:
        """Median seconds of a step, and the peak of allocated memory in GB."""
        for _ in range(WARM_UP):
            started = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            last = time.perf_counter() - started
            if last > SLOW_S and self.n > 1:
                break
        torch.cuda.reset_peak_memory_stats()
        events = []
        for _ in range(3 if last > SLOW_S else TIMED):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            self.step()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1e3 for begin, end in events]
        return statistics.median(times), torch.cuda.max_memory_allocated() / 1e9


def measure(make: Callable[[str, Shape], Contender], kind: str, shape: Shape, options: Any) -> dict[str, Any]:
    """One contender's numbers: milliseconds of a step eager and captured, batch, peak, parameters, losses."""
    torch.manual_seed(0)
    contender = make(kind, shape)
    contender.model.cuda().train()
    found: dict[str, Any] = {"batch": shape.batch, "parameters": contender.n_parameters}
    trainer = Trainer(contender, bigram_tokens(shape.batch, "cuda"))
    if options.losses:
        found["losses"] = [float(trainer.step())]
    seconds, found["peak_gb"] = trainer.seconds()
    found["eager_ms"] = 1e3 * seconds
    if seconds < SLOW_S:
        try:
            trainer.capture()
            seconds, found["captured_peak_gb"] = trainer.seconds()
            found["captured_ms"] = 1e3 * seconds
        except RuntimeError as error:
            found["not_captured"] = str(error).splitlines()[0][:120]
    if options.losses:
        wanted = options.losses if seconds < SLOW_S else min(20, options.losses)
        while trainer.n < wanted:
            loss = trainer.step()
        found["losses"] += [trainer.n, float(loss)]
    return found


def loss_curve(
    make: Callable[[str, Shape], Contender], kind: str, shape: Shape, n_steps: int
) -> list[float] | None:
    """Loss of each of the first steps, of 20 where a step is slow; None where they do not fit the memory.

    Eager steps: a capture takes one more update, which would shift the curve of those that are captured.
    """
    try:
        contender = make(kind, shape)
        contender.model.cuda().train()
        trainer = Trainer(contender, bigram_tokens(shape.batch, "cuda"))
        losses: list[float] = []
        while len(losses) < n_steps:
            began = time.perf_counter()
            losses.append(round(float(trainer.step()), 6))
            # The steps before it compile.
            if len(losses) == WARM_UP and time.perf_counter() - began > SLOW_S:
                n_steps = min(20, n_steps)
        return losses
    except torch.OutOfMemoryError:
        return None


def fitting(make: Callable[[str, Shape], Contender], kind: str, shape: Shape, options: Any) -> dict[str, Any]:
    """`measure` at the largest batch, halved from the shape's, whose step fits the memory."""
    batch = shape.batch
    while batch >= 8:
        try:
            one = Shape(n_layers=shape.n_layers, d_model=shape.d_model, batch=batch)
            return measure(make, kind, one, options)
        except torch.OutOfMemoryError:
            batch //= 2
        finally:
            _free()
    return {"batch": 0}


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def profile(kind: str, shape: Shape) -> str:
    """A table of the kernels of our eager steps, by time on the device."""
    contender = ours(kind, shape)
    contender.model.cuda().train()
    trainer = Trainer(contender, bigram_tokens(shape.batch, "cuda"))
    for _ in range(2):
        trainer.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        trainer.step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:28]
    total = sum(row.self_device_time_total for row in found.key_averages())
    lines = [f"{kind} {shape}: {total / 1e3:.2f} ms of kernels"]
    lines += [f"{r.self_device_time_total / 1e3:8.3f} ms {r.count:4d}x {r.key[:110]}" for r in rows]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line for each contender; `table` makes the table of them."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.whole_models")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--who", nargs="+", default=["ours", "peer"], choices=("ours", "peer"))
    parser.add_argument("--peers", nargs="*", default=list(KINDS), choices=KINDS, help="kinds with a peer")
    parser.add_argument("--losses", type=int, default=0, metavar="N", help="losses at steps 1 and N too")
    parser.add_argument(
        "--same-weights", action="store_true", help="N losses of both from our initial weights too"
    )
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--warm", action="store_true", help="compile only")
    parser.add_argument("--profile", action="store_true", help="kernels of our steps")
    options = parser.parse_args(argv)
    if options.losses < 0:
        parser.error(f"--losses is {options.losses}, accepted are numbers of steps from 0")
    if options.same_weights and options.losses < 1:
        parser.error("--same-weights needs --losses N, the number of steps")
    if not torch.cuda.is_available():
        sys.exit("whole_models: no CUDA device here")
    needs_fla = "peer" in options.who and {*options.kinds} & {*options.peers} - {"softmax"}
    if needs_fla and not options.profile and importlib.util.find_spec("fla") is None:
        sys.exit("whole_models: flash-linear-attention is not installed; --who ours measures without it")
    for shape in options.shapes:
        for kind in options.kinds:
            if options.profile:
                print(profile(kind, SHAPES[shape]), flush=True)
                continue
            for who in options.who:
                if who == "peer" and kind not in options.peers:
                    continue
                make = ours if who == "ours" else peer
                from_ours = ours if who == "ours" else peer_with_our_weights
                if options.warm:
                    for each in {make, from_ours} if options.same_weights else {make}:
                        _warm(each, kind, SHAPES[shape])
                    continue
                began = time.perf_counter()
                found = fitting(make, kind, SHAPES[shape], options)
                if options.same_weights and found["batch"]:
                    same = dataclasses.replace(SHAPES[shape], batch=found["batch"])
                    found["curve"] = loss_curve(from_ours, kind, same, options.losses)
                    # Our models are cycles of references: the next contender's peak must not hold this one.
                    _free()
                name = "ours" if who == "ours" else peer_name(kind)
                line = {"shape": shape, "kind": kind, "who": name, **found}
                line["took_s"] = round(time.perf_counter() - began, 1)
                print(json.dumps(line), flush=True)
                if options.out:
                    with open(options.out, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    return 0


def _warm(make: Callable[[str, Shape], Contender], kind: str, shape: Shape) -> None:
    """Two steps, at the shape's own batch only where a compiler asks for it."""
    batch = shape.batch if kind == "softmax" else 8
    contender = make(kind, Shape(n_layers=shape.n_layers, d_model=shape.d_model, batch=batch))
    contender.model.cuda().train()
    trainer = Trainer(contender, bigram_tokens(batch, "cuda"))
    for _ in range(2):
        trainer.step()
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
