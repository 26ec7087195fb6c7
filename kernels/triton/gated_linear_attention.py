"""Linear attention on a GPU, without decay or with a scalar one (retention, Mamba-2's SSD): forward and
backward.

Source: Yang et al. 2023, arXiv:2312.06635 (chunked form); Dao and Gu 2024, arXiv:2405.21060. Differs:
segments of several
chunks keep the state in registers, the normaliser is part of the kernel, initial and last states have
gradients.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.triton.launch import check_dtype, check_width, rows
from kernels.triton.linear_attention_launch import (
    decay_gradient,
    decays,
    gradients,
    group_sums,
    outputs,
    plan,
    states,
)
from kernels.triton.ops import differentiable, differentiable_once, operators, register

OPERATOR = "gated_linear_attention"


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    skip: Tensor | None = None,
    s: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o_t = scale q_t^T S_t, S_t = exp(log_decay_t) S_{t-1} + w_t k_t v_t^T; options as in the torch forms.

    Args:
        q, k: [batch seq group d_k], each with a number of groups that divides the heads; v: [batch seq head
        d_v].
        log_decay: None, [head] or [batch seq head], natural log, at most 0; below -60 (half precision) or
        -1e5 (float32)
            it counts as that.
        k_weight: None or [batch seq head].
        skip: None or [head]: adds skip v (Mamba-2's D). Not with `normalise`.
        s, z: Initial state, [batch head d_k d_v] and [batch head d_k], float32.

    Returns:
        (o [batch seq head d_v], last s, last z or None), all differentiable.
    """
    check_dtype(OPERATOR, v)
    check_width(OPERATOR, "d_k", q.shape[-1])
    check_width(OPERATOR, "d_v", v.shape[-1])
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(v.shape[:3])
    # A scale of zero would lose the states that are kept divided by it.
    scale = scale or 1e-30
    s = None if s is None else s.float()
    z = None if z is None or not normalise else z.float()
    o, s, z, *_ = operators.linear_attention(
        q.to(v.dtype), k.to(v.dtype), v, log_decay, k_weight, skip, s, z, scale, normalise, eps
    )
    return o, s, z if normalise else None


def _views(parts: Tensor, d_k: int, d_v: int, normalise: bool) -> tuple[Tensor, Tensor | None]:
    """The entry states s and z of segments, kept side by side."""
    return parts[..., : d_k * d_v], parts[..., d_k * d_v :] if normalise else None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, d: Tensor | None, s: Tensor | None,
    z: Tensor | None, scale: float, normalise: bool, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(o, last s, last z, 1 / denominator, entry states of the segments, sums of decays); what does not apply
    is empty."""
    q, k, v = rows(q), rows(k), rows(v)
    s, z = (None if x is None else x.contiguous() for x in (s, z))
    batch, seq, heads, d_v = v.shape
    d_k = q.shape[3]
    o = torch.empty(batch, seq, heads, d_v, dtype=v.dtype, device=v.device)
    none = torch.empty(0, dtype=torch.float32, device=v.device)
    den = none.new_empty(batch, seq, heads) if normalise else None
    sums = None if g is None else decays(g, d_k, d_v, v)
    cut = plan(d_k, d_v, heads, v)
    parts = None
    if cut[0] > 1:
        parts, last, last_z = states(k, v, w, sums, s, z, cut, 1.0, False, normalise, heads)
        s, z = _views(parts, d_k, d_v, normalise)
        save = (None, None)
    else:
        last = none.new_empty(batch, heads, d_k, d_v)
        last_z = none.new_empty(batch, heads, d_k) if normalise else None
        save = (last, last_z)
        if normalise and s is not None and z is None:
            z = none.new_zeros(batch, heads, d_k)
    outputs(q, k, v, w, sums, d, s, z, *save, o, den, cut, scale, eps)
    return o, last, *(none.new_empty(0) if x is None else x for x in (last_z, den, parts, sums))


def _backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    w: Tensor | None, d: Tensor | None, s: Tensor | None, z: Tensor | None, o: Tensor, last: Tensor,
    last_z: Tensor, den: Tensor, parts: Tensor, sums: Tensor, scale: float, normalise: bool, *,
    into: tuple[Tensor | None, Tensor | None, Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (q, k, v, g, w, d, s, z); what does not apply is empty. Those of q, k and v are written
    `into` slices of one wider tensor, where they are given."""
    q, k, v, do = rows(q), rows(k), rows(v), rows(do)
    s, z, ds, dz = (None if x is None else x.contiguous() for x in (s, z, ds, dz))
    batch, seq, heads, d_v = v.shape
    d_k = q.shape[3]
    none = torch.empty(0, dtype=torch.float32, device=v.device)
    inverse = den if normalise else None
    cut = plan(d_k, d_v, heads, v)
    if cut[0] > 1:
        s, z = _views(parts, d_k, d_v, normalise)
    elif normalise and s is not None and z is None:
        z = none.new_zeros(batch, heads, d_k)
    sums = None if g is None else sums
    ds0 = none.new_empty(batch, heads, d_k, d_v)
    dz0 = none.new_empty(batch, heads, d_k) if normalise else None
    save, delta = (ds0, dz0), None
    if cut[0] > 1:
        delta = none.new_empty(batch, seq, heads) if normalise else None
        sent, ds0, dz0 = states(
            q, do, inverse, sums, ds, dz, cut, scale, True, normalise, heads, o if normalise else None, delta
        )
        ds, dz = _views(sent, d_k, d_v, normalise)
        save = (None, None)
    elif normalise and (ds is None) != (dz is None):
        ds = none.new_zeros(batch, heads, d_k, d_v) if ds is None else ds
        dz = none.new_zeros(batch, heads, d_k) if dz is None else dz
    dq, dk = _gradient_of(q, heads), _gradient_of(k, heads)
    dv = _gradient_of(v, heads) if into is None else into[2]
    dots, dd = gradients(
        q, k, v, do, o, w, inverse, sums, d, delta, s, z, ds, dz, *save, dq, dk, dv, cut, scale
    )
    dg = None
    if g is not None:
        dg = torch.empty(batch, seq, heads, dtype=g.dtype, device=g.device)
        decay_gradient(dg, dots, parts, last, ds, last_z if normalise else None, dz, cut, scale)
    dw = None if w is None else (dots[2, 0] if dots.shape[1] == 1 else dots[2].sum(0)).to(w.dtype)
    dq, dk = _grouped(dq, dk, q, k, into)
    dd = None if dd is None else dd.sum((0, 2)).to(d.dtype)
    found = (dq, dk, dv, dg, dw, dd, ds0, dz0)
    return tuple(none.new_empty(0) if x is None else x for x in found)


def _gradient_of(x: Tensor, heads: int) -> Tensor:
    """Empty gradient of queries or keys for every head, float32 where heads share them."""
    batch, seq, groups, d = x.shape
    dtype = x.dtype if groups == heads else torch.float32
    return torch.empty(batch, seq, heads, d, dtype=dtype, device=x.device)


def _grouped(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, into: tuple[Tensor | None, ...] | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of queries and keys from those of every head, where they are wanted."""
    found, shared = [], []
    for n, (dx, x) in enumerate(((dq, q), (dk, k))):
        wanted = None if into is None else into[n]
        if dx.shape[2] != x.shape[2]:
            wanted = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted is None else wanted
            shared.append((dx, wanted))
        else:
            wanted = dx if wanted is None else wanted.copy_(dx)
        found.append(wanted)
    if shared:
        group_sums([dx for dx, _ in shared], [wanted for _, wanted in shared])
    return found[0], found[1]


def _fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, d: Tensor | None, s: Tensor | None,
    z: Tensor | None, scale: float, normalise: bool, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, seq, heads, d_v = v.shape
    d_k = q.shape[3]
    n = plan(d_k, d_v, heads, v)[0]
    exact = 2 if v.dtype == torch.float32 else 1

    def new(*shape: int) -> Tensor:
        return v.new_empty(shape, dtype=torch.float32)

    return (
        v.new_empty(v.shape),
        new(batch, heads, d_k, d_v),
        new(batch, heads, d_k) if normalise else new(0),
        new(batch, seq, heads) if normalise else new(0),
        new(batch, heads, n, d_k * (d_v + normalise)) if n > 1 else new(0),
        new(0) if g is None else new(exact, batch, heads, seq),
    )


def _fake_backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    w: Tensor | None, d: Tensor | None, s: Tensor | None, z: Tensor | None, o: Tensor, last: Tensor,
    last_z: Tensor, den: Tensor, parts: Tensor, sums: Tensor, scale: float, normalise: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    optional = (last.new_empty(0) if x is None else x.new_empty(x.shape) for x in (g, w, d))
    dz0 = last.new_empty(last.shape[:3]) if normalise else last.new_empty(0)
    always = (x.new_empty(x.shape) for x in (q, k, v))
    return *always, *optional, last.new_empty(last.shape), dz0


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale, ctx.normalise, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, do: Tensor | None, ds: Tensor | None, dz: Tensor | None, *unused: Any) -> tuple:
    *inputs, o, last, last_z, den, parts, sums = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dz = dz if ctx.normalise else None
    found = operators.linear_attention_backward(
        do, ds, dz, *inputs, o, last, last_z, den, parts, sums, ctx.scale, ctx.normalise
    )
    return *(None if x is None else dx for x, dx in zip(inputs, found, strict=True)), None, None, None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? w, Tensor? d, Tensor? s, Tensor? z"
register(
    f"linear_attention({_INPUTS}, float scale, bool normalise, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
register(
    f"linear_attention_backward(Tensor do, Tensor? ds, Tensor? dz, {_INPUTS}, Tensor o, Tensor last, "
    "Tensor last_z, "
    "Tensor den, Tensor parts, Tensor sums, float scale, bool normalise) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiable("linear_attention", _setup, _gradient)
differentiable_once("linear_attention_backward")
