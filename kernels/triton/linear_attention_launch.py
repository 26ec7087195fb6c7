"""How the kernels of linear attention are started: chunks and segments, states, sums over sources, decays."""

from typing import Any

import torch
from torch import Tensor

from kernels.triton.config_table import config
from kernels.triton.launch import launch, power_of_two, processors
from kernels.triton.linear_attention_backward_kernels import (
    _linear_decay_gradient_kernel,
    _linear_gradient_kernel,
    _linear_group_sum_kernel,
)
from kernels.triton.linear_attention_kernels import (
    _linear_decay_kernel,
    _linear_output_kernel,
    _linear_scan_kernel,
    _linear_state_kernel,
)

NO_STRIDES = (0, 0, 0)
# Chunks that keep at least 2^MILD of a state decay by factors of their rows: bfloat16 has exponents to spare
# for them, but float16 loses its smallest numbers, and float32 digits.
MILD = {torch.bfloat16: -48.0, torch.float16: -4.0, torch.float32: -8.0}


def chunk_length(d_k: int, d_v: int, like: Tensor) -> int:
    """Steps of a chunk, the same in all kernels; those of outputs are those of gradients."""
    return config("linear_output", power_of_two(max(d_k, d_v)), like.dtype, like.device).block_m


def segments(lanes: int, seq: int, chunk: int, device: torch.device) -> tuple[int, int]:
    """(number of segments, their length): enough programs to fill the device, at least two chunks each."""
    wanted = max(1, 2 * processors(device) // max(lanes, 1))
    if wanted < 2 or seq <= 2 * chunk:
        return 1, max(-(-seq // chunk), 1) * chunk
    chunks = max(2, -(-seq // (chunk * wanted)))
    segment = chunks * chunk
    return -(-seq // segment), segment


def plan(d_k: int, d_v: int, heads: int, v: Tensor) -> tuple[int, int]:
    """(number of segments, their length) of a call with values [batch seq head d_v]."""
    columns = _columns("linear_output", d_k, d_v, d_v, v)
    lanes = v.shape[0] * heads * -(-d_v // columns)
    return segments(lanes, v.shape[1], chunk_length(d_k, d_v, v), v.device)


def _options(part: str, d_k: int, d_v: int, q: Tensor) -> dict[str, Any]:
    c = config(part, power_of_two(max(d_k, d_v)), q.dtype, q.device)
    return {
        "EXACT": q.dtype == torch.float32,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "num_warps": c.warps,
        "num_stages": c.stages,
        "maxnreg": c.registers,
    }


def _columns(part: str, d_k: int, d_v: int, width: int, q: Tensor) -> int:
    """Columns of a program's result, of `width`."""
    return min(power_of_two(width), config(part, power_of_two(max(d_k, d_v)), q.dtype, q.device).block_n)


def decays(g: Tensor, d_k: int, d_v: int, like: Tensor) -> Tensor:
    """Log decays summed from the start of each chunk, [1 or 2 parts, batch, head, seq]."""
    batch, seq, heads = g.shape
    exact = like.dtype == torch.float32
    sums = torch.empty(2 if exact else 1, batch, heads, seq, dtype=torch.float32, device=g.device)
    chunk = chunk_length(d_k, d_v, like)
    launch(
        _linear_decay_kernel, (-(-seq // chunk), -(-heads // 8), batch), g, sums[0], sums[-1], *g.stride(),
        heads, seq, BLOCK_T=chunk, BLOCK_H=8, EXACT=exact, num_warps=4,
    )  # fmt: skip
    return sums


def _parts(sums: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if sums is None else (sums[0], sums[-1])


def states(
    b: Tensor, c: Tensor, w: Tensor | None, sums: Tensor | None, first: Tensor | None,
    first_z: Tensor | None, plan: tuple[int, int], scale: float, reverse: bool, normalise: bool,
    heads: int, o: Tensor | None = None, delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Entry states of every segment (z behind s) and the state that leaves the last: (parts, s, z). Fills
    delta = <o, c> if that is given."""
    n_segment, segment = plan
    batch, seq, d_b, d_c = b.shape[0], b.shape[1], b.shape[3], c.shape[3]
    options = {"dtype": torch.float32, "device": b.device}
    size, size_z = d_b * d_c, d_b if normalise else 0
    parts = torch.empty(batch, heads, n_segment, size + size_z, **options)
    total = torch.empty(batch, heads, n_segment, **options) if sums is not None else None
    columns = _columns("linear_state", d_b, d_c, d_c, b)
    launch(
        _linear_state_kernel, (-(-d_c // columns) * n_segment * batch * heads,), b, c, o, w, *_parts(sums),
        delta, parts, total, *b.stride()[:3], *c.stride()[:3], *(NO_STRIDES if w is None else w.stride()),
        heads, seq, n_segment, segment, GROUP_B=heads // b.shape[2], GROUP_C=heads // c.shape[2], D_B=d_b,
        D_C=d_c, BLOCK_T=chunk_length(d_b, d_c, b), BLOCK_B=power_of_two(d_b), BLOCK_C=columns,
        BLOCK_ALL=power_of_two(d_c), REVERSE=reverse, HAS_G=sums is not None, HAS_W=w is not None,
        HAS_Z=normalise, HAS_DELTA=delta is not None,
        Z_DOT=normalise and power_of_two(max(d_b, d_c)) == 64 and b.dtype != torch.float32,
        **_options("linear_state", d_b, d_c, b),
    )  # fmt: skip
    last = torch.empty(batch, heads, d_b, d_c, **options)
    last_z = torch.empty(batch, heads, d_b, **options) if normalise else None
    launch(
        _linear_scan_kernel, (-(-(size + size_z) // 256) * batch * heads,), parts, total, first, first_z,
        last, last_z, size, size_z, n_segment, scale, BLOCK=256, AHEAD=8, REVERSE=reverse,
        HAS_G=total is not None, HAS_FIRST=first is not None,
        HAS_FIRST_Z=normalise and first_z is not None, HAS_Z=normalise, num_warps=2,
    )  # fmt: skip
    return parts, last, last_z


def outputs(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, sums: Tensor | None, d: Tensor | None,
    s: Tensor | None, z: Tensor | None, last: Tensor | None, last_z: Tensor | None, o: Tensor,
    den: Tensor | None, plan: tuple[int, int], scale: float, eps: float,
) -> None:  # fmt: skip
    """Fill o, 1 / denominator (den) where rows are normalised, and the last state if it is given. s and z may
    be views of the entry states of segments."""
    (batch, seq, heads, d_v), d_k = v.shape, q.shape[3]
    columns = _columns("linear_output", d_k, d_v, d_v, v)
    launch(
        _linear_output_kernel, (-(-d_v // columns) * plan[0] * batch * heads,), q, k, v, w, *_parts(sums), d,
        s, z, last, last_z, o, den, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *(NO_STRIDES if w is None else w.stride()), heads, seq, *plan, _stride(s, plan[0]),
        _stride(z, plan[0]), scale, eps, GROUP_Q=heads // q.shape[2], GROUP_K=heads // k.shape[2], D_K=d_k,
        D_V=d_v, BLOCK_T=chunk_length(d_k, d_v, v), BLOCK_K=power_of_two(d_k), BLOCK_V=columns,
        HAS_G=sums is not None, HAS_W=w is not None, NORMALISE=den is not None, HAS_D=d is not None,
        HAS_FIRST=s is not None, SAVE_LAST=last is not None, MILD=MILD[v.dtype],
        **_shared_offsets(q, k, v), **_options("linear_output", d_k, d_v, v),
    )  # fmt: skip


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, w: Tensor | None, inverse: Tensor | None,
    sums: Tensor | None, d: Tensor | None, delta: Tensor | None, s: Tensor | None, z: Tensor | None,
    ds: Tensor | None, dz: Tensor | None, last: Tensor | None, last_z: Tensor | None, dq: Tensor, dk: Tensor,
    dv: Tensor, plan: tuple[int, int], scale: float,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Fill dq, dk, dv (whose rows of a position may stand apart) and the gradient of the first state (last)
    if it is given.

    Returns:
        (row products [2 or 3, block, batch, seq, head] of every block of columns: <q, dq>, <k, dk> and, with
        weights, <k, dk> before them, dd of every segment); None where there is no decay, weight or skip.
    """
    (batch, seq, heads, d_v), d_k = v.shape, q.shape[3]
    part = "linear_gradient"
    if sums is None:
        part = "linear_gradient_plain" if inverse is None else "linear_gradient_normalised"
    columns_k, columns_v = (_columns(part, d_k, d_v, width, v) for width in (d_k, d_v))
    n_k, n_v = -(-d_k // columns_k), -(-d_v // columns_v)
    # Keys and values of equal width share a program where decays make their rows dear; with weights as well
    # they have no registers for it.
    flat_dv = dv.is_contiguous()
    same = n_k == n_v == 1 and power_of_two(d_k) == power_of_two(d_v)
    together = same and flat_dv and sums is not None and inverse is None and w is None and d is None
    options = {"dtype": torch.float32, "device": v.device}
    dots = None
    if sums is not None or w is not None:
        dots = torch.empty(2 if w is None else 3, n_k, batch, seq, heads, **options)
    dd = torch.empty(batch, heads, plan[0], **options) if d is not None else None
    launch(
        _linear_gradient_kernel, ((2 if together else 2 * n_k + n_v) * plan[0] * batch * heads,), q, k, v, do,
        o, w, inverse, *_parts(sums), d, delta, s, z, ds, dz, last, last_z, dq, dk, dv, dots, dd,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3],
        *(NO_STRIDES if w is None else w.stride()), heads, seq, *plan, batch * seq * heads,
        *dv.stride()[:2], *(_stride(x, plan[0]) for x in (s, z, ds, dz)), scale,
        1 / scale if plan[0] == 1 else 1.0,
        GROUP_Q=heads // q.shape[2], GROUP_K=heads // k.shape[2], D_K=d_k, D_V=d_v,
        BLOCK_T=chunk_length(d_k, d_v, v), BLOCK_K=power_of_two(d_k), BLOCK_V=power_of_two(d_v),
        COLUMNS_K=columns_k, COLUMNS_V=columns_v, HAS_G=sums is not None, HAS_W=w is not None,
        NORMALISE=inverse is not None, HAS_D=d is not None, HAS_FIRST=s is not None,
        HAS_LAST=ds is not None, SAVE_LAST=last is not None, LOAD_DELTA=delta is not None,
        TOGETHER=together, MILD=MILD[v.dtype], **_shared_offsets(q, k, v, do=do), FLAT_DV=flat_dv,
        **_options(part, d_k, d_v, v),
    )  # fmt: skip
    return dots, dd


def _shared_offsets(q: Tensor, k: Tensor, v: Tensor, *, do: Tensor | None = None) -> dict[str, bool]:
    """Which tensors have their rows at the same places: threads keep one set of offsets for them."""
    heads = v.shape[2]

    def flat(x: Tensor) -> bool:
        # Multiples of 16, so that the compiler still sees wide loads.
        return x.shape[3] % 16 == 0 and x.stride(1) == heads * x.shape[3]

    like = {"K_LIKE_Q": k.stride(1) == q.stride(1), "V_LIKE_Q": v.stride(1) == q.stride(1)}
    found = like | {"FLAT_Q": flat(q), "FLAT_V": flat(v)}
    return found if do is None else found | {"FLAT_DO": flat(do)}


def _stride(state: Tensor | None, n_segment: int) -> int:
    """From one segment's (or, of one segment, one head's) state to the next."""
    return 0 if state is None else state.stride(2 if n_segment > 1 else 1)


def _position_stride(x: Tensor) -> int:
    """From one position to the next of [batch seq ...] that is evenly spaced; an axis of one may have any."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


def group_sums(parts: list[Tensor], found: list[Tensor]) -> None:
    """Fill gradients [batch seq group d] of queries and keys, whose positions may stand apart, with sums over
    the heads of each group."""
    groups = [part.shape[2] // x.shape[2] for part, x in zip(parts, found, strict=True)]
    size, width, heads = parts[0].numel(), parts[0].shape[3], parts[0].shape[2]
    launch(
        _linear_group_sum_kernel, (-(-size // (512 * min(groups))), len(parts)), parts[0], parts[-1],
        found[0], found[-1], *(_position_stride(x) for x in (found[0], found[-1])), size, width, heads,
        GROUP_Q=groups[0],
        GROUP_K=groups[-1], BLOCK=512, num_warps=4,
    )  # fmt: skip


def decay_gradient(
    dg: Tensor, dots: Tensor, parts: Tensor, last: Tensor, ds: Tensor | None, last_z: Tensor | None,
    dz: Tensor | None, plan: tuple[int, int], scale: float,
) -> None:  # fmt: skip
    """Write the gradient of the log decays; parts holds z behind s, last_z is None where rows are not
    normalised."""
    batch, seq, heads = dg.shape
    z_size, size = last.shape[2], last.shape[2] * last.shape[3]
    many = plan[0] > 1
    launch(
        _linear_decay_gradient_kernel, (plan[0] * batch * heads,), dots, parts, last, ds,
        parts[..., size:] if many else parts, last_z, dz, dg, heads, seq, *plan, dots.shape[1],
        batch * seq * heads, parts.shape[-1] if many else 0, _stride(ds, plan[0]),
        parts.shape[-1] if many else 0, _stride(dz, plan[0]), scale if many else 1.0, SIZE=size,
        Z_SIZE=z_size, BLOCK=min(4096, power_of_two(size)), BLOCK_T=256, BLOCK_Z=power_of_two(z_size),
        HAS_Z=last_z is not None and dz is not None, HAS_LATER=ds is not None, num_warps=4,
    )  # fmt: skip
