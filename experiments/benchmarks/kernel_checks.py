"""Every output and gradient of the Triton kernels against float64 references on the same GPU.

References are the readable forms, run in float64 over blocks of rows (softmax) or chunk by chunk from the
state that the
chunk before left (everything recurrent), so that any length fits.
"""

import concurrent.futures
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import gated_linear_attention as linear
from kernels import softmax_attention as softmax

LENGTHS = (1, 7, 63, 64, 65, 200, 2049, 70001)
# RMS error relative to the RMS of the reference.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
Tensors = dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: relative RMS error of one tensor of one case."""

    case: str
    tensor: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN inside, so that an element that no kernel writes shows."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def leaves(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Detached copies that ask for a gradient, in another dtype if one is given."""
    return {n: None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for n,
        x in tensors.items()}


def error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||; NaN counts as infinite."""
    if reference.numel() == 0:
        return 0.0 if x.shape == reference.shape else float("inf")
    # A gradient that is zero in exact arithmetic (one key) is measured against 0.1 an element.
    gap = (x.double() - reference).norm() / reference.norm().clamp_min(0.1 * reference.numel() ** 0.5)
    return float("inf") if not torch.isfinite(gap) else gap.item()


def compare(
    case: str,
    operator: Callable[[Tensors], dict[str, Tensor]],
    reference: Callable[[Tensors, dict[str, Tensor]], dict[str, Tensor]],
    inputs: Tensors,
    dtype: torch.dtype,
    loose: dict[str, float] | None = None,
) -> list[Check]:
    """Run both, pull the same random cotangents back (non-contiguous ones), give one Check per output and
    gradient.

    Args:
        operator: Inputs to named outputs.
        reference: float64 inputs and cotangents to outputs and gradients ("d" + name).
        loose: Factors on the bound of some tensors.
    """
    mine = leaves(inputs)
    with poisoned():
        outputs = operator(mine)
        cotangents = {}
        for name, out in outputs.items():
            random = torch.randn(*out.shape[:-1], 2 * out.shape[-1], device=out.device)[..., ::2]
            cotangents[name] = random.to(out.dtype)
        present = {n: x for n, x in mine.items() if x is not None}
        gradients = torch.autograd.grad(list(outputs.values()), list(present.values()),
            list(cotangents.values()))
    found = outputs | {f"d{name}": g for name, g in zip(present, gradients, strict=True)}
    expected = reference(leaves(inputs, torch.float64), {n: c.double() for n, c in cotangents.items()})
    bound = BOUNDS[dtype]
    return [
        Check(case=case, tensor=n, error=error(x, expected[n]), bound=bound * (loose or {}).get(n, 1.0))
        for n, x in found.items()
    ]


def softmax_reference(options: dict, block: int = 512) -> Callable:
    """Rows of the readable form in blocks, each pulled back on its own."""

    def run(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v, sink = x["q"], x["k"], x["v"], x.get("sink")
        shift = k.shape[1] - q.shape[1]
        pieces = []
        for start in range(0, q.shape[1], block):
            stop = min(start + block, q.shape[1])
            low = max(0, start + shift - options["window"] + 1) if options.get("window") else 0
            keys, values = k[:, low : stop + shift], v[:, low : stop + shift]
            o = softmax.parallel(q[:, start:stop], keys, values, sink=sink, **options)
            (o * cotangents["o"][:, start:stop]).sum().backward()
            pieces.append(o.detach())
        return {"o": torch.cat(pieces, 1)} | {f"d{n}": t.grad for n, t in x.items() if t is not None}

    return run


def chunked_reference(step: Callable, states: tuple[str, ...], per_step: tuple[str, ...],
    block: int = 256) -> Callable:
    """Chunk by chunk: `step(inputs of the chunk, state) -> (o, state)`; autograd spans the whole sequence."""

    def run(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        state = tuple(x.get(n) for n in states)
        pieces = []
        seq = x[per_step[0]].shape[1]
        for start in range(0, seq, block):
            cut = {n: t[:, start : start + block] if n in per_step and t is not None else t for n,
                t in x.items()}
            o, state = step(cut, state)
            pieces.append(o)
        outputs = {"o": torch.cat(pieces, 1)} | {f"last_{n}": t for n, t in zip(states, state, strict=True)}
        sum((outputs[n] * c).sum() for n, c in cotangents.items()).backward()
        return outputs | {f"d{n}": t.grad for n, t in x.items() if t is not None}

    return run


def check_softmax(seq: int, dtype: torch.dtype, d: int = 64, **kind: bool) -> list[Check]:
    """GQA, with a window and a sink, or large logits; at 70,001 one head."""
    from kernels.triton.softmax_attention import softmax_attention

    long = seq > 10_000
    batch, heads, groups = (1, 1, 1) if long else (2, 4, 2)
    n_src = seq + 5 if kind.get("tail") else seq
    gain = 30.0 if kind.get("large") else 1.0
    options = {"window": 100 if kind.get("window") else None}
    inputs = {
        "q": torch.randn(batch, seq, heads, d, device="cuda", dtype=dtype) * gain,
        "k": torch.randn(batch, n_src, groups, d, device="cuda", dtype=dtype),
        "v": torch.randn(batch, n_src, groups, d, device="cuda", dtype=dtype),
        "sink": torch.randn(heads, device="cuda") if kind.get("sink") else None,
    }
    return compare(
        f"softmax T={seq} d={d} {_name(dtype)} {_kinds(kind)}",
        lambda x: {"o": softmax_attention(x["q"], x["k"], x["v"], sink=x["sink"], **options)[0]},
        softmax_reference(options),
        inputs,
        dtype,
        {"dq": 20.0, "dk": 20.0} if kind.get("large") else None,
    )


def check_linear(seq: int, dtype: torch.dtype, d: int = 64, **kind: bool) -> list[Check]:
    """Without decay, with one, normalised, and as Mamba-2 (groups, weights, skip); initial and last states
    with gradients."""
    from kernels.triton.gated_linear_attention import gated_linear_attention

    long = seq > 10_000
    batch, heads = (1, 2) if long else (2, 4)
    ssd, normalise = kind.get("ssd", False), kind.get("normalise", False)
    groups = 1 if ssd else heads
    q, k = (torch.randn(batch, seq, groups, d, device="cuda") * d**-0.25 for _ in range(2))
    q, k = (q.abs() + 0.1, k.abs() + 0.1) if normalise else (q, k)
    decay = -torch.rand(batch, seq, heads, device="cuda") * 0.2
    if kind.get("extreme"):
        hard = torch.rand(decay.shape, device="cuda") < 0.1
        decay = torch.where(hard, torch.full_like(decay, -1e4), decay * 0.01)
    inputs = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": torch.randn(batch, seq, heads, d, device="cuda", dtype=dtype),
        "g": decay if kind.get("decay") or ssd else None,
        "w": torch.rand(batch, seq, heads, device="cuda") if ssd else None,
        "d": torch.randn(heads, device="cuda") if ssd else None,
        "s": torch.randn(batch, heads, d, d, device="cuda") if kind.get("state") else None,
        "z": torch.rand(batch, heads, d, device="cuda") if kind.get("state") and normalise else None,
    }
    states = ("s", "z") if normalise else ("s",)

    def operator(x: Tensors) -> dict[str, Tensor]:
        o, s, z = gated_linear_attention(
            x["q"], x["k"], x["v"], log_decay=x["g"], k_weight=x["w"], skip=x["d"], s=x["s"], z=x["z"],
            normalise=normalise
        )
        return {"o": o, "last_s": s} | ({"last_z": z} if normalise else {})

    def step(x: Tensors, state: tuple) -> tuple:
        start = None if state[0] is None else linear.LinearState(s=state[0],
            z=state[1] if normalise else None)
        o, end = linear.parallel(
            x["q"], x["k"], x["v"], log_decay=x["g"], k_weight=x["w"], normalise=normalise, state=start
        )
        o = o if x["d"] is None else o + x["d"][:, None] * x["v"]
        return o, (end.s, end.z) if normalise else (end.s,)

    reference = chunked_reference(step, states, ("q", "k", "v", "g", "w"))
    return compare(f"linear T={seq} d={d} {_name(dtype)} {_kinds(kind)}", operator, reference, inputs, dtype,
        {"dg": 4.0})


def check_scan(seq: int, dtype: torch.dtype, d_state: int = 16, **kind: bool) -> list[Check]:
    """With D, gate and initial state, or plain; extreme: steps and rates up to e^6."""
    from kernels import selective_scan as scan
    from kernels.triton.selective_scan import selective_scan

    batch, channels = (1, 16) if seq > 10_000 else (2, 70)
    full, hard = kind.get("full", False), 30.0 if kind.get("extreme") else 0.3
    inputs = {
        "u": torch.randn(batch, seq, channels, device="cuda", dtype=dtype),
        "dt": (torch.rand(batch, seq, channels, device="cuda") * hard).to(dtype),
        "a": torch.randn(channels, d_state, device="cuda") + (3.0 if kind.get("extreme") else 0.0),
        "b": torch.randn(batch, seq, d_state, device="cuda", dtype=dtype),
        "c": torch.randn(batch, seq, d_state, device="cuda", dtype=dtype),
        "d": torch.randn(channels, device="cuda") if full else None,
        "z": torch.randn(batch, seq, channels, device="cuda", dtype=dtype) if full else None,
        "h": torch.randn(batch, channels, d_state, device="cuda") if full else None,
    }

    def operator(x: Tensors) -> dict[str, Tensor]:
        y, last = selective_scan(x["u"], x["dt"], x["a"], x["b"], x["c"], D=x["d"], z=x["z"], state=x["h"])
        return {"o": y, "last_h": last}

    def step(x: Tensors, state: tuple) -> tuple:
        y, last = scan.chunked(x["u"], x["dt"], x["a"], x["b"], x["c"], D=x["d"], z=x["z"], state=state[0])
        return y, (last,)

    reference = chunked_reference(step, ("h",), ("u", "dt", "b", "c", "z"), 100_000)
    return compare(f"scan T={seq} n={d_state} {_name(dtype)} {_kinds(kind)}", operator, reference, inputs,
        dtype)


def check_conv(seq: int, dtype: torch.dtype, width: int = 4, **kind: bool) -> list[Check]:
    """With bias, SiLU and state, or without."""
    from kernels import causal_conv as conv
    from kernels.triton.causal_conv import causal_conv

    batch, channels = (1, 16) if seq > 10_000 else (2, 150)
    full = kind.get("full", False)
    inputs = {
        "x": torch.randn(batch, seq, channels, device="cuda", dtype=dtype),
        "weight": torch.randn(channels, width, device="cuda", dtype=dtype),
        "bias": torch.randn(channels, device="cuda", dtype=dtype) if full else None,
        "state": torch.randn(batch, width - 1, channels, device="cuda", dtype=dtype) if full else None,
    }

    def run(function: Callable) -> Callable:
        def call(x: Tensors) -> dict[str, Tensor]:
            y, last = function(x["x"], x["weight"], x["bias"], state=x["state"], silu=full)
            return {"o": y, "last": last}

        return call

    def reference(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = run(conv.chunked)(x)
        sum((outputs[n] * c).sum() for n, c in cotangents.items()).backward()
        return outputs | {f"d{n}": t.grad for n, t in x.items() if t is not None}

    return compare(f"conv T={seq} w={width} {_name(dtype)} {_kinds(kind)}", run(causal_conv), reference,
        inputs, dtype)


def check_decode(seq: int, dtype: torch.dtype, **kind: bool) -> list[Check]:
    """Steps one after the other against the whole: prefill and decode agree."""
    from kernels.triton import decode
    from kernels.triton.gated_linear_attention import gated_linear_attention
    from kernels.triton.selective_scan import selective_scan

    batch, heads, d = 2, 4, 64
    q, k, v = (torch.randn(batch, seq, heads, d, device="cuda", dtype=dtype).abs() for _ in range(3))
    g = -torch.rand(batch, seq, heads, device="cuda") * 0.2
    whole, s, z = gated_linear_attention(q, k, v, log_decay=g, normalise=True)
    state, outs = (None, None), []
    for t in range(seq):
        o, *state = decode.linear_step(
            q[:, t], k[:, t], v[:, t], log_decay=g[:, t], normalise=True, s=state[0], z=state[1]
        )
        outs.append(o)
    u, dt, gate = (torch.rand(batch, seq, 70, device="cuda", dtype=dtype) for _ in range(3))
    b, c = (torch.randn(batch, seq, 16, device="cuda", dtype=dtype) for _ in range(2))
    a, skip = torch.randn(70, 16, device="cuda"), torch.randn(70, device="cuda")
    y, last = selective_scan(u, dt, a, b, c, D=skip, z=gate)
    h, ys = None, []
    for t in range(seq):
        one, h = decode.scan_step(u[:, t], dt[:, t], a, b[:, t], c[:, t], D=skip, z=gate[:, t], state=h)
        ys.append(one)
    pairs = {"linear": (torch.stack(outs, 1), whole), "s": (state[0], s), "z": (state[1], z),
             "scan": (torch.stack(ys, 1), y), "h": (h, last)}  # fmt: skip
    case, bound = f"decode T={seq} {_name(dtype)} steps-against-whole", BOUNDS[dtype]
    return [Check(case=case, tensor=n, error=error(x, r.double()), bound=bound) for n, (x,
        r) in pairs.items()]


def check_edges(seq: int, dtype: torch.dtype, **kind: bool) -> list[Check]:
    """Matching sums against the materialised patterns."""
    from kernels import selective_scan as scan
    from kernels.triton import edges

    batch, heads, d = 2, 4, 64
    tokens = torch.randint(0, 50, (batch, seq), device="cuda")
    source = torch.cat([torch.full_like(tokens[:, :1], -1), tokens[:, :-1]], 1)
    match = (tokens[:, :, None] == source[:, None, :])[:, None]
    q, k = (torch.randn(batch, seq, heads, d, device="cuda", dtype=dtype) for _ in range(2))
    g = -torch.rand(batch, seq, heads, device="cuda") * 0.1
    dt = torch.rand(batch, seq, 20, device="cuda", dtype=dtype) * 0.2
    a = torch.randn(20, 16, device="cuda")
    b, c = (torch.randn(batch, seq, 16, device="cuda", dtype=dtype) for _ in range(2))
    wide = [x.double() for x in (q, k, g, dt, a, b, c)]
    pairs = {
        "softmax": (edges.softmax_matches(q, k, tokens, source), softmax.pattern(wide[0], wide[1])),
        "window": (edges.softmax_matches(q, k, tokens, source, window=99), softmax.pattern(wide[0], wide[1],
        window=99)),
        "linear": (edges.linear_matches(q, k, tokens, source), linear.pattern(wide[0], wide[1])),
        "decay": (edges.linear_matches(q, k, tokens, source, log_decay=g), linear.pattern(*wide[:2],
        log_decay=wide[2])),
        "scan": (edges.scan_matches(dt, a, b, c, tokens, source), scan.pattern(*wide[3:])),
    }
    case, bound = f"edges T={seq} {_name(dtype)} against-pattern", BOUNDS[dtype]
    return [
        Check(case=case, tensor=n, error=error(x, (pattern * match).sum(-1)), bound=bound)
        for n, (x, pattern) in pairs.items()
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kinds(kind: dict[str, bool]) -> str:
    return "+".join(n for n, on in kind.items() if on) or "plain"


def jobs(operators: tuple[str, ...]) -> list[tuple[str, tuple, dict[str, bool]]]:
    """All lengths, kinds, dtypes and widths as (function, arguments, kind)."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    found: list[tuple[str, tuple, dict[str, bool]]] = []
    if "softmax" in operators:
        for seq in LENGTHS:
            found.append(("check_softmax", (seq, bf16), {"window": seq == 200, "sink": seq in (65, 200)}))
            found.append(("check_softmax", (seq, f32), {"window": seq == 2049, "sink": seq == 7}))
        for d, dtype in itertools.product((16, 32, 80, 128, 256), (bf16, f16, f32)):
            found.append(("check_softmax", (200, dtype, d), {"tail": True}))
        found.append(("check_softmax", (2049, bf16), {"window": True, "sink": True}))
        found += [("check_softmax", (200, dtype), {"large": True}) for dtype in (bf16, f32)]
    if "linear" in operators:
        kinds = ({}, {"decay": True, "state": True}, {"normalise": True, "state": True}, {"ssd": True,
            "state": True})
        for seq, kind in itertools.product(LENGTHS, kinds):
            found.append(("check_linear", (seq, bf16), kind))
            if seq < 10_000:
                found.append(("check_linear", (seq, f32), kind))
        for d, kind in itertools.product((16, 32, 80, 128, 256), kinds[1:3]):
            found.append(("check_linear", (200, bf16, d), kind))
        found.append(("check_linear", (2049, f32, 128), kinds[1]))
        found.append(("check_linear", (200, f16), {"decay": True}))
        found += [("check_linear", (2049, t), {"decay": True, "extreme": True, "state": True}) for t in (bf16,
            f32)]
    if "scan" in operators:
        for seq in LENGTHS:
            found.append(("check_scan", (seq, bf16), {"full": True}))
            found.append(("check_scan", (seq, f32), {"full": seq != 65}))
        found += [("check_scan", (200, dtype, n), {"full": True}) for n in (4, 64, 100,
            256) for dtype in (bf16, f32)]
        found += [("check_scan", (2049, dtype), {"extreme": True}) for dtype in (bf16, f32)]
        found.append(("check_scan", (200, f16), {}))
    if "conv" in operators:
        for seq, dtype in itertools.product(LENGTHS, (bf16, f32)):
            found.append(("check_conv", (seq, dtype), {"full": True}))
        found += [("check_conv", (200, bf16, width), {"full": full}) for width in (1, 2, 3) for full in (True,
            False)]
    if "decode" in operators:
        found += [("check_decode", (70, dtype), {}) for dtype in (bf16, f32)]
    if "edges" in operators:
        found += [("check_edges", (seq, dtype), {}) for seq in (200, 777) for dtype in (bf16, f32)]
    return found


def run_job(job: tuple[str, tuple, dict[str, bool]]) -> list[Check]:
    """One job; a job that raises is a failed Check that names the error."""
    name, arguments, kind = job
    torch.manual_seed(0)
    try:
        return globals()[name](*arguments, **kind)
    except Exception as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())[:160]
        return [Check(case=f"{name} {arguments} {kind}", tensor=text, error=float("inf"), bound=1.0)]


def run_checks(operators: tuple[str, ...], workers: int = 14) -> Iterator[Check]:
    """Run all jobs over processes (most of the time is compilation)."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for found in pool.map(run_job, jobs(operators)):
            yield from found
