"""Cases of `kernels/jobs.py` that only run forward: one-token steps, and matching sums."""

import torch

from experiments.benchmarks.kernels.cases import _kinds, _name
from experiments.benchmarks.kernels.checks import BOUNDS, DEVICE, Check, error
from kernels import gated_linear_attention as linear
from kernels import softmax_attention as softmax


def check_decode(seq: int, dtype: torch.dtype, **kind: bool) -> list[Check]:
    """Steps one after the other against the whole: prefill and decode agree."""
    from kernels.triton import decode
    from kernels.triton.causal_conv import causal_conv
    from kernels.triton.gated_linear_attention import gated_linear_attention
    from kernels.triton.selective_scan import selective_scan

    batch, heads, d = 2, 4, 64
    q, k, v = (torch.randn(batch, seq, heads, d, device=DEVICE, dtype=dtype).abs() for _ in range(3))
    g = -torch.rand(batch, seq, heads, device=DEVICE) * 0.2
    whole, s, z = gated_linear_attention(q, k, v, log_decay=g, normalise=True)
    state, outs = (None, None), []
    for t in range(seq):
        o, *state = decode.linear_step(
            q[:, t], k[:, t], v[:, t], log_decay=g[:, t], normalise=True, s=state[0], z=state[1]
        )
        outs.append(o)
    u, dt, gate = (torch.rand(batch, seq, 70, device=DEVICE, dtype=dtype) for _ in range(3))
    b, c = (torch.randn(batch, seq, 16, device=DEVICE, dtype=dtype) for _ in range(2))
    a, skip = torch.randn(70, 16, device=DEVICE), torch.randn(70, device=DEVICE)
    y, last = selective_scan(u, dt, a, b, c, D=skip, z=gate)
    h, ys = None, []
    for t in range(seq):
        one, h = decode.scan_step(u[:, t], dt[:, t], a, b[:, t], c[:, t], D=skip, z=gate[:, t], state=h)
        ys.append(one)
    pairs = {"linear": (torch.stack(outs, 1), whole), "s": (state[0], s), "z": (state[1], z),
             "scan": (torch.stack(ys, 1), y), "h": (h, last)}  # fmt: skip
    x, weight = torch.randn(batch, seq, 70, device=DEVICE, dtype=dtype), torch.randn(70, 4, device=DEVICE)
    weight, zero = weight.to(dtype), torch.zeros(batch, 3, 70, device=DEVICE, dtype=dtype)
    filtered, kept = causal_conv(x, weight, state=zero, silu=True)
    stored, ys = zero, []
    for t in range(seq):
        one, stored = decode.conv_step(x[:, t], weight, state=stored, silu=True)
        ys.append(one)
    pairs |= {"conv": (torch.stack(ys, 1), filtered), "stored": (stored, kept)}
    case, bound = f"decode T={seq} {_name(dtype)} steps-against-whole", BOUNDS[dtype]
    return [Check(case=case, tensor=n, error=error(x, r.double()), bound=bound) for n, (x,
        r) in pairs.items()]


def check_edges(seq: int, dtype: torch.dtype, **kind: bool) -> list[Check]:
    """Matching sums against the materialised patterns."""
    from kernels import selective_scan as scan
    from kernels.triton import edges

    batch, heads, d = 2, 4, 64
    tokens = torch.randint(0, 50, (batch, seq), device=DEVICE)
    source = torch.cat([torch.full_like(tokens[:, :1], -1), tokens[:, :-1]], 1)
    match = (tokens[:, :, None] == source[:, None, :])[:, None]
    q, k = (torch.randn(batch, seq, heads, d, device=DEVICE, dtype=dtype) for _ in range(2))
    g = -torch.rand(batch, seq, heads, device=DEVICE) * 0.1
    dt = torch.rand(batch, seq, 20, device=DEVICE, dtype=dtype) * 0.2
    a = torch.randn(20, 16, device=DEVICE)
    b, c = (torch.randn(batch, seq, 16, device=DEVICE, dtype=dtype) for _ in range(2))
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



def check_softmax_step(seq: int, dtype: torch.dtype, d: int = 64, **kind: bool) -> list[Check]:
    """The last position against the readable form: long caches, groups, a window, a sink."""
    from kernels.triton.decode_attention import softmax_step

    batch, heads, groups = 2, 12, 1 if kind.get("one_group") else 4
    q = torch.randn(batch, 1, heads, d, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(batch, seq, groups, d, device=DEVICE, dtype=dtype) for _ in range(2))
    sink = torch.randn(heads, device=DEVICE) if kind.get("sink") else None
    window = 100 if kind.get("window") else None
    found = softmax_step(q[:, 0], k, v, window=window, sink=sink)
    again = softmax_step(q[:, 0], k, v, window=window, sink=sink)
    wide = [x.double() for x in (q, k, v)]
    expected = softmax.parallel(*wide, window=window, sink=None if sink is None else sink.double())[:, 0]
    case = f"softmax-step T={seq} d={d} {_name(dtype)} {_kinds(kind)}"
    differ = float(not torch.equal(found, again))
    return [Check(case=case, tensor="o", error=error(found, expected), bound=BOUNDS[dtype]),
            Check(case=case, tensor="repeated", error=differ, bound=0.0)]  # fmt: skip
