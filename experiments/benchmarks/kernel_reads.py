"""Times of what only runs forward: decode steps, and matching sums at long lengths, beside what others offer.

µs, and peak MB above the inputs.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from experiments.benchmarks.kernel_timing import device_time

# Patterns above this many bytes are not materialised.
DENSE_BYTES = 20e9
Read = tuple[str, str, str, Callable[[], object]]


def _half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def decode_steps() -> Iterator[Read]:
    """(operator, shape, who, call): one token of 64 sequences, and of few sequences with a long cache."""
    from kernels.triton import decode, decode_attention

    q, k, v = (_half(64, 8, 64) for _ in range(3))
    s = torch.randn(64, 8, 64, 64, device="cuda")
    yield "decode linear", "64 x 8 x 64 x 64", "ours", lambda: decode.linear_step(q, k, v, s=s)
    u, b, h = _half(64, 1024), _half(64, 16), torch.randn(64, 1024, 16, device="cuda")
    a, dt = torch.randn(1024, 16, device="cuda"), _half(64, 1024).abs()
    yield "decode scan", "64 x 1024 x 16", "ours", lambda: decode.scan_step(u, dt, a, b, b, state=h)
    weight, stored = _half(1024, 4), _half(64, 3, 1024)
    yield "decode conv", "64 x 1024", "ours", lambda: decode.conv_step(u, weight, state=stored, silu=True)
    for batch, heads, groups, seq, d in ((1, 32, 8, 32768, 128), (8, 8, 8, 8192, 64)):
        q1, k1, v1 = _half(batch, heads, d), _half(batch, seq, groups, d), _half(batch, seq, groups, d)
        shape = f"{batch} x {heads} heads, {groups} groups, cache {seq}, d {d}"
        yield "decode softmax", shape, "ours", functools.partial(decode_attention.softmax_step, q1, k1, v1)
        yield "decode softmax", shape, "SDPA", functools.partial(_sdpa_step, q1, k1, v1)


def _sdpa_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)


def matching_sums() -> Iterator[Read]:
    """(operator, shape, who, call): attention to the tokens that followed earlier copies, one sequence."""
    from kernels.triton import edges

    for seq in (2048, 8192, 32768):
        tokens = torch.randint(0, 8192, (1, seq), device="cuda")
        labels = (tokens, torch.cat([torch.full_like(tokens[:, :1], -1), tokens[:, :-1]], 1))
        q, k = (_half(1, seq, 8, 64) for _ in range(2))
        g = -torch.rand(1, seq, 8, device="cuda") * 0.1
        dt, b = _half(1, seq, 1024).abs(), _half(1, seq, 16)
        a = torch.randn(1024, 16, device="cuda")
        shape = f"T={seq}, 8 heads"
        yield "matches softmax", shape, "ours", functools.partial(edges.softmax_matches, q, k, *labels)
        yield "matches softmax", shape, "FA2, one offset", functools.partial(one_offset, q, k, seq // 4)
        if 8 * 4 * seq**2 < DENSE_BYTES:
            yield "matches softmax", shape, "pattern", functools.partial(from_pattern, q, k, *labels)
        yield "matches linear", shape, "ours", functools.partial(edges.linear_matches, q, k, *labels)
        decayed = functools.partial(edges.linear_matches, q, k, *labels, log_decay=g)
        yield "matches decay", shape, "ours", decayed
        scan = functools.partial(edges.scan_matches, dt, a, b, b, *labels)
        yield "matches scan", f"T={seq}, 1024 channels", "ours", scan


def one_offset(q: Tensor, k: Tensor, period: int) -> Tensor:
    """Attention to one source a destination (period - 1 back), by FlashAttention-2's logsumexp."""
    heads_first = [x.transpose(1, 2) for x in (q, k, k)]
    lse = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, True)[1]
    reads, sources = q[:, period - 1 :].float(), k[:, : k.shape[1] - period + 1].float()
    scores = (reads * sources).sum(-1) * q.shape[-1] ** -0.5
    return torch.exp(scores.transpose(1, 2) - lse[:, :, period - 1 :])


def from_pattern(q: Tensor, k: Tensor, label_dest: Tensor, label_src: Tensor) -> Tensor:
    """The sums from all weights, in half precision."""
    scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    pattern = scores.masked_fill_(later, float("-inf")).softmax(-1)
    return pattern.masked_fill_((label_dest[:, :, None] != label_src[:, None, :])[:, None], 0).sum(-1)


def read_times(operators: tuple[str, ...]) -> list[str]:
    """Table of device times (graph where it can be captured) and peak memory."""
    lines = ["| operator | shape | who | µs | captured | peak MB |", "|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    makers = {"decode": decode_steps, "edges": matching_sums}
    chosen = itertools.chain(*(make() for name, make in makers.items() if name in operators))
    for operator, shape, who, call in chosen:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        micros, captured = device_time(call, 10)
        row = (operator, shape, who, f"{micros:.1f}", "yes" if captured else "no", f"{peak:.0f}")
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    return lines
