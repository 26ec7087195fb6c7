"""The cases of `kernels/jobs.py`: inputs of each operator, its kernels and its reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.benchmarks.kernels.checks import (
    DEVICE,
    Check,
    Tensors,
    chunked_reference,
    compare,
    softmax_reference,
)
from kernels import gated_linear_attention as linear


def _randn(strided: bool, batch: int, seq: int, heads: int, d: int, dtype: torch.dtype) -> Tensor:
    """[batch seq head d], in memory heads first with gaps between the rows if `strided`."""
    if not strided:
        return torch.randn(batch, seq, heads, d, device=DEVICE, dtype=dtype)
    return torch.randn(batch, heads, seq, 2 * d, device=DEVICE, dtype=dtype)[..., :d].transpose(1, 2)


def check_softmax(seq: int, dtype: torch.dtype, d: int = 64, **kind: bool) -> list[Check]:
    """GQA, with a window and a sink, or large logits; at 70,001 one head."""
    from kernels.triton.softmax_attention import softmax_attention

    long = seq > 10_000
    batch, heads, groups = (1, 1, 1) if long else (2, 4, 2)
    n_src = seq + 5 if kind.get("tail") else seq
    strided = kind.get("strided", False)
    gain = 30.0 if kind.get("large") else 1.0
    options = {"window": 100 if kind.get("window") else None}
    inputs = {
        "q": _randn(strided, batch, seq, heads, d, dtype).mul_(gain),
        "k": _randn(strided, batch, n_src, groups, d, dtype),
        "v": _randn(strided, batch, n_src, groups, d, dtype),
        "sink": torch.randn(heads, device=DEVICE) if kind.get("sink") else None,
    }
    return compare(
        f"softmax T={seq} d={d} {_name(dtype)} {_kinds(kind)}",
        lambda x: {"o": softmax_attention(x["q"], x["k"], x["v"], sink=x["sink"], **options)[0]},
        softmax_reference(options),
        inputs,
        dtype,
        {"dq": 20.0, "dk": 20.0} if kind.get("large") else None,
    )


def check_linear(
    seq: int, dtype: torch.dtype, d: int = 64, d_v: int | None = None, **kind: bool
) -> list[Check]:
    """Without decay, with one, normalised, and as Mamba-2 (groups, weights, skip); initial and last states
    with gradients. Values are as wide as keys unless `d_v` says otherwise."""
    from kernels.triton.gated_linear_attention import gated_linear_attention

    long = seq > 10_000
    d_v = d_v or d
    batch, heads = (1, 2) if long else (2, 4)
    ssd, normalise = kind.get("ssd", False), kind.get("normalise", False)
    groups = 1 if ssd else heads
    q, k = (torch.randn(batch, seq, groups, d, device=DEVICE) * d**-0.25 for _ in range(2))
    q, k = (q.abs() + 0.1, k.abs() + 0.1) if normalise else (q, k)
    decay = -torch.rand(batch, seq, heads, device=DEVICE) * 0.2
    if kind.get("extreme"):
        hard = torch.rand(decay.shape, device=DEVICE) < 0.1
        decay = torch.where(hard, torch.full_like(decay, -1e4), decay * 0.01)
    inputs = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": _randn(kind.get("strided", False), batch, seq, heads, d_v, dtype),
        "g": decay if kind.get("decay") or ssd else None,
        "w": torch.rand(batch, seq, heads, device=DEVICE) if ssd else None,
        "d": torch.randn(heads, device=DEVICE) if ssd else None,
        "s": torch.randn(batch, heads, d, d_v, device=DEVICE) if kind.get("state") else None,
        "z": torch.rand(batch, heads, d, device=DEVICE) if kind.get("state") and normalise else None,
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
    width = d if d_v == d else f"{d}x{d_v}"
    return compare(f"linear T={seq} d={width} {_name(dtype)} {_kinds(kind)}", operator, reference, inputs,
        dtype, {"dg": 4.0})


def check_scan(seq: int, dtype: torch.dtype, d_state: int = 16, **kind: bool) -> list[Check]:
    """With D, gate and initial state, or plain; extreme: steps and rates up to e^6."""
    from kernels import selective_scan as scan
    from kernels.triton.selective_scan import selective_scan

    batch, channels = (1, 16) if seq > 10_000 else (2, 70)
    full, hard = kind.get("full", False), 30.0 if kind.get("extreme") else 0.3
    inputs = {
        "u": torch.randn(batch, seq, channels, device=DEVICE, dtype=dtype),
        "dt": (torch.rand(batch, seq, channels, device=DEVICE) * hard).to(dtype),
        "a": torch.randn(channels, d_state, device=DEVICE) + (3.0 if kind.get("extreme") else 0.0),
        "b": torch.randn(batch, seq, d_state, device=DEVICE, dtype=dtype),
        "c": torch.randn(batch, seq, d_state, device=DEVICE, dtype=dtype),
        "d": torch.randn(channels, device=DEVICE) if full else None,
        "z": torch.randn(batch, seq, channels, device=DEVICE, dtype=dtype) if full else None,
        "h": torch.randn(batch, channels, d_state, device=DEVICE) if full else None,
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
        "x": torch.randn(batch, seq, channels, device=DEVICE, dtype=dtype),
        "weight": torch.randn(channels, width, device=DEVICE, dtype=dtype),
        "bias": torch.randn(channels, device=DEVICE, dtype=dtype) if full else None,
        "state": torch.randn(batch, width - 1, channels, device=DEVICE, dtype=dtype) if full else None,
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


def check_split(seq: int, dtype: torch.dtype, **kind: bool) -> list[Check]:
    """Two parts with the state of the first handed on, against the whole in float64, with gradients."""
    from kernels.triton.causal_conv import causal_conv
    from kernels.triton.gated_linear_attention import gated_linear_attention
    from kernels.triton.selective_scan import selective_scan

    heads, d, channels, cut = 4, 64, 70, seq // 3 + 1
    inputs: Tensors = {
        **{n: torch.rand(2, seq, heads, d, device=DEVICE, dtype=dtype) * d**-0.25 for n in ("q", "k")},
        "v": torch.randn(2, seq, heads, d, device=DEVICE, dtype=dtype),
        "g": -torch.rand(2, seq, heads, device=DEVICE) * 0.2,
        **{n: torch.rand(2, seq, channels, device=DEVICE, dtype=dtype) for n in ("u", "dt")},
        **{n: torch.randn(2, seq, 16, device=DEVICE, dtype=dtype) for n in ("b", "c")},
    }
    a, weight = torch.randn(channels, 16, device=DEVICE), torch.randn(channels, 4, device=DEVICE, dtype=dtype)

    def operator(x: Tensors) -> dict[str, Tensor]:
        s = z = h = stored = None
        outs = []
        for at in (slice(0, cut), slice(cut, None)):
            y, stored = causal_conv(x["u"][:, at], weight, state=stored, silu=True)
            scanned, h = selective_scan(y, x["dt"][:, at], a, x["b"][:, at], x["c"][:, at], state=h)
            o, s, z = gated_linear_attention(
                x["q"][:, at], x["k"][:, at], x["v"][:, at], log_decay=x["g"][:, at], normalise=True, s=s, z=z
            )
            outs.append((o, scanned))
        o, y = (torch.cat(pieces, 1) for pieces in zip(*outs, strict=True))
        return {"o": o, "y": y, "h": h, "s": s}

    def reference(x: Tensors, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
        from kernels import causal_conv as conv
        from kernels import selective_scan as scan

        u, _ = conv.chunked(x["u"], weight.double(), silu=True)
        y, h = scan.chunked(u, x["dt"], a.double(), x["b"], x["c"])
        o, end = linear.chunked(x["q"], x["k"], x["v"], log_decay=x["g"], normalise=True)
        outputs = {"o": o, "y": y, "h": h, "s": end.s}
        sum((outputs[n] * c).sum() for n, c in cotangents.items()).backward()
        return outputs | {f"d{n}": t.grad for n, t in x.items()}

    return compare(f"split T={seq} {_name(dtype)} {_kinds(kind)}", operator, reference, inputs, dtype,
        {"dg": 4.0})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kinds(kind: dict[str, bool]) -> str:
    return "+".join(n for n, on in kind.items() if on) or "plain"
