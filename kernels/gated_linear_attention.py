"""Linear attention without decay, with a scalar decay (retention, Mamba-2's SSD) or a decay per key channel
(GLA).

S_t = diag(exp(log_decay_t)) S_{t-1} + w_t k_t v_t^T;  z_t likewise with 1 in place of v;
o_t = scale q_t^T S_t,
divided by (scale q_t^T z_t + eps) if `normalise`.
A_ij = scale sum_d q_id k_jd w_j exp(sum_{r=j+1..i} log_decay_rd): a step's decay acts before its own write.

Glossary: log_decay <= 0, natural log, None | [head] | [batch seq head] | [batch seq head d_k]; k_weight = w
(Mamba-2's dt). Log decays above 0 grow: the formula holds for them, but its factors may overflow.
q, k, v and the state may differ in dtype: sums are in float32, or float64 where one of them is, and the
output has the dtype of v.
q and k may have fewer heads than v (groups): head h reads group h // (n_heads / n_groups).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import KernelError
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_count,
    check_present,
    check_rows,
    resolve_backend,
    resolve_form,
    step_unfit,
    triton_unfit,
    without_autocast,
)
from kernels.chunked_linear import ChunkedLinear, chunked_by_channel
from kernels.feature_maps import FEATURE_MAPS, elu_plus_one, identity
from kernels.first_order import apply
from kernels.linear_inputs import (
    OPERATOR,
    LinearState,
    Queries,
    Values,
    check_inputs,
    prepare,
    state_tensors,
)
from kernels.segment_sum import segment_sum, suffix_sum

__all__ = [
    "FEATURE_MAPS",
    "LinearState",
    "chunked",
    "elu_plus_one",
    "gated_linear_attention",
    "identity",
    "parallel",
    "pattern",
    "recurrent",
    "step",
]


@without_autocast
def pattern(
    q: Queries,
    k: Queries,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    state: LinearState | None = None,
    rows: slice | None = None,
) -> Float[Tensor, "batch head dest src=seq"]:
    """Implied attention; signed, and without `normalise` rows do not sum to 1.

    Args:
        q, k: After their feature map.
        log_decay: None, [head], [batch seq head] or [batch seq head d_k]; natural log, at most 0.
        k_weight: None or [batch seq head], multiplies k.
        scale: Multiplies q; any finite number.
        normalise: Divide each row by its sum (plus what the initial z adds) plus eps.
        eps: Added to the denominator as it is.
        state: Initial state; only its z is used, and only by `normalise`.
        rows: Only these destinations, consecutive (memory is batch x head x rows x seq).

    Raises:
        KernelError: Shapes that disagree, an option that is not accepted; `normalise` with a state that has
            no z.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236; Yang et al. 2023, arXiv:2312.06635; Dao and Gu
    2024, arXiv:2405.21060.
    """
    q, k, decay = prepare(q, k, None, log_decay, k_weight, state, normalise, scale, eps)
    rows = check_rows(OPERATOR, rows, q.shape[1])
    weights = _raw_pattern(q, k, None if log_decay is None else decay, rows)
    if not normalise:
        return weights
    return weights / _denominator(weights, q, decay, state, eps, rows)


@without_autocast
def parallel(
    q: Queries,
    k: Queries,
    v: Values,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    state: LinearState | None = None,
) -> tuple[Values, LinearState]:
    """Readable form: pattern @ v, plus what the initial state adds. Options as in `pattern`.

    Returns:
        (output [batch seq head d_v], state after the last step).
    """
    check_present(OPERATOR, v=v)
    q, k, decay = prepare(q, k, v, log_decay, k_weight, state, normalise, scale, eps)
    dtype, v = v.dtype, v.to(q.dtype)
    weights = _raw_pattern(q, k, None if log_decay is None else decay)
    output = torch.einsum("bhij,bjhv->bihv", weights, v)
    from_start = torch.exp(decay.cumsum(dim=1))
    if state is not None:
        output = output + torch.einsum("bihd,bhdv->bihv", q * from_start, state.s.to(q.dtype))
    if normalise:
        output = output / _denominator(weights, q, decay, state, eps).transpose(1, 2)
    to_end = k * torch.exp(suffix_sum(decay, dim=1))
    s = torch.einsum("bjhd,bjhv->bhdv", to_end, v)
    z = to_end.sum(dim=1) if normalise else None
    if state is not None:
        s = s + from_start[:, -1, :, :, None] * state.s
        z = z + from_start[:, -1] * state.z if normalise else None
    return output.to(dtype), LinearState(s=s, z=z)


@without_autocast
def chunked(
    q: Queries,
    k: Queries,
    v: Values,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    state: LinearState | None = None,
    chunk: int | None = None,
) -> tuple[Values, LinearState]:
    """Linear-time form: quadratic within chunks, states between them. Arguments and results as in `parallel`.

    Args:
        chunk: Steps in a chunk; default 64 without a decay, 32 with one a head, 16 with one a key channel.
    """
    check_present(OPERATOR, v=v)
    sizes = check_inputs(q, k, v, log_decay, k_weight, state, normalise, scale, eps)
    per_channel = log_decay is not None and log_decay.ndim == 4
    if chunk is None:
        chunk = 64 if log_decay is None else 16 if per_channel else 32
    check_count(OPERATOR, "chunk", chunk)
    batch, seq, heads = sizes["batch"], sizes["seq"], sizes["head"]
    groups = heads if per_channel or sizes["q_head"] != sizes["k_head"] else sizes["q_head"]
    acc = accumulation_dtype(q, k, v, log_decay, k_weight, *state_tensors(state))
    q, k = (_rows(t.to(acc), groups) for t in (q, k))
    values, start = _with_normaliser(v.to(acc), k_weight, state, normalise)
    by_group = batch * groups, heads // groups
    values = _rows(values, heads).unflatten(0, by_group)
    start = None if start is None else start.to(acc).reshape(*by_group, *start.shape[2:])
    decay = None if log_decay is None else log_decay.to(acc)
    if per_channel:
        output, s = chunked_by_channel(q * scale, k, values[:, 0], _rows(decay, groups), start, chunk)
    else:
        if decay is not None:
            decay = decay.expand(v.shape[:3]).transpose(1, 2).reshape(*by_group, seq)
        output, s = apply(OPERATOR, ChunkedLinear, q * scale, k, values, decay, start, chunk)
    output = output.reshape(batch, heads, seq, values.shape[-1]).transpose(1, 2)
    s = s.reshape(batch, heads, *s.shape[-2:])
    if not normalise:
        return output.to(v.dtype), LinearState(s=s)
    output = output[..., :-1] / (output[..., -1:] + eps)
    return output.to(v.dtype), LinearState(s=s[..., :-1], z=s[..., -1])


@without_autocast
def step(
    q: Float[Tensor, "batch _ d_k"],
    k: Float[Tensor, "batch _ d_k"],
    v: Float[Tensor, "batch head d_v"],
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    state: LinearState | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch head d_v"], LinearState]:
    """One position, constant time. log_decay: None, [head], [batch head] or [batch head d_k]; k_weight:
    [batch head]. `backend` as in `gated_linear_attention`; Triton's step has no gradient.
    """
    check_present(OPERATOR, v=v)
    check_inputs(q, k, v, log_decay, k_weight, state, normalise, scale, eps, one_step=True)
    options = {"scale": scale, "normalise": normalise, "eps": eps}
    s, z = state_tensors(state)
    tensors = (q, k, v, log_decay, k_weight, s, z)
    unfit = step_unfit({"d_k": q.shape[-1], "d_v": v.shape[-1]}, *tensors)
    if log_decay is not None and log_decay.ndim == 3:
        unfit = "a decay per key channel"
    backend = resolve_backend(OPERATOR, backend, q, unfit)
    if backend == "triton":
        from kernels.triton import decode

        o, s, z = decode.linear_step(q, k, v, log_decay=log_decay, k_weight=k_weight, **options, s=s, z=z)
        return o, LinearState(s=s, z=z)
    if log_decay is not None and log_decay.ndim > 1:
        log_decay = log_decay[:, None]
    k_weight = None if k_weight is None else k_weight[:, None]
    q, k, decay = prepare(
        q[:, None], k[:, None], v[:, None], log_decay, k_weight, state, normalise, scale, eps
    )
    q, k, dtype, v = q[:, 0], k[:, 0], v.dtype, v.to(q.dtype)
    s = k[..., :, None] * v[..., None, :]
    z = k if normalise else None
    if state is not None:
        kept = torch.exp(decay[:, 0])
        s = s + kept[..., None] * state.s
        z = z + kept * state.z if normalise else None
    output = torch.einsum("bhd,bhdv->bhv", q, s)
    if normalise:
        output = output / ((q * z).sum(dim=-1, keepdim=True) + eps)
    return output.to(dtype), LinearState(s=s, z=z)


@without_autocast
def recurrent(
    q: Queries,
    k: Queries,
    v: Values,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    state: LinearState | None = None,
) -> tuple[Values, LinearState]:
    """Token by token through `step`. Arguments and results as in `parallel`."""
    check_present(OPERATOR, v=v)
    check_inputs(q, k, v, log_decay, k_weight, state, normalise, scale, eps)
    outputs = []
    for t in range(q.shape[1]):
        decay_t = log_decay[:, t] if log_decay is not None and log_decay.ndim > 1 else log_decay
        weight_t = None if k_weight is None else k_weight[:, t]
        output, state = step(
            q[:, t], k[:, t], v[:, t], log_decay=decay_t, k_weight=weight_t, scale=scale, normalise=normalise,
            eps=eps, state=state, backend="torch",
        )  # fmt: skip
        outputs.append(output)
    return torch.stack(outputs, dim=1), state


def gated_linear_attention(
    q: Queries,
    k: Queries,
    v: Values,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    state: LinearState | None = None,
    skip: Float[Tensor, " head"] | None = None,
    form: str = "chunked",
    backend: str | None = None,
) -> tuple[Values, LinearState]:
    """Linear attention in a named form ("parallel", "chunked", "recurrent"). Options and result as in
    `pattern`, `parallel`.

    Args:
        skip: Adds skip v to the output (Mamba-2's D); not with `normalise`.

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.
    """
    check_present(OPERATOR, v=v)
    sizes = check_inputs(q, k, v, log_decay, k_weight, state, normalise, scale, eps)
    s, z = state_tensors(state)
    unfit = triton_unfit(form, {"d_k": sizes["d_k"], "d_v": sizes["d_v"]}, q, k, v, s, z)
    if log_decay is not None and log_decay.ndim == 4:
        unfit = "a decay per key channel"
    if skip is not None:
        if normalise:
            raise KernelError(f"{OPERATOR}: skip is given with normalise=True, accepted is one of them")
        check_axes(OPERATOR, {"skip": (skip, "head")}, head=sizes["head"])
    if resolve_backend(OPERATOR, backend, q, unfit) == "triton":
        from kernels.triton import gated_linear_attention as fused

        o, s, z = fused.gated_linear_attention(
            q, k, v, log_decay=log_decay, k_weight=k_weight, scale=scale, normalise=normalise, eps=eps,
            skip=skip, s=s, z=z,
        )
        return o, LinearState(s=s, z=z)
    function = resolve_form(
        OPERATOR, form, {"parallel": parallel, "chunked": chunked, "recurrent": recurrent}
    )
    output, state = function(
        q,
        k,
        v,
        log_decay=log_decay,
        k_weight=k_weight,
        scale=scale,
        normalise=normalise,
        eps=eps,
        state=state,
    )
    return (output if skip is None else output + (skip[:, None] * v).to(output.dtype)), state


def _raw_pattern(q: Tensor, k: Tensor, decay: Tensor | None, rows: slice = slice(None)) -> Tensor:
    """Unnormalised A [batch head dest src]. One key channel at a time where each has its own decay."""
    position = torch.arange(q.shape[1], device=q.device)
    later = position[None, :] > position[rows, None]
    q = q[:, rows]
    if decay is None:
        return torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(later, 0)
    by_channel = decay.permute(0, 2, 3, 1)

    def decays(channel: int) -> Tensor:
        return torch.exp(segment_sum(by_channel[:, :, channel], rows).masked_fill(later, -torch.inf))

    if decay.shape[-1] == 1:
        return torch.einsum("bihd,bjhd->bhij", q, k) * decays(0)
    products = (torch.einsum("bih,bjh->bhij", q[..., d], k[..., d]) * decays(d) for d in range(q.shape[-1]))
    return sum(products)


def _denominator(
    weights: Tensor,
    q: Tensor,
    decay: Tensor,
    state: LinearState | None,
    eps: float,
    rows: slice = slice(None),
) -> Tensor:
    """What a normalised row is divided by [batch head dest 1]."""
    row_sum = weights.sum(dim=-1)
    if state is not None:
        from_start = torch.exp(decay.cumsum(dim=1))[:, rows]
        row_sum = row_sum + torch.einsum("bihd,bhd->bhi", q[:, rows] * from_start, state.z.to(q.dtype))
    return (row_sum + eps)[..., None]


def _rows(x: Tensor, heads: int) -> Tensor:
    """[batch seq (1..heads) d] as contiguous [batch*heads seq d], each group repeated for its heads."""
    x = x.repeat_interleave(heads // x.shape[2], dim=2)
    return x.transpose(1, 2).contiguous().flatten(0, 1)


def _with_normaliser(
    v: Tensor, k_weight: Tensor | None, state: LinearState | None, normalise: bool
) -> tuple[Tensor, Tensor | None]:
    """Values, weighted, and the initial state; the normaliser is one more value, 1 everywhere, and z one
    more column.
    """
    start = None if state is None else state.s
    if normalise:
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        start = None if state is None else torch.cat([state.s, state.z[..., None]], dim=-1)
    return (v if k_weight is None else v * k_weight.to(v.dtype)[..., None]), start
