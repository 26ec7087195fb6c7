"""Causal softmax attention with grouped key/value heads, a sliding window and a learnable sink.

s_ij = scale <q_i, k_j>;
A_ij = exp(s_ij) / (exp(sink_h) + sum_l exp(s_il)) over the allowed l: i - window < l <= i.
Query head h reads key/value head h // (n_heads / n_kv_heads). Queries may be the last of the positions of
the keys.

q, k and v may differ in dtype: sums are in float32, or float64 where one of them is, and the output has the
dtype of v.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels import KernelError
from kernels.blocked_softmax import BlockedSoftmax
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_groups,
    check_number,
    check_present,
    check_window,
    resolve_backend,
    resolve_form,
    step_unfit,
    triton_unfit,
    without_autocast,
)
from kernels.first_order import apply, differentiable_once

Queries = Float[Tensor, "batch dest head d_head"]
Keys = Float[Tensor, "batch src kv_head d_head"]
Values = Float[Tensor, "batch src kv_head d_v"]
Sink = Float[Tensor, " head"]
Output = Float[Tensor, "batch dest head d_v"]


@dataclass(frozen=True, kw_only=True)
class KVState:
    """Key/value cache. With a window only the last window - 1 positions are kept; `length` counts all that
    were seen.
    """

    k: Float[Tensor, "batch kept kv_head d_head"]
    v: Float[Tensor, "batch kept kv_head d_v"]
    length: int


@without_autocast
def pattern(
    q: Queries, k: Keys, *, scale: float | None = None, window: int | None = None, sink: Sink | None = None
) -> Float[Tensor, "batch head dest src"]:
    """Attention probabilities; rows sum to 1 without a sink, to less with one.

    Args:
        scale: Multiplies the logits, any finite number; default 1 / sqrt(d_head).
        window: Positions that a query sees, itself included; None is all before it.
        sink: Logit per head that stands in the denominator only; not scaled.

    Raises:
        KernelError: Shapes that disagree, more queries than keys, a window below 1, a scale that is not
            finite.

    Source: Vaswani et al. 2017, arXiv:1706.03762; window 2004.05150; sink 2309.17453 as a learned logit.
    """
    _check(q, k, k, scale, window, sink)
    acc = accumulation_dtype(q, k)
    keys = k.to(acc).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.to(acc), keys) * _scale(q, scale)
    scores = scores.masked_fill(~_allowed(q.shape[1], k.shape[1], window, q.device), -math.inf)
    if sink is None:
        return torch.softmax(scores, dim=-1)
    column = _sink(sink, acc)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


@without_autocast
def parallel(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Sink | None = None,
) -> Output:
    """Readable form: pattern @ v. Options as in `pattern`."""
    _check(q, k, v, scale, window, sink)
    weights = pattern(q.to(accumulation_dtype(q, k, v)), k, scale=scale, window=window, sink=sink)
    values = v.to(weights.dtype).repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bhij,bjhd->bihd", weights, values).to(v.dtype)


@without_autocast
def chunked(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Sink | None = None,
) -> Output:
    """Memory linear in length: torch's scaled_dot_product_attention where it applies, else blocks of queries.

    It applies without a sink, without a window shorter than the sequence, for as many queries as keys and
    d_v = d_head.
    """
    _check(q, k, v, scale, window, sink)
    n_dest, n_src = q.shape[1], k.shape[1]
    if sink is None and (window is None or window >= n_src) and n_dest == n_src and q.shape[3] == v.shape[3]:
        repeats = q.shape[2] // k.shape[2]
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, values = (t.to(dtype) for t in differentiable_once("softmax_attention", q, k, v))
        q, scale = _positive_scale(q, scale)
        heads_first = [
            t.transpose(1, 2)
            for t in (q, k.repeat_interleave(repeats, 2), values.repeat_interleave(repeats, 2))
        ]
        output = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale)
        return (output.transpose(1, 2) + _not_finite(q, k).to(output.dtype)).to(v.dtype)
    return _blocked(q, k, v, scale, window, sink)[0].transpose(1, 2).to(v.dtype)


def _not_finite(q: Queries, k: Keys) -> Float[Tensor, "batch dest head 1"]:
    """0, and NaN from where a query, or a key before it, is not finite: torch's CPU kernel drops those."""
    q, k = q.detach(), k.detach()
    keys = (k * 0).sum(-1, keepdim=True).cumsum(1).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return (q * 0).sum(-1, keepdim=True) + keys


@without_autocast
def logsumexp(
    q: Queries, k: Keys, *, scale: float | None = None, window: int | None = None, sink: Sink | None = None
) -> Float[Tensor, "batch head dest"]:
    """log of the denominator (sink included), in linear memory: pattern = exp(scores - logsumexp)."""
    _check(q, k, k, scale, window, sink)
    return _blocked(q, k, k[..., :0], scale, window, sink)[1]


def empty_state(
    batch: int, n_kv_heads: int, d_head: int, d_v: int, *, dtype: torch.dtype, device: torch.device | str
) -> KVState:
    """A cache that has seen nothing."""
    k = torch.empty(batch, 0, n_kv_heads, d_head, dtype=dtype, device=device)
    v = torch.empty(batch, 0, n_kv_heads, d_v, dtype=dtype, device=device)
    return KVState(k=k, v=v, length=0)


def step(
    q: Queries,
    k: Keys,
    v: Values,
    state: KVState,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Sink | None = None,
    backend: str | None = None,
) -> tuple[Output, KVState]:
    """One or more new positions after the cached ones. Options as in `pattern`; the given state is left as
    it is. `backend` as in `softmax_attention`; Triton's step of one position has no gradient.

    Returns:
        (output of the new positions, cache that includes them).
    """
    if not isinstance(state, KVState):
        kind = type(state).__name__
        raise KernelError(f"softmax_attention: state is a {kind}, accepted is a KVState (see empty_state)")
    check_present("softmax_attention", q=q, k=k, v=v, **{"state.k": state.k, "state.v": state.v})
    check_axes(
        "softmax_attention",
        {
            "q": (q, "batch new head d_head"),
            "k": (k, "batch new kv_head d_head"),
            "v": (v, "batch new kv_head d_v"),
            "state.k": (state.k, "batch kept kv_head d_head"),
            "state.v": (state.v, "batch kept kv_head d_v"),
            "sink": (sink, "head"),
        },
    )
    _check_options(scale, window)
    keys, values = torch.cat([state.k, k], dim=1), torch.cat([state.v, v], dim=1)
    output = _last_rows(q, keys, values, scale, window, sink, backend)
    kept = keys.shape[1] if window is None else min(keys.shape[1], window - 1)
    start = keys.shape[1] - kept
    return output, KVState(k=keys[:, start:], v=values[:, start:], length=state.length + k.shape[1])


@without_autocast
def _last_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, sink: Tensor | None,
    backend: str | None,
) -> Tensor:  # fmt: skip
    """Output of the last positions: one of them by the kernel that splits the keys, where it applies."""
    options = {"scale": scale, "window": window, "sink": sink}
    if q.shape[1] > 1:
        return softmax_attention(q, k, v, **options, backend=backend)
    unfit = step_unfit({"d_head": q.shape[-1], "d_v": v.shape[-1]}, q, k, v, sink)
    if resolve_backend("softmax_attention", backend, q, unfit) == "triton":
        from kernels.triton import decode_attention

        _check(q, k, v, scale, window, sink)
        return decode_attention.softmax_step(q[:, 0], k, v, **options)[:, None]
    return parallel(q, k, v, **options)


@without_autocast
def recurrent(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Sink | None = None,
) -> Output:
    """Token by token through `step` and a growing cache. Options as in `pattern`."""
    _check(q, k, v, scale, window, sink)
    state = KVState(k=k[:, :0], v=v[:, :0], length=0)
    outputs = []
    for t in range(q.shape[1]):
        at = slice(t, t + 1)
        output, state = step(
            q[:, at], k[:, at], v[:, at], state, scale=scale, window=window, sink=sink, backend="torch"
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def softmax_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Sink | None = None,
    form: str = "chunked",
    backend: str | None = None,
) -> Output:
    """Softmax attention in a named form ("parallel", "chunked", "recurrent"). Options as in `pattern`.

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.
    """
    _check(q, k, v, scale, window, sink)
    unfit = triton_unfit(form, {"d_head": q.shape[-1], "d_v": v.shape[-1]}, q, k, v)
    if resolve_backend("softmax_attention", backend, q, unfit) == "triton":
        from kernels.triton import softmax_attention as fused

        q, scale = _positive_scale(q, scale)
        return fused.softmax_attention(q, k, v, scale=scale, window=window, sink=sink)[0]
    forms = {"parallel": parallel, "chunked": chunked, "recurrent": recurrent}
    return resolve_form("softmax_attention", form, forms)(q, k, v, scale=scale, window=window, sink=sink)


def _blocked(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(q, k, v)
    heads_first = [t.to(acc).transpose(1, 2) for t in (q, k, v)]
    sink = None if sink is None else _sink(sink, acc)
    return apply("softmax_attention", BlockedSoftmax, *heads_first, sink, _scale(q, scale), window)


def _sink(sink: Sink, acc: torch.dtype) -> Sink:
    """The sink in the accumulation dtype; infinity as the largest number, which takes every weight too."""
    return sink.to(acc).clamp(max=torch.finfo(acc).max)


def _positive_scale(q: Queries, scale: float | None) -> tuple[Queries, float]:
    """Queries and a scale above 0 for the same logits: what fused kernels take, in float32."""
    scale = _scale(q, scale)
    if abs(scale) < 1e-30:
        return q * scale, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _allowed(n_dest: int, n_src: int, window: int | None, device: torch.device) -> Tensor:
    """Mask [dest src]: True where the key is at or before the query and inside the window."""
    dest = torch.arange(n_src - n_dest, n_src, device=device)[:, None]
    src = torch.arange(n_src, device=device)[None, :]
    return (src <= dest) if window is None else (src <= dest) & (src > dest - window)


def _check_options(scale: float | None, window: int | None) -> None:
    if scale is not None:
        check_number("softmax_attention", "scale", scale)
    check_window("softmax_attention", window)


def _check(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, sink: Tensor | None
) -> None:
    check_present("softmax_attention", q=q, k=k, v=v)
    sizes = check_axes(
        "softmax_attention",
        {
            "q": (q, "batch dest head d_head"),
            "k": (k, "batch src kv_head d_head"),
            "v": (v, "batch src kv_head d_v"),
            "sink": (sink, "head"),
        },
    )
    check_groups("softmax_attention", sizes["head"], k=sizes["kv_head"])
    if not 1 <= sizes["dest"] <= sizes["src"]:
        raise KernelError(
            f"softmax_attention: {sizes['dest']} queries for {sizes['src']} keys, accepted are 1 to as many"
        )
    _check_options(scale, window)
