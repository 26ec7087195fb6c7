"""Linear attention on a GPU, without decay or with a scalar one (retention, Mamba-2's SSD): forward and
backward.

Source: Yang et al. 2023, arXiv:2312.06635 (chunked form); Dao and Gu 2024, arXiv:2405.21060. Differs:
segments of several
chunks keep the state in registers, the normaliser is part of the kernel, initial and last states have
gradients.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.triton.config_table import config
from kernels.triton.launch import check_dtype, check_width, launch, power_of_two, rows
from kernels.triton.linear_attention_kernels import (
    _linear_decay_gradient_kernel,
    _linear_output_kernel,
    _linear_scan_kernel,
    _linear_state_kernel,
)
from kernels.triton.ops import differentiable, differentiable_once, register

OPERATOR = "gated_linear_attention"
NO_STRIDES = (0, 0, 0)


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
    o, s, z, *_ = torch.ops.beyond_softmax.linear_attention(
        q.to(v.dtype), k.to(v.dtype), v, log_decay, k_weight, skip, s, z, scale, normalise, eps
    )
    return o, s, z if normalise else None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _segments(lanes: int, seq: int, block: int, device: torch.device) -> tuple[int, int]:
    """(number of segments, their length): enough programs to fill the device, at least two chunks each."""
    wanted = max(1, 4 * _processors(device) // max(lanes, 1))
    if wanted < 4 or seq <= 2 * block:
        return 1, max(-(-seq // block), 1) * block
    chunks = max(2, -(-seq // block) // wanted)
    segment = chunks * block
    return -(-seq // segment), segment


def _block(part: str, d_b: int, d_c: int, q: Tensor) -> dict[str, int]:
    c = config(part, power_of_two(d_b), q.dtype, q.device)
    return {
        "BLOCK_T": c.block_m,
        "BLOCK_B": power_of_two(d_b),
        "BLOCK_C": min(power_of_two(d_c), c.block_n),
        "num_warps": c.warps,
        "num_stages": c.stages,
        "EXACT": q.dtype == torch.float32,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }


def _states(
    b: Tensor, c: Tensor, y: Tensor | None, w: Tensor | None, g: Tensor | None, first: Tensor | None,
    first_z: Tensor | None, n_segment: int, segment: int, scale: float, reverse: bool, normalise: bool,
    heads: int,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Entry states of every segment, and the one that leaves the last: (s parts, z parts, s last, z last)."""
    batch, seq, d_b, d_c = b.shape[0], b.shape[1], b.shape[3], c.shape[3]
    options = {"dtype": torch.float32, "device": b.device}
    s = torch.empty(batch, heads, n_segment, d_b, d_c, **options)
    z = torch.empty(batch, heads, n_segment, d_b, **options) if normalise else None
    total = torch.empty(batch, heads, n_segment, **options) if g is not None else None
    block = _block("linear_state", d_b, d_c, b)
    n_block = -(-d_c // block["BLOCK_C"])
    launch(
        _linear_state_kernel, (n_block * n_segment * batch * heads,), b, c, y, w, g, s, z, total,
        *b.stride()[:3], *c.stride()[:3], *(NO_STRIDES if w is None else w.stride()),
        *(NO_STRIDES if g is None else g.stride()), heads, seq, n_segment, segment,
        GROUP_B=heads // b.shape[2], GROUP_C=heads // c.shape[2], D_B=d_b, D_C=d_c, REVERSE=reverse,
        HAS_G=g is not None,
        HAS_W=w is not None, HAS_Z=normalise, HAS_Y=y is not None, **block,
    )  # fmt: skip
    last = torch.empty(batch, heads, d_b, d_c, **options)
    _scan(s, total, first, last, scale, reverse)
    last_z = None
    if normalise:
        last_z = torch.empty(batch, heads, d_b, **options)
        _scan(z, total, first_z, last_z, scale, reverse)
    return s, z, last, last_z


def _scan(s: Tensor, total: Tensor | None, first: Tensor | None, last: Tensor, gain: float,
    reverse: bool) -> None:
    batch, heads, n_segment = s.shape[:3]
    size = s[0, 0, 0].numel()
    block = 256 if size >= 256 else power_of_two(size)
    launch(
        _linear_scan_kernel, (-(-size // block) * batch * heads,), s, total, first, last, size, n_segment,
        gain,
        BLOCK=block, REVERSE=reverse, HAS_G=total is not None, HAS_FIRST=first is not None, num_warps=2,
    )  # fmt: skip


def _sum(
    call: str, a: Tensor, b: Tensor, c: Tensor, out: Tensor, *, t: Tensor | None = None,
    o: Tensor | None = None,
    w: Tensor | None = None, u: Tensor | None = None, g: Tensor | None = None, d: Tensor | None = None,
    delta: Tensor | None = None, s: Tensor | None = None, z: Tensor | None = None,
    s_last: Tensor | None = None,
    z_last: Tensor | None = None, den: Tensor | None = None, dd: Tensor | None = None, dot: bool = False,
    plan: tuple[int, int], scale: float = 1.0, eps: float = 0.0, normalise: bool = False,
) -> Tensor | None:  # fmt: skip
    """One row of the table in `linear_attention_kernels`; gives the row products <t_i, out_i> per column
    block if `dot`."""
    batch, seq, heads = out.shape[:3]
    n_segment, segment = plan
    d_b, d_c = b.shape[3], c.shape[3]
    transposed, reverse = call in ("dq", "dk"), call in ("dv", "dk")
    gain_first = 1 / scale if reverse and n_segment == 1 else 1.0
    block = _block("linear_output", d_b, d_c, a)
    n_block = -(-d_c // block["BLOCK_C"])
    dots = torch.empty(n_block, batch, seq, heads, dtype=torch.float32, device=a.device) if dot else None
    launch(
        _linear_output_kernel, (n_block * n_segment * batch * heads,),
        a, b, c, t, o, w, u, g, d, delta, s, z, s_last, z_last, out, den, dots, dd,
        *a.stride()[:3], *b.stride()[:3], *c.stride()[:3], *(NO_STRIDES if t is None else t.stride()[:3]),
        *(NO_STRIDES if w is None else w.stride()), *(NO_STRIDES if u is None else u.stride()),
        *(NO_STRIDES if g is None else g.stride()), *((1, d_b) if transposed else (d_c, 1)), heads, seq,
        n_segment, segment,
        batch * seq * heads, scale, gain_first, scale if reverse else 1.0, eps,
        GROUP_A=heads // a.shape[2], GROUP_B=heads // b.shape[2], GROUP_C=heads // c.shape[2],
        GROUP_T=1 if t is None else heads // t.shape[2], D_B=d_b, D_C=d_c, CALL=call, REVERSE=reverse,
        HAS_G=g is not None, HAS_W=w is not None, HAS_U=u is not None, NORMALISE=normalise,
        HAS_D=d is not None, HAS_DOT=dot,
        HAS_FIRST=s is not None, SAVE_LAST=s_last is not None or z_last is not None, **block,
    )  # fmt: skip
    return dots


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, d: Tensor | None, s: Tensor | None,
    z: Tensor | None, scale: float, normalise: bool, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(o, last s, last z, 1 / denominator, entry states s and z of the segments); what does not apply is
    empty."""
    q, k, v = rows(q), rows(k), rows(v)
    s, z = (None if x is None else x.contiguous() for x in (s, z))
    batch, seq, heads, d_v = v.shape
    d_k = q.shape[3]
    o = torch.empty(batch, seq, heads, d_v, dtype=v.dtype, device=v.device)
    none = torch.empty(0, dtype=torch.float32, device=v.device)
    den = none.new_empty(batch, seq, heads) if normalise else None
    block = _block("linear_output", d_k, d_v, q)
    plan = _segments(batch * heads * -(-d_v // block["BLOCK_C"]), seq, block["BLOCK_T"], v.device)
    parts = parts_z = None
    if plan[0] > 1:
        parts, parts_z, last, last_z = _states(k, v, None, w, g, s, z, *plan, 1.0, False, normalise, heads)
        save = (None, None)
    else:
        last = none.new_empty(batch, heads, d_k, d_v)
        last_z = none.new_empty(batch, heads, d_k) if normalise else None
        save = (last, last_z)
    if plan[0] == 1 and normalise and s is not None and z is None:
        z = none.new_zeros(batch, heads, d_k)
    _sum(
        "o", q, k, v, o, w=w, g=g, d=d, s=s if parts is None else parts, z=z if parts is None else parts_z,
        s_last=save[0], z_last=save[1], den=den, plan=plan, scale=scale, eps=eps, normalise=normalise,
    )  # fmt: skip
    return o, last, *(none.new_empty(0) if x is None else x for x in (last_z, den, parts, parts_z))


def _backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    w: Tensor | None,
    d: Tensor | None, s: Tensor | None, z: Tensor | None, o: Tensor, last: Tensor, last_z: Tensor,
    den: Tensor,
    parts: Tensor, parts_z: Tensor, scale: float, normalise: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (q, k, v, g, w, d, s, z); what does not apply is empty."""
    q, k, v, do = rows(q), rows(k), rows(v), rows(do)
    s, z, ds, dz = (None if x is None else x.contiguous() for x in (s, z, ds, dz))
    batch, seq, heads, d_v = v.shape
    d_k = q.shape[3]
    none = torch.empty(0, dtype=torch.float32, device=v.device)
    inverse = den if normalise else None
    block = _block("linear_output", d_k, d_v, q)
    n_segment = parts.shape[2] if parts.numel() else 1
    whole = max(-(-seq // block["BLOCK_T"]), 1) * block["BLOCK_T"]
    plan = (1, whole) if n_segment == 1 else _segments(batch * heads * -(-d_v // block["BLOCK_C"]), seq,
        block["BLOCK_T"], v.device)
    many = n_segment > 1
    first, first_z = (parts, parts_z) if many else (s, z)
    if normalise and s is not None and z is None and not many:
        first_z = none.new_zeros(batch, heads, d_k)
    dq = torch.empty(batch, seq, heads, d_k, dtype=q.dtype if q.shape[2] == heads else torch.float32,
        device=q.device)
    dk = torch.empty(batch, seq, heads, d_k, dtype=k.dtype if k.shape[2] == heads else torch.float32,
        device=k.device)
    dv = torch.empty(batch, seq, heads, d_v, dtype=v.dtype, device=v.device)
    delta = none.new_empty(batch, seq, heads) if normalise else None
    q_dots = _sum(
        "dq", do, v, k, dq, t=q, o=o, w=w, u=inverse, g=g, delta=delta, s=first, z=first_z, plan=plan,
        scale=scale,
        dot=g is not None, normalise=normalise,
    )  # fmt: skip
    ds0 = none.new_empty(batch, heads, d_k, d_v)
    dz0 = none.new_empty(batch, heads, d_k) if normalise else None
    save = (ds0, dz0)
    if many:
        ds, dz, ds0, dz0 = _states(q, do, delta, inverse, g, ds, dz, *plan, scale, True, normalise, heads)
        save = (None, None)
    elif normalise and (ds is None) != (dz is None):
        ds = none.new_zeros(batch, heads, d_k, d_v) if ds is None else ds
        dz = none.new_zeros(batch, heads, d_k) if dz is None else dz
    shared = {"w": inverse, "u": w, "g": g, "plan": plan, "scale": scale}
    _sum("dv", k, q, do, dv, d=d, s=ds, s_last=save[0], **shared)
    dd = none.new_empty(batch, heads, n_segment) if d is not None else None
    k_dots = _sum(
        "dk", v, do, q, dk, t=k, d=d, delta=delta, s=ds, z=dz, z_last=save[1], dd=dd, normalise=normalise,
        dot=g is not None or w is not None, **shared,
    )  # fmt: skip
    dg = None
    if g is not None:
        dg = none.new_empty(batch, seq, heads)
        _decay_gradient(dg, q_dots, k_dots, w, inverse, parts, last, ds, parts_z, last_z, dz, plan, scale,
            normalise)
        dg = dg.to(g.dtype)
    dw = None if w is None else (k_dots[0] if k_dots.shape[0] == 1 else k_dots.sum(0)).to(w.dtype)
    if q.shape[2] != heads:
        dq = dq.unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype)
    if k.shape[2] != heads:
        dk = dk.unflatten(2, (k.shape[2], -1)).sum(3).to(k.dtype)
    dd = None if dd is None else dd.sum((0, 2)).to(d.dtype)
    found = (dq, dk, dv, dg, dw, dd, ds0, dz0)
    return tuple(none.new_empty(0) if x is None else x for x in found)


def _decay_gradient(
    dg: Tensor, q_dots: Tensor, k_dots: Tensor, w: Tensor | None, inverse: Tensor | None, parts: Tensor,
    last: Tensor,
    ds: Tensor | None, parts_z: Tensor, last_z: Tensor, dz: Tensor | None, plan: tuple[int, int],
    scale: float, normalise: bool,
) -> None:  # fmt: skip
    batch, seq, heads = dg.shape
    size, z_size = last[0, 0].numel(), last.shape[2]
    launch(
        _linear_decay_gradient_kernel, (plan[0] * batch * heads,), q_dots, k_dots, w, inverse, parts, last,
        ds, parts_z,
        last_z, dz, dg, *(NO_STRIDES if w is None else w.stride()), heads, seq, *plan, q_dots.shape[0],
        k_dots.shape[0],
        batch * seq * heads, scale if plan[0] > 1 else 1.0, SIZE=size, Z_SIZE=z_size, BLOCK=min(1024,
        power_of_two(size)), BLOCK_T=128,
        BLOCK_Z=power_of_two(z_size), HAS_W=w is not None, HAS_U=inverse is not None,
        HAS_Z=normalise and dz is not None,
        HAS_LATER=ds is not None, num_warps=4,
    )  # fmt: skip


def _fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, d: Tensor | None, s: Tensor | None,
    z: Tensor | None, scale: float, normalise: bool, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, seq, heads, d_v = v.shape
    d_k = q.shape[3]
    block = _block("linear_output", d_k, d_v, q)
    n = _segments(batch * heads * -(-d_v // block["BLOCK_C"]), seq, block["BLOCK_T"], v.device)[0]

    def new(*shape: int) -> Tensor:
        return v.new_empty(shape, dtype=torch.float32)

    return (
        v.new_empty(v.shape),
        new(batch, heads, d_k, d_v),
        new(batch, heads, d_k) if normalise else new(0),
        new(batch, seq, heads) if normalise else new(0),
        new(batch, heads, n, d_k, d_v) if n > 1 else new(0),
        new(batch, heads, n, d_k) if n > 1 and normalise else new(0),
    )


def _fake_backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    w: Tensor | None,
    d: Tensor | None, s: Tensor | None, z: Tensor | None, o: Tensor, last: Tensor, last_z: Tensor,
    den: Tensor,
    parts: Tensor, parts_z: Tensor, scale: float, normalise: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    none = last.new_empty(0)
    optional = (none if x is None else x.new_empty(x.shape) for x in (g, w, d))
    dz0 = last.new_empty(last.shape[:3]) if normalise else none
    always = (x.new_empty(x.shape) for x in (q, k, v))
    return *always, *optional, last.new_empty(last.shape), dz0


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale, ctx.normalise, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, do: Tensor | None, ds: Tensor | None, dz: Tensor | None, *unused: Any) -> tuple:
    *inputs, o, last, last_z, den, parts, parts_z = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dz = dz if ctx.normalise else None
    found = torch.ops.beyond_softmax.linear_attention_backward(
        do, ds, dz, *inputs, o, last, last_z, den, parts, parts_z, ctx.scale, ctx.normalise
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
    "Tensor den, Tensor parts, Tensor parts_z, float scale, bool normalise) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiable("linear_attention", _setup, _gradient)
differentiable_once("linear_attention_backward")
