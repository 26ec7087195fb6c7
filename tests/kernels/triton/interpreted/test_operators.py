"""Every kernel in Triton's interpreter, float32 at tiny shapes, against the readable forms in float64.

Run by ../test_interpreter.py in a process of its own: the interpreter is chosen when a kernel is defined.
"""

import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels import causal_conv as conv
from kernels import gated_linear_attention as linear
from kernels import selective_scan as scan
from kernels import softmax_attention as softmax
from kernels.triton import causal_conv as fused_conv
from kernels.triton import decode, edges, linear_attention_launch, linear_matches
from kernels.triton import gated_linear_attention as fused_linear
from kernels.triton import selective_scan as fused_scan
from kernels.triton import softmax_attention as fused_softmax

BOUND = 5e-6


def pull(function, inputs: dict, wide: bool) -> dict:
    """Named outputs and gradients of one operator; the cotangents are the same for both precisions, not
    contiguous."""
    torch.manual_seed(1)
    dtype = torch.float64 if wide else torch.float32
    inputs = {n: None if x is None else x.detach().to(dtype).requires_grad_() for n, x in inputs.items()}
    outputs = function(**inputs)
    total = 0.0
    for out in outputs.values():
        cotangent = torch.randn(*out.shape[:-1], 2 * out.shape[-1])[..., ::2]
        total = total + (out * cotangent.to(dtype)).sum()
    present = {n: x for n, x in inputs.items() if x is not None}
    gradients = torch.autograd.grad(total, list(present.values()))
    return outputs | {f"d{n}": g for n, g in zip(present, gradients, strict=True)}


def agree(ours, reference, inputs: dict, bound: float = BOUND) -> None:
    found, expected = pull(ours, inputs, False), pull(reference, inputs, True)
    for name, x in found.items():
        scale = max(expected[name].norm().item(), 0.1 * expected[name].numel() ** 0.5)
        gap = (x.double() - expected[name]).norm().item() / scale
        assert gap < bound, f"{name}: {gap:.1e}"


@pytest.mark.parametrize(
    ("n_dest", "n_src", "heads", "groups", "d_v", "window", "has_sink"),
    [(1, 1, 1, 1, 16, None, False), (7, 7, 2, 1, 16, None, True), (70, 70, 2, 2, 24, None, False),
     (40, 65, 4, 2, 16, 9, True)],
)  # fmt: skip
def test_softmax(n_dest, n_src, heads, groups, d_v, window, has_sink):
    torch.manual_seed(0)
    inputs = {
        "q": torch.randn(2, n_dest, heads, 12),
        "k": torch.randn(2, n_src, groups, 12),
        "v": torch.randn(2, n_src, groups, d_v),
        "sink": torch.randn(heads) if has_sink else None,
    }

    def ours(q, k, v, sink):
        o, lse = fused_softmax.softmax_attention(q, k, v, window=window, sink=sink)
        return {"o": o, "lse": lse}

    def reference(q, k, v, sink):
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(heads // groups, 2)) / 12**0.5
        i = torch.arange(n_src - n_dest, n_src)[:, None]
        j = torch.arange(n_src)[None, :]
        hidden = (j > i) | (j <= i - (window or n_src + 1))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[None, :, None, None].expand(2, heads, n_dest, 1)], -1)
        return {"o": softmax.parallel(q, k, v, window=window, sink=sink), "lse": scores.logsumexp(-1)}

    agree(ours, reference, inputs)


@pytest.mark.parametrize("processors", [1, 40], ids=["whole", "segments"])
@pytest.mark.parametrize("kind", ["plain", "ssd", "normalised", "extreme", "per_head"])
def test_linear(kind, processors, monkeypatch):
    monkeypatch.setattr(linear_attention_launch, "processors", lambda device: processors)
    torch.manual_seed(0)
    heads, seq, normalise = 2, 7 if kind == "plain" else 130, kind == "normalised"
    decay = -torch.rand(2, seq, heads) * 0.3
    inputs = {
        "q": torch.randn(2, seq, 1 if kind == "ssd" else heads, 16),
        "k": torch.randn(2, seq, 1 if kind == "ssd" else heads, 16),
        "v": torch.randn(2, seq, heads, 24),
        "g": None if kind == "plain" else decay,
        "w": torch.rand(2, seq, heads) if kind in ("ssd", "normalised") else None,
        "skip": torch.randn(heads) if kind == "ssd" else None,
        "s": None if kind == "plain" else torch.randn(2, heads, 16, 24),
        "z": torch.rand(2, heads, 16) if normalise else None,
    }
    if normalise:
        inputs |= {n: inputs[n].abs() + 0.1 for n in ("q", "k")}
    if kind == "extreme":
        inputs["g"] = torch.where(torch.rand(decay.shape) < 0.2, torch.full_like(decay, -1e4), decay * 0.01)
    if kind == "per_head":
        inputs["g"] = -torch.rand(heads)

    def ours(q, k, v, g, w, skip, s, z):
        o, s, z = fused_linear.gated_linear_attention(
            q, k, v, log_decay=g, k_weight=w, scale=0.7, normalise=normalise, eps=0.1, skip=skip, s=s, z=z
        )
        return {"o": o, "last_s": s} | ({"last_z": z} if normalise else {})

    def reference(q, k, v, g, w, skip, s, z):
        state = None if s is None else linear.LinearState(s=s, z=z)
        o, end = linear.parallel(
            q, k, v, log_decay=g, k_weight=w, scale=0.7, normalise=normalise, eps=0.1, state=state
        )
        o = o if skip is None else o + skip[:, None] * v
        return {"o": o, "last_s": end.s} | ({"last_z": end.z} if normalise else {})

    agree(ours, reference, inputs, 3e-5 if kind == "per_head" else BOUND)


@pytest.mark.parametrize(
    ("seq", "channels", "d_state", "processors"),
    [(97, 36, 5, 1), (97, 36, 5, 40), (6, 5, 20, 1), (1, 3, 2, 1)], ids=["whole", "segments", "wide", "one"],
)  # fmt: skip
@pytest.mark.parametrize("full", [True, False])
def test_scan(full, seq, channels, d_state, processors, monkeypatch):
    """Lengths that are no whole blocks, channels that fill no warp, more states than one tile holds."""
    monkeypatch.setattr(fused_scan, "processors", lambda device: processors)
    torch.manual_seed(0)
    batch = 2 if full else 1
    inputs = {
        "u": torch.randn(batch, seq, channels),
        "dt": torch.rand(batch, seq, channels) * (1 if full else 30),
        "a": torch.randn(channels, d_state) + (0 if full else 3),
        "b": torch.randn(batch, seq, d_state),
        "c": torch.randn(batch, seq, d_state),
        "d": torch.randn(channels) if full else None,
        "z": torch.randn(batch, seq, channels) if full else None,
        "h": torch.randn(batch, channels, d_state) if full else None,
    }

    def run(function):
        def call(u, dt, a, b, c, d, z, h):
            y, last = function(u, dt, a, b, c, D=d, z=z, state=h)
            return {"y": y, "last": last}

        return call

    agree(run(fused_scan.selective_scan), run(scan.parallel), inputs)


@pytest.mark.parametrize("seq", [1, 7, 70])
@pytest.mark.parametrize(("width", "full"), [(4, True), (4, False), (3, True), (2, True), (1, False)])
def test_conv(seq, width, full):
    torch.manual_seed(0)
    inputs = {
        "x": torch.randn(2, seq, 20),
        "weight": torch.randn(20, width),
        "bias": torch.randn(20) if full else None,
        "state": torch.randn(2, width - 1, 20) if full else None,
    }

    def run(function):
        def call(x, weight, bias, state):
            y, last = function(x, weight, bias, state=state, silu=full)
            return {"y": y, "last": last} if full else {"y": y}

        return call

    agree(run(fused_conv.causal_conv), run(conv.parallel), inputs)


def test_steps_against_the_whole():
    torch.manual_seed(0)
    q, k, v = (torch.rand(2, 5, 4, 16) for _ in range(3))
    g, w = -torch.rand(2, 5, 4), torch.rand(2, 5, 4)
    o, s, z = fused_linear.gated_linear_attention(q, k, v, log_decay=g, k_weight=w, normalise=True)
    at = None, None
    for t in range(5):
        one, *at = decode.linear_step(
            q[:, t], k[:, t], v[:, t], log_decay=g[:, t], k_weight=w[:, t], normalise=True, s=at[0], z=at[1]
        )
        torch.testing.assert_close(one, o[:, t], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(at[0], s, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(at[1], z, atol=1e-5, rtol=1e-5)
    u, dt, gate = (torch.rand(2, 5, 20) for _ in range(3))
    a, b, c, skip = torch.randn(20, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(20)
    y, last = fused_scan.selective_scan(u, dt, a, b, c, D=skip, z=gate)
    h = None
    for t in range(5):
        one, h = decode.scan_step(u[:, t], dt[:, t], a, b[:, t], c[:, t], D=skip, z=gate[:, t], state=h)
        torch.testing.assert_close(one, y[:, t], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(h, last, atol=1e-5, rtol=1e-5)


def test_matching_sums_against_patterns():
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (2, 70))
    source = torch.cat([torch.full((2, 1), -1), tokens[:, :-1]], 1)
    match = (tokens[:, :, None] == source[:, None, :])[:, None]
    q, k, g, w = torch.randn(2, 70, 4, 16), torch.randn(2, 70, 2, 16), -torch.rand(2, 70, 4), torch.rand(2,
        70, 4)
    dt, a = torch.rand(2, 70, 12) * 0.3, torch.randn(12, 8)
    b, c = torch.randn(2, 70, 8), torch.randn(2, 70, 8)
    sink = torch.randn(4)
    wide = [x.double() for x in (q, k, g, w, dt, a, b, c, sink)]
    pairs = [
        (edges.softmax_matches(q, k, tokens, source), softmax.pattern(*wide[:2])),
        (edges.softmax_matches(q, k, tokens, source, window=9, sink=sink),
         softmax.pattern(*wide[:2], window=9, sink=wide[8])),
        (edges.linear_matches(q, k, tokens, source, log_decay=g, k_weight=w),
         linear.pattern(*wide[:2], log_decay=wide[2], k_weight=wide[3])),
        (edges.scan_matches(dt, a, b, c, tokens, source), scan.pattern(*wide[4:8])),
    ]  # fmt: skip
    for found, pattern in pairs:
        expected = (pattern * match).sum(-1)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["none", "mild", "strong"])
@pytest.mark.parametrize("n_label", [1, 3, 40])
def test_linear_matches_over_segments(n_label, kind, monkeypatch):
    """Labels that go on over many segments of the events, and those that end inside one."""
    monkeypatch.setattr(linear_matches, "processors", lambda device: 40)
    torch.manual_seed(0)
    labels = torch.randint(0, n_label, (2, 2, 150))
    labels[1, :, ::7] = -1
    dest, source = labels[0].clamp_min(0), labels[1]
    match = ((dest[:, :, None] == source[:, None, :]) & (source >= 0)[:, None, :])[:, None]
    q, k, w = torch.randn(2, 150, 4, 16), torch.randn(2, 150, 2, 16), torch.rand(2, 150, 4)
    g = None if kind == "none" else -torch.rand(2, 150, 4) * 0.1
    if kind == "strong":
        g = torch.where(torch.rand(g.shape) < 0.05, torch.full_like(g, -1e4), g)
    options = {"log_decay": g, "k_weight": None if kind == "none" else w}
    wide = {n: None if x is None else x.double() for n, x in options.items()}
    expected = (linear.pattern(q.double(), k.double(), **wide) * match).sum(-1) * 0.5
    found = linear_matches.linear_matches(q, k, dest, source, scale=0.5, **options)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("operator", ["softmax", "linear", "scan", "conv"])
def test_activation_checkpointing_changes_nothing(operator):
    torch.manual_seed(0)
    x = torch.randn(1, 9, 2, 16)
    call = {
        "softmax": lambda x: fused_softmax.softmax_attention(x, x, x)[0],
        "linear": lambda x: fused_linear.gated_linear_attention(x, x, x, log_decay=-x[..., 0].abs())[0],
        "scan": lambda x: fused_scan.selective_scan(
            x[:, :, 0], x[:, :, 1].abs(), x[0, 0, 0, :, None].expand(16, 4), x[:, :, 0, :4], x[:, :, 1, :4]
        )[0],
        "conv": lambda x: fused_conv.causal_conv(x[:, :, 0], x[0, :4, 1].T)[0],
    }[operator]
    found = []
    for function in (call, lambda x: checkpoint(call, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(function(leaf).square().sum(), leaf)[0])
    assert found[0].abs().max() > 0 and torch.equal(*found)


def test_second_backward_is_refused_by_name():
    q = torch.randn(1, 5, 1, 16, requires_grad=True)
    for operator, call in {
        "softmax_attention_backward": lambda: fused_softmax.softmax_attention(q, q, q)[0],
        "linear_attention_backward": lambda: fused_linear.gated_linear_attention(q, q, q)[0],
        "causal_conv_backward": lambda: fused_conv.causal_conv(q[:, :, 0], torch.ones(16, 4))[0],
    }.items():
        (gradient,) = torch.autograd.grad(call().square().sum(), q, create_graph=True)
        with pytest.raises(ValueError, match=f"{operator}: second derivatives"):
            gradient.sum().backward()


def test_explicit_backend_is_met_or_refused():
    q = torch.randn(1, 5, 2, 16)
    torch.testing.assert_close(
        softmax.softmax_attention(q, q, q, backend="triton"), softmax.softmax_attention(q, q, q), atol=1e-5,
        rtol=1e-5
    )
    o, state = linear.gated_linear_attention(q, q, q, backend="triton")
    expected, end = linear.gated_linear_attention(q, q, q)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.s, end.s, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="does not take dtype torch.float64"):
        softmax.softmax_attention(q.double(), q.double(), q.double(), backend="triton")
    with pytest.raises(ValueError, match="does not take form 'parallel'"):
        softmax.softmax_attention(q, q, q, form="parallel", backend="triton")
    with pytest.raises(ValueError, match="does not take a decay per key channel"):
        linear.gated_linear_attention(q, q, q, log_decay=-q.abs(), backend="triton")
    with pytest.raises(ValueError, match="does not take d_head 300"):
        wide = torch.randn(1, 2, 1, 300)
        softmax.softmax_attention(wide, wide, wide, backend="triton")
