"""Linear attention without decay, with a scalar decay (retention, Mamba-2's SSD) or a decay per key channel
(GLA).

S_t = diag(exp(log_decay_t)) S_{t-1} + w_t k_t v_t^T;  z_t likewise with 1 in place of v;
o_t = scale q_t^T S_t,
divided by (scale q_t^T z_t + eps) if `normalise`.
A_ij = scale sum_d q_id k_jd w_j exp(sum_{r=j+1..i} log_decay_rd): a step's decay acts before its own write.

Glossary: log_decay <= 0, natural log, None | [head] | [batch seq head] | [batch seq head d_k]; k_weight = w
(Mamba-2's dt).
q and k may have fewer heads than v (groups): head h reads group h // (n_heads / n_groups).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import KernelError
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_groups,
    resolve_backend,
    resolve_form,
    triton_unfit,
    without_autocast,
)
from kernels.chunked_linear import ChunkedLinear, chunked_by_channel
from kernels.segment_sum import segment_sum, suffix_sum

OPERATOR = "gated_linear_attention"
Queries = Float[Tensor, "batch seq _ d_k"]
Values = Float[Tensor, "batch seq head d_v"]


@dataclass(frozen=True, kw_only=True)
class LinearState:
    """Sum of decayed key-value products `s`, and of decayed keys `z` where the output is normalised."""

    s: Float[Tensor, "batch head d_k d_v"]
    z: Float[Tensor, "batch head d_k"] | None = None


class _EluPlusOne(torch.autograd.Function):
    """Its derivative is min(y, 1) of its own value y: one tensor is kept, one pass goes back."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = torch.clamp(x, max=0).exp_().add_(torch.relu(x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * y.clamp(max=1)


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, as exp(x) for x <= 0, so that very negative x keep their digits."""
    return _EluPlusOne.apply(x)


def identity(x: Tensor) -> Tensor:
    """The feature map that changes nothing."""
    return x


FEATURE_MAPS = {"elu_plus_one": elu_plus_one, "identity": identity, "relu": torch.relu}


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
        scale: Multiplies q.
        normalise: Divide each row by its sum (plus what the initial z adds) plus eps.
        eps: Added to the denominator as it is.
        state: Initial state; only its z is used, and only by `normalise`.
        rows: Only these destinations, consecutive (memory is batch x head x rows x seq).

    Raises:
        KernelError: Shapes that disagree; `normalise` with a state that has no z.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236; Yang et al. 2023, arXiv:2312.06635; Dao and Gu
    2024, arXiv:2405.21060.
    """
    q, k, decay = _prepare(q, k, None, log_decay, k_weight, scale, state, normalise)
    weights = _raw_pattern(q, k, None if log_decay is None else decay, rows or slice(None))
    if not normalise:
        return weights
    return weights / _denominator(weights, q, decay, state, eps, rows or slice(None))


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
    dtype = v.dtype
    q, k, decay = _prepare(q, k, v, log_decay, k_weight, scale, state, normalise)
    v = v.to(q.dtype)
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
    sizes = _check(q, k, v, log_decay, k_weight, state, normalise)
    per_channel = log_decay is not None and log_decay.ndim == 4
    if chunk is None:
        chunk = 64 if log_decay is None else 16 if per_channel else 32
    if chunk < 1:
        raise KernelError(f"{OPERATOR}: chunk is {chunk}, accepted is at least 1")
    groups = sizes["head"] if per_channel or sizes["q_head"] != sizes["k_head"] else sizes["q_head"]
    acc = accumulation_dtype(q, k, v, log_decay, k_weight)
    q, k = (_rows(t.to(acc), groups) for t in (q, k))
    values, start = _with_normaliser(v.to(acc), k_weight, state, normalise)
    values = _rows(values, sizes["head"]).unflatten(0, (-1, sizes["head"] // groups))
    start = None if start is None else start.to(acc).reshape(-1, values.shape[1], *start.shape[2:])
    decay = None if log_decay is None else log_decay.to(acc)
    if per_channel:
        output, s = chunked_by_channel(q * scale, k, values[:, 0], _rows(decay, groups), start, chunk)
    else:
        if decay is not None:
            decay = decay.expand(v.shape[:3]).transpose(1, 2).reshape(-1, values.shape[1], sizes["seq"])
        output, s = ChunkedLinear.apply(q * scale, k, values, decay, start, chunk)
    output = output.reshape(sizes["batch"], sizes["head"], sizes["seq"], -1).transpose(1, 2)
    s = s.reshape(sizes["batch"], sizes["head"], *s.shape[-2:])
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
) -> tuple[Float[Tensor, "batch head d_v"], LinearState]:
    """One position, constant time. log_decay: None, [head], [batch head] or [batch head d_k]; k_weight:
    [batch head].
    """
    check_axes(
        OPERATOR, {"q": (q, "batch q_head d_k"), "k": (k, "batch k_head d_k"), "v": (v, "batch head d_v")}
    )
    dtype = v.dtype
    if log_decay is not None and log_decay.ndim > 1:
        log_decay = log_decay[:, None]
    k_weight = None if k_weight is None else k_weight[:, None]
    q, k, decay = _prepare(q[:, None], k[:, None], v[:, None], log_decay, k_weight, scale, state, normalise)
    q, k, v = q[:, 0], k[:, 0], v.to(q.dtype)
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
    _prepare(q, k, v, log_decay, k_weight, scale, state, normalise)
    outputs = []
    for t in range(q.shape[1]):
        decay_t = log_decay[:, t] if log_decay is not None and log_decay.ndim > 1 else log_decay
        weight_t = None if k_weight is None else k_weight[:, t]
        output, state = step(
            q[:, t], k[:, t], v[:, t], log_decay=decay_t, k_weight=weight_t, scale=scale, normalise=normalise,
            eps=eps, state=state,
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
    form: str = "chunked",
    backend: str | None = None,
) -> tuple[Values, LinearState]:
    """Linear attention in a named form ("parallel", "chunked", "recurrent"). Options and result as in
    `pattern`, `parallel`.

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.
    """
    # An earlier configuration of the kernels read out of bounds at 256 in bfloat16, for a reason not found.
    unfit = triton_unfit(form, {"d_k": q.shape[-1], "d_v": v.shape[-1]}, q, k, v, limit=128)
    if log_decay is not None and log_decay.ndim == 4:
        unfit = "a decay per key channel"
    if resolve_backend(OPERATOR, backend, q, unfit) == "triton":
        from kernels.triton import gated_linear_attention as fused

        _check(q, k, v, log_decay, k_weight, state, normalise)
        s, z = (None, None) if state is None else (state.s, state.z)
        o, s, z = fused.gated_linear_attention(
            q, k, v, log_decay=log_decay, k_weight=k_weight, scale=scale, normalise=normalise, eps=eps,
            s=s, z=z,
        )
        return o, LinearState(s=s, z=z)
    function = resolve_form(
        OPERATOR, form, {"parallel": parallel, "chunked": chunked, "recurrent": recurrent}
    )
    return function(
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


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    log_decay: Tensor | None,
    k_weight: Tensor | None,
    state: LinearState | None,
    normalise: bool,
) -> dict[str, int]:
    """Sizes of all axes: batch, seq, head, q_head, k_head, d_k, and d_v where there are values."""
    if log_decay is not None and log_decay.ndim not in (1, 3, 4):
        raise KernelError(
            f"{OPERATOR}: log_decay has shape {tuple(log_decay.shape)}, accepted are [head], "
            "[batch seq head] and [batch seq head d_k]"
        )
    decay_axes = {1: "head", 3: "batch seq head", 4: "batch seq head d_k"}[
        3 if log_decay is None else log_decay.ndim
    ]
    sizes = check_axes(
        OPERATOR,
        {
            "v": (v, "batch seq head d_v"),
            "log_decay": (log_decay, decay_axes),
            "k_weight": (k_weight, "batch seq head"),
            "q": (q, "batch seq q_head d_k"),
            "k": (k, "batch seq k_head d_k"),
            "state.s": (None if state is None else state.s, "batch head d_k d_v"),
            "state.z": (None if state is None else state.z, "batch head d_k"),
        },
    )
    heads = sizes.setdefault("head", max(sizes["q_head"], sizes["k_head"]))
    check_groups(OPERATOR, heads, q=sizes["q_head"], k=sizes["k_head"])
    if sizes["seq"] < 1:
        raise KernelError(f"{OPERATOR}: q has shape {tuple(q.shape)}, accepted are sequences of at least 1")
    if normalise and state is not None and state.z is None:
        raise KernelError(f"{OPERATOR}: normalise=True needs a state with z, got z=None")
    return sizes


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    log_decay: Tensor | None,
    k_weight: Tensor | None,
    scale: float,
    state: LinearState | None,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check everything; scaled q, weighted k and log decay [batch seq head (d_k or 1)] for every head,
    accumulation dtype.
    """
    sizes = _check(q, k, v, log_decay, k_weight, state, normalise)
    heads = sizes["head"]
    acc = accumulation_dtype(q, k, v, log_decay, k_weight)
    q = q.to(acc).repeat_interleave(heads // sizes["q_head"], dim=2) * scale
    k = k.to(acc).repeat_interleave(heads // sizes["k_head"], dim=2)
    if k_weight is not None:
        k = k * k_weight.to(acc)[..., None]
    if log_decay is None:
        return q, k, q.new_zeros(*q.shape[:3], 1)
    decay = log_decay.to(acc)
    return q, k, decay if decay.ndim == 4 else decay.expand(q.shape[:3])[..., None]


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
