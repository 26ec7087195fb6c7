"""How the kernels of linear attention are started: chunks and segments, states, sums over sources, decays."""

import torch
from torch import Tensor

from kernels.triton.config_table import config
from kernels.triton.launch import launch, power_of_two, processors
from kernels.triton.linear_attention_backward_kernels import (
    _linear_decay_gradient_kernel,
    _linear_group_sum_kernel,
)
from kernels.triton.linear_attention_kernels import (
    _linear_decay_kernel,
    _linear_output_kernel,
    _linear_scan_kernel,
    _linear_state_kernel,
)

NO_STRIDES = (0, 0, 0)


def chunk_length(d_k: int, d_v: int, like: Tensor) -> int:
    """Steps of a chunk, the same in all kernels."""
    return config("linear_output", power_of_two(max(d_k, d_v)), like.dtype, like.device).block_m


def segments(lanes: int, seq: int, chunk: int, device: torch.device) -> tuple[int, int]:
    """(number of segments, their length): enough programs to fill the device, at least two chunks each."""
    wanted = max(1, 4 * processors(device) // max(lanes, 1))
    if wanted < 4 or seq <= 2 * chunk:
        return 1, max(-(-seq // chunk), 1) * chunk
    chunks = max(2, -(-seq // chunk) // wanted)
    segment = chunks * chunk
    return -(-seq // segment), segment


def plan(d_k: int, d_v: int, heads: int, v: Tensor) -> tuple[int, int]:
    """(number of segments, their length) of a call with values [batch seq head d_v]."""
    columns = min(power_of_two(d_v), config("linear_output", power_of_two(d_k), v.dtype, v.device).block_n)
    lanes = v.shape[0] * heads * -(-d_v // columns)
    return segments(lanes, v.shape[1], chunk_length(d_k, d_v, v), v.device)


def _block(part: str, d_b: int, d_c: int, q: Tensor) -> dict[str, int]:
    c = config(part, power_of_two(d_b), q.dtype, q.device)
    return {
        "BLOCK_T": chunk_length(d_b, d_c, q),
        "BLOCK_B": power_of_two(d_b),
        "BLOCK_C": min(power_of_two(d_c), c.block_n),
        "num_warps": c.warps,
        "num_stages": c.stages,
        "EXACT": q.dtype == torch.float32,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }


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
    b: Tensor, c: Tensor, y: Tensor | None, w: Tensor | None, sums: Tensor | None, first: Tensor | None,
    first_z: Tensor | None, n_segment: int, segment: int, scale: float, reverse: bool, normalise: bool,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Entry states of every segment (z behind s) and the state that leaves the last: (parts, s, z)."""
    batch, seq, d_b, d_c = b.shape[0], b.shape[1], b.shape[3], c.shape[3]
    options = {"dtype": torch.float32, "device": b.device}
    size, size_z = d_b * d_c, d_b if normalise else 0
    parts = torch.empty(batch, heads, n_segment, size + size_z, **options)
    total = torch.empty(batch, heads, n_segment, **options) if sums is not None else None
    block = _block("linear_state", d_b, d_c, b)
    n_block = -(-d_c // block["BLOCK_C"])
    launch(
        _linear_state_kernel, (n_block * n_segment * batch * heads,), b, c, y, w, *_parts(sums), parts,
        total, *b.stride()[:3], *c.stride()[:3], *(NO_STRIDES if w is None else w.stride()), heads, seq,
        n_segment, segment, GROUP_B=heads // b.shape[2], GROUP_C=heads // c.shape[2], D_B=d_b, D_C=d_c,
        REVERSE=reverse, HAS_G=sums is not None, HAS_W=w is not None, HAS_Z=normalise, HAS_Y=y is not None,
        **block,
    )  # fmt: skip
    last = torch.empty(batch, heads, d_b, d_c, **options)
    last_z = torch.empty(batch, heads, d_b, **options) if normalise else None
    launch(
        _linear_scan_kernel, (-(-(size + size_z) // 256) * batch * heads,), parts, total, first, first_z,
        last, last_z, size, size_z, n_segment, scale, BLOCK=256, REVERSE=reverse, HAS_G=total is not None,
        HAS_FIRST=first is not None, HAS_FIRST_Z=normalise and first_z is not None, HAS_Z=normalise,
        num_warps=2,
    )  # fmt: skip
    return parts, last, last_z


def row_sum(
    call: str, a: Tensor, b: Tensor, c: Tensor, out: Tensor, *, t: Tensor | None = None,
    o: Tensor | None = None, w: Tensor | None = None, u: Tensor | None = None, sums: Tensor | None = None,
    d: Tensor | None = None, delta: Tensor | None = None, s: Tensor | None = None, z: Tensor | None = None,
    s_last: Tensor | None = None, z_last: Tensor | None = None, den: Tensor | None = None,
    dd: Tensor | None = None, dot: bool = False, plan: tuple[int, int], scale: float = 1.0,
    eps: float = 0.0, normalise: bool = False,
) -> Tensor | None:  # fmt: skip
    """One row of the table in `linear_attention_kernels`; gives the row products <t_i, out_i> per column
    block if `dot`. s and z may be views of the entry states of segments."""
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
        a, b, c, t, o, w, u, *_parts(sums), d, delta, s, z, s_last, z_last, out, den, dots, dd,
        *a.stride()[:3], *b.stride()[:3], *c.stride()[:3], *(NO_STRIDES if t is None else t.stride()[:3]),
        *(NO_STRIDES if w is None else w.stride()), *(NO_STRIDES if u is None else u.stride()),
        *((1, d_b) if transposed else (d_c, 1)), heads, seq, n_segment, segment, batch * seq * heads,
        _stride(s, n_segment), _stride(z, n_segment), scale, gain_first, scale if reverse else 1.0, eps,
        GROUP_A=heads // a.shape[2], GROUP_B=heads // b.shape[2], GROUP_C=heads // c.shape[2],
        GROUP_T=1 if t is None else heads // t.shape[2], D_B=d_b, D_C=d_c, CALL=call, REVERSE=reverse,
        HAS_G=sums is not None, HAS_W=w is not None, HAS_U=u is not None, NORMALISE=normalise,
        HAS_D=d is not None, HAS_DOT=dot, HAS_FIRST=s is not None,
        SAVE_LAST=s_last is not None or z_last is not None, **block,
    )  # fmt: skip
    return dots


def _stride(state: Tensor | None, n_segment: int) -> int:
    """From one segment's (or, of one segment, one head's) state to the next."""
    return 0 if state is None else state.stride(2 if n_segment > 1 else 1)


def group_sums(parts: list[Tensor], likes: list[Tensor]) -> list[Tensor]:
    """Gradients [batch seq head d] of queries and keys summed over the heads of each group."""
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in likes]
    groups = [part.shape[2] // x.shape[2] for part, x in zip(parts, likes, strict=True)]
    size, width = parts[0].numel(), parts[0].shape[3]
    launch(
        _linear_group_sum_kernel, (-(-size // (512 * min(groups))), len(parts)), parts[0], parts[-1],
        found[0], found[-1], size, width, GROUP_Q=groups[0], GROUP_K=groups[-1], BLOCK=512, num_warps=4,
    )  # fmt: skip
    return found


def decay_gradient(
    dg: Tensor, q_dots: Tensor, k_dots: Tensor, w: Tensor | None, inverse: Tensor | None, parts: Tensor,
    last: Tensor, ds: Tensor | None, last_z: Tensor | None, dz: Tensor | None, plan: tuple[int, int],
    scale: float,
) -> None:  # fmt: skip
    """Write the gradient of the log decays; parts holds z behind s, last_z is None where rows are not
    normalised."""
    batch, seq, heads = dg.shape
    size, z_size = last[0, 0].numel(), last.shape[2]
    many = plan[0] > 1
    launch(
        _linear_decay_gradient_kernel, (plan[0] * batch * heads,), q_dots, k_dots, w, inverse, parts, last,
        ds, parts[..., size:] if many else parts, last_z, dz, dg,
        *(NO_STRIDES if w is None else w.stride()), heads, seq, *plan, q_dots.shape[0], k_dots.shape[0],
        batch * seq * heads, parts.shape[-1] if many else 0, _stride(ds, plan[0]),
        parts.shape[-1] if many else 0, _stride(dz, plan[0]), scale if many else 1.0, SIZE=size,
        Z_SIZE=z_size, BLOCK=min(1024, power_of_two(size)), BLOCK_T=128, BLOCK_Z=power_of_two(z_size),
        HAS_W=w is not None, HAS_U=inverse is not None, HAS_Z=last_z is not None and dz is not None,
        HAS_LATER=ds is not None, num_warps=4,
    )  # fmt: skip
