"""Times of what only runs forward: decode steps, and matching sums at long lengths, beside what others offer.

µs, share of the measured ceiling, peak MB above the inputs, and errors against float64 at small sizes.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.benchmarks.kernels import read_peers as others
from experiments.benchmarks.kernels.checks import error
from experiments.benchmarks.kernels.floors import HALF, SINGLE, Ceilings, Work
from experiments.benchmarks.kernels.timing import device_time

# Patterns above this many bytes are not materialised.
DENSE_BYTES = 20e9
HEAD = ("operator", "shape", "who", "µs", "captured", "ours / it", "share of ceiling", "peak MB",
        "error, 1e-3")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Read:
    """One call of one entrant; its first output is compared with `reference()` (float64) if there is one."""

    operator: str
    shape: str
    who: str
    call: Callable[[], object]
    work: Work
    reference: Callable[[], Tensor] | None = None


def _half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def decode_steps(peers: bool, small: bool = False) -> Iterator[Read]:
    """One token of 64 sequences, and of few sequences with a long cache (a short one if small)."""
    yield from _linear_step(peers)
    yield from _scan_step(peers)
    yield from _conv_step(peers)
    caches = ((1, 32, 8, 32768, 128), (8, 8, 8, 8192, 64))
    for batch, heads, groups, seq, d in caches:
        yield from _softmax_step(peers, batch, heads, groups, 500 if small else seq, d)


def _linear_step(peers: bool) -> Iterator[Read]:
    from kernels.triton import decode

    batch, heads, d = 64, 8, 64
    q, k, v = (_half(batch, heads, d) for _ in range(3))
    s = torch.randn(batch, heads, d, d, device="cuda")
    calls = {"ours": lambda: decode.linear_step(q, k, v, s=s)}
    if peers and (call := others.linear_step(q, k, v, s)):
        calls["fla"] = call
    state = s.double() + k.double()[..., None] * v.double()[..., None, :]
    reference = functools.partial(torch.einsum, "bhk,bhkv->bhv", q.double(), state)
    work = Work(bytes=2 * SINGLE * s.numel() + 4 * HALF * q.numel())
    yield from _reads("decode linear", f"{batch} x {heads} x {d} x {d}", calls, work, reference)


def _scan_step(peers: bool) -> Iterator[Read]:
    from kernels.triton import decode

    u, dt, b, c = _half(64, 1024), _half(64, 1024).abs(), _half(64, 16), _half(64, 16)
    h, a = torch.randn(64, 1024, 16, device="cuda"), torch.randn(1024, 16, device="cuda")
    skip = torch.randn(1024, device="cuda")
    decay = torch.exp(-torch.exp(a.double()) * dt.double()[..., None])
    state = decay * h.double() + (dt.double() * u.double())[..., None] * b.double()[:, None]
    expected = (state * c.double()[:, None]).sum(-1) + skip.double() * u.double()
    calls = {"ours": lambda: decode.scan_step(u, dt, a, b, c, D=skip, state=h)}
    if peers and (call := others.scan_step(u, dt, a, b, c, skip, h.clone())):
        calls["mamba_ssm"] = call
    work = Work(bytes=2 * SINGLE * h.numel() + 3 * HALF * u.numel(), exps=h.numel())
    yield from _reads("decode scan", "64 x 1024 x 16", calls, work, lambda: expected)


def _conv_step(peers: bool) -> Iterator[Read]:
    from kernels.triton import decode

    x, weight, stored = _half(64, 1024), _half(1024, 4), _half(64, 3, 1024)
    window = torch.cat([stored, x[:, None]], 1).double()
    expected = torch.nn.functional.silu((window * weight.double().T).sum(1))
    calls = {"ours": lambda: decode.conv_step(x, weight, state=stored, silu=True)}
    if peers and (call := others.conv_step(x, weight, stored)):
        calls["causal-conv1d"] = call
    work = Work(bytes=HALF * (2 * stored.numel() + 2 * x.numel()))
    yield from _reads("decode conv", "64 x 1024", calls, work, lambda: expected)


def _softmax_step(peers: bool, batch: int, heads: int, groups: int, seq: int, d: int) -> Iterator[Read]:
    from kernels import softmax_attention as readable
    from kernels.triton import decode_attention

    q, k, v = _half(batch, heads, d), _half(batch, seq, groups, d), _half(batch, seq, groups, d)
    calls = {"ours": functools.partial(decode_attention.softmax_step, q, k, v)}
    if peers:
        calls["SDPA"] = others.sdpa_step(q, k, v)
    shape = f"{batch} x {heads} heads, {groups} groups, cache {seq}, d {d}"
    wide = [x.double() for x in (q[:, None], k, v)] if seq < 1000 else []
    reference = (lambda: readable.parallel(*wide)[:, 0]) if wide else None
    work = Work(bytes=2 * HALF * k.numel(), flops=4 * d * batch * heads * seq, exps=batch * heads * seq)
    yield from _reads("decode softmax", shape, calls, work, reference)


def matching_sums(peers: bool, small: bool = False) -> Iterator[Read]:
    """Attention to the tokens that followed earlier copies, one sequence of each length."""
    for seq in (512,) if small else (2048, 8192, 32768):
        tokens = torch.randint(0, 50 if small else 8192, (1, seq), device="cuda")
        labels = (tokens, torch.cat([torch.full_like(tokens[:, :1], -1), tokens[:, :-1]], 1))
        yield from _attention_matches(peers, seq, labels)
        yield from _scan_matches(seq, labels)


def _attention_matches(peers: bool, seq: int, labels: tuple[Tensor, Tensor]) -> Iterator[Read]:
    from kernels import gated_linear_attention, softmax_attention
    from kernels.triton import edges

    heads, d = 8, 64
    q, k = (_half(1, seq, heads, d) for _ in range(2))
    g = -torch.rand(1, seq, heads, device="cuda") * 0.1
    pairs = heads * seq * (seq + 1) / 2
    calls = {"ours": functools.partial(edges.softmax_matches, q, k, *labels)}
    if peers:
        calls |= others.softmax_matches(q, k, *labels)
        if 8 * 4 * seq**2 < DENSE_BYTES:
            calls["pattern"] = functools.partial(others.from_pattern, q, k, *labels)
    wide = (q.double(), k.double(), g.double()) if seq < 1000 else None
    match = (labels[0][:, :, None] == labels[1][:, None, :])[:, None] if wide else None
    shape = f"T={seq}, {heads} heads"
    for operator, run, pattern, work in (
        ("softmax", calls,
         lambda: softmax_attention.pattern(*wide[:2]), Work(flops=2 * d * pairs, exps=pairs)),
        ("linear", {"ours": functools.partial(edges.linear_matches, q, k, *labels)},
         lambda: gated_linear_attention.pattern(*wide[:2]), Work(bytes=2 * HALF * q.numel())),
        ("decay", {"ours": functools.partial(edges.linear_matches, q, k, *labels, log_decay=g)},
         lambda: gated_linear_attention.pattern(*wide[:2], log_decay=wide[2]),
         Work(bytes=2 * HALF * q.numel() + SINGLE * g.numel())),
    ):  # fmt: skip
        reference = functools.partial(_matched, pattern, match) if wide else None
        yield from _reads(f"matches {operator}", shape, run, work, reference)


def _scan_matches(seq: int, labels: tuple[Tensor, Tensor]) -> Iterator[Read]:
    from kernels import selective_scan
    from kernels.triton import edges

    channels = 64 if seq < 1000 else 1024
    dt, b, c = _half(1, seq, channels).abs(), _half(1, seq, 16), _half(1, seq, 16)
    a = torch.randn(channels, 16, device="cuda")
    work = Work(bytes=HALF * dt.numel() + SINGLE * dt.numel() + 2 * HALF * b.numel())
    match = (labels[0][:, :, None] == labels[1][:, None, :])[:, None] if seq < 1000 else None
    pattern = functools.partial(selective_scan.pattern, *(x.double() for x in (dt, a, b, c)))
    reference = None if match is None else functools.partial(_matched, pattern, match)
    calls = {"ours": functools.partial(edges.scan_matches, dt, a, b, c, *labels)}
    yield from _reads("matches scan", f"T={seq}, {channels} channels", calls, work, reference)


def _matched(pattern: Callable[[], Tensor], match: Tensor) -> Tensor:
    return (pattern() * match).sum(-1)


def _reads(
    operator: str, shape: str, calls: dict[str, Callable[[], object]], work: Work,
    reference: Callable[[], Tensor] | None,
) -> Iterator[Read]:  # fmt: skip
    for who, call in calls.items():
        # The fixed offset and one source a row are not the same sum.
        expected = None if who in others.DIFFERENT else reference
        yield Read(operator=operator, shape=shape, who=who, call=call, work=work, reference=expected)


def read_times(operators: tuple[str, ...], peers: bool, ceilings: Ceilings) -> list[str]:
    """Table of device times (graph where it can be captured), shares, peak memory and errors."""
    makers = {"decode": decode_steps, "edges": matching_sums}
    chosen = [make for name, make in makers.items() if name in operators]
    errors = _errors(itertools.chain(*(make(peers, small=True) for make in chosen)))
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    print("\n".join(lines), flush=True)
    ours = 0.0
    for read in itertools.chain(*(make(peers) for make in chosen)):
        try:
            micros, captured, peak = _measured(read)
        except Exception as problem:
            _failed(read, problem)
            continue
        # Ours comes first in each group.
        ours = micros if read.who == "ours" else ours
        ratio = "" if read.who == "ours" else f"{ours / micros:.2f}"
        row = (read.operator, read.shape, read.who, f"{micros:.1f}", "yes" if captured else "no", ratio,
               f"{ceilings.floor(read.work) / micros:.0%}", f"{peak:.0f}",
               errors.get((read.operator, read.who), ""))  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    return lines


def _measured(read: Read) -> tuple[float, bool, float]:
    """(median µs, whether captured in a graph, peak MB above what was there)."""
    read.call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    read.call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    return *device_time(read.call, 10), peak


def _errors(reads: Iterator[Read]) -> dict[tuple[str, str], str]:
    found = {}
    for read in reads:
        if read.reference is None:
            continue
        try:
            # Peers write into their state: the reference is made before.
            expected, output = read.reference(), read.call()
            output = output[0] if isinstance(output, tuple) else output
            found[read.operator, read.who] = f"{1e3 * error(output.reshape(expected.shape), expected):.2g}"
        except Exception as problem:
            _failed(read, problem)
    return found


def _failed(read: Read, problem: Exception) -> None:
    text = f"{type(problem).__name__} {str(problem)[:200]}"
    print(f"{read.operator} {read.shape} {read.who}: {text}", flush=True)
    torch.cuda.synchronize()
