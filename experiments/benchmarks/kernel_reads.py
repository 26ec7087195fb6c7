"""Times of what only runs forward: decode steps, and matching sums at long lengths. µs, and peak MB above the
inputs."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from experiments.benchmarks.kernel_timing import device_time


def _labels(seq: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 8192, (1, seq), device="cuda")
    return tokens, torch.cat([torch.full_like(tokens[:, :1], -1), tokens[:, :-1]], 1)


def reads(operators: tuple[str, ...]) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(operator, shape, call), inputs made as they are needed."""
    from kernels.triton import decode, edges

    def half(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if "decode" in operators:
        q, k, v = (half(64, 8, 64) for _ in range(3))
        s = torch.randn(64, 8, 64, 64, device="cuda")
        yield "decode linear", "64 x 8 x 64 x 64", lambda: decode.linear_step(q, k, v, s=s)
        u, b, h = half(64, 1024), half(64, 16), torch.randn(64, 1024, 16, device="cuda")
        a = torch.randn(1024, 16, device="cuda")
        yield "decode scan", "64 x 1024 x 16", lambda: decode.scan_step(u, u.abs(), a, b, b, state=h)
    if "edges" in operators:
        for seq in (2048, 8192, 32768):
            tokens, source = _labels(seq)
            q, k = (half(1, seq, 8, 64) for _ in range(2))
            g = -torch.rand(1, seq, 8, device="cuda") * 0.1
            dt, b = half(1, seq, 1024).abs(), half(1, seq, 16)
            a = torch.randn(1024, 16, device="cuda")
            yield "matches softmax", f"T={seq}", lambda q=q, k=k, t=tokens, s=source: edges.softmax_matches(q,
                k, t, s)
            yield "matches linear", f"T={seq}", lambda q=q, k=k, t=tokens, s=source: edges.linear_matches(q,
                k, t, s)
            yield "matches decay", f"T={seq}", lambda q=q, k=k, t=tokens, s=source, g=g: edges.linear_matches(
                q, k, t, s, log_decay=g
            )
            scan = functools.partial(edges.scan_matches, dt, a, b, b, tokens, source)
            yield "matches scan", f"T={seq}, 1024 channels", scan


def read_times(operators: tuple[str, ...]) -> list[str]:
    """Table of device times (graph where it can be captured) and peak memory."""
    lines = ["| operator | shape | µs | captured | peak MB |", "|---|---|---|---|---|"]
    for operator, shape, call in reads(operators):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        micros, captured = device_time(call, 10)
        lines.append(f"| {operator} | {shape} | {micros:.1f} | {'yes' if captured else 'no'} | {peak:.0f} |")
        print(lines[-1], flush=True)
    return lines
