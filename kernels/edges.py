"""Implied attention on chosen (destination, source) edges, and the output with those edges cut.

For a set of edges: A on them, what A's rows were divided by, what they add to the output, and the output
without them.
Memory is linear in sequence length plus edges; no [dest src] matrix is made. Each function computes the
same A as the `pattern` of its operator. Everything is differentiable, once where an operator's chunked form
is.

`weights` functions give 0 for an edge that does not exist: a source after its destination, before the
start, or outside a window. `Edges` itself holds existing edges only, each once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import KernelError, gated_linear_attention, selective_scan, softmax_attention
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_count,
    check_number,
    check_present,
    check_window,
    without_autocast,
)
from kernels.edge_set import Between, Edges, LogDecayBetween, Placed, blockwise, check_range


@dataclass(frozen=True, kw_only=True)
class EdgeResult:
    """What chosen edges do.

    Attributes:
        weights: A on the edges.
        normaliser: What A's rows were divided by: softmax the log of the denominator, linear attention the
        denominator;
            None where nothing divides.
        contribution: What the edges add to the output.
        cut: The output without them; the other weights as they were, or divided anew if `renormalise`.
    """

    weights: Float[Tensor, "n unit"]
    normaliser: Float[Tensor, "batch seq unit"] | None
    contribution: Float[Tensor, "batch seq *values"]
    cut: Float[Tensor, "batch seq *values"]


def softmax_edges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Edges,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    renormalise: bool = False,
) -> EdgeResult:
    """Edges of softmax attention; options as in `softmax_attention.pattern`.

    Args:
        renormalise: Divide what is left of a row anew, as if the cut logits were -inf. A row that loses
        every weight is 0.
    """
    output = softmax_attention.chunked(q, k, v, scale=scale, window=window, sink=sink)
    check_range(edges, q)
    lse = softmax_attention.logsumexp(q, k, scale=scale, window=window, sink=sink).transpose(1, 2)
    weights = softmax_weights(q, k, edges, lse, scale=scale, window=window)
    contribution = edge_sum(weights, _to_heads(v, q.shape[2]), edges)
    cut = _without(output, contribution, _row_sum(weights, edges, q) if renormalise else None)
    return EdgeResult(weights=weights, normaliser=lse, contribution=contribution, cut=cut)


@without_autocast
def softmax_weights(
    q: Float[Tensor, "batch seq head d_head"],
    k: Float[Tensor, "batch seq kv_head d_head"],
    edges: Placed,
    lse: Float[Tensor, "batch seq head"],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "n head"]:
    """exp(score - logsumexp) on edges."""
    check_present("edges", q=q, k=k)
    check_axes("edges", {"q": (q, "batch seq head d_head"), "k": (k, "batch seq kv_head d_head")})
    if scale is not None:
        check_number("edges", "scale", scale)
    check_window("edges", window)
    acc, scale = accumulation_dtype(q, k), q.shape[-1] ** -0.5 if scale is None else scale

    def block(at: Placed) -> Tensor:
        keys = _to_heads(at.at_src(k)[:, None], q.shape[2])[:, 0].to(acc)
        logs = (at.at_dest(q).to(acc) * keys).sum(dim=-1) * scale - at.at_dest(lse)
        return torch.exp(logs.masked_fill(~at.exists(window)[:, None], -torch.inf))

    return blockwise(block, edges, q[0, 0].numel())


def linear_edges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Edges,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False,
    eps: float = 0.0,
    renormalise: bool = False,
) -> EdgeResult:
    """Edges of (gated) linear attention from the zero state; options as in `gated_linear_attention.pattern`.

    Args:
        renormalise: Take the cut edges out of the denominator too; needs `normalise`.
    """
    options = {"scale": scale, "normalise": normalise, "eps": eps}
    options |= {"log_decay": log_decay, "k_weight": k_weight}
    output = gated_linear_attention.chunked(q, k, v, **options)[0]
    check_range(edges, v)
    if renormalise and not normalise:
        raise KernelError("edges: renormalise=True needs normalise=True, got normalise=False")
    gates = {"log_decay": log_decay, "k_weight": k_weight}
    denominator = None
    if normalise:
        denominator = linear_denominator(q, k, n_heads=v.shape[2], scale=scale, eps=eps, **gates)
    weights = linear_weights(q, k, edges, denominator, n_heads=v.shape[2], scale=scale, **gates)
    contribution = edge_sum(weights, v, edges)
    cut = _without(output, contribution, _row_sum(weights, edges, v) if renormalise else None)
    return EdgeResult(weights=weights, normaliser=denominator, contribution=contribution, cut=cut)


@without_autocast
def linear_weights(
    q: Float[Tensor, "batch seq _ d_k"],
    k: Float[Tensor, "batch seq _ d_k"],
    edges: Placed,
    denominator: Float[Tensor, "batch seq head"] | None = None,
    *,
    n_heads: int,
    log_decay: Tensor | None = None,
    k_weight: Float[Tensor, "batch seq head"] | None = None,
    scale: float = 1.0,
    between: LogDecayBetween | None = None,
) -> Float[Tensor, "n head"]:
    """scale sum_d q k w exp(sum of the log decays between) on edges, divided by the denominator if there is
    one.

    `between` is `decay_between(log_decay, ...)` where it is at hand from an earlier call.
    """
    check_present("edges", q=q, k=k)
    check_axes("edges", {"q": (q, "batch seq q_head d_k"), "k": (k, "batch seq k_head d_k")})
    check_number("edges", "scale", scale)
    acc = accumulation_dtype(q, k, log_decay, k_weight)
    if between is None and log_decay is not None:
        between = decay_between(log_decay, (*q.shape[:2], n_heads))

    def block(at: Placed) -> Tensor:
        exists = at.exists()[:, None]
        queries, keys = at.at_dest(q), at.at_src(k)
        if queries.shape[1] != keys.shape[1] or between is not None and between.per_channel:
            queries, keys = (_to_heads(x[:, None], n_heads)[:, 0] for x in (queries, keys))
        products = queries.to(acc) * keys
        decay = None if between is None else torch.exp(between(at)).to(acc)
        if decay is not None and between.per_channel:
            weights = (products * decay).sum(dim=-1) * scale
        else:
            weights = products.sum(dim=-1) * scale
            weights = weights.repeat_interleave(n_heads // weights.shape[1], dim=1)
            weights = weights if decay is None else weights * decay
        if k_weight is not None:
            weights = weights * at.at_src(k_weight)
        if denominator is not None:
            weights = weights / at.at_dest(denominator)
        return weights.masked_fill(~exists, 0)

    return blockwise(block, edges, n_heads * q.shape[-1])


def decay_between(log_decay: Tensor, shape: tuple[int, int, int]) -> LogDecayBetween:
    """Sums of log decays between positions, for `linear_weights`; `shape` is (batch, seq, head)."""
    return LogDecayBetween(log_decay.expand(shape) if log_decay.ndim == 1 else log_decay)


def linear_denominator(
    q: Float[Tensor, "batch seq _ d_k"],
    k: Float[Tensor, "batch seq _ d_k"],
    *,
    n_heads: int,
    log_decay: Tensor | None = None,
    k_weight: Float[Tensor, "batch seq head"] | None = None,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Float[Tensor, "batch seq head"]:
    """What `normalise` divides each row of linear attention by, in linear time and memory."""
    ones = torch.ones(*q.shape[:2], n_heads, 1, dtype=accumulation_dtype(q, k), device=q.device)
    gates = {"log_decay": log_decay, "k_weight": k_weight}
    return gated_linear_attention.chunked(q, k, ones, scale=scale, **gates)[0][..., 0] + eps


def scan_edges(
    u: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    edges: Edges,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> EdgeResult:
    """Edges of the selective scan from the zero state, per channel. D is no edge; the gate multiplies what
    edges add.
    """
    output = selective_scan.chunked(u, dt, A_log, B, C, D=D, z=z)[0]
    check_range(edges, u)
    weights = scan_weights(dt, A_log, B, C, edges)
    contribution = edge_sum(weights, u, edges)
    if z is not None:
        contribution = contribution * torch.nn.functional.silu(z)
    return EdgeResult(weights=weights, normaliser=None, contribution=contribution, cut=output - contribution)


@without_autocast
def scan_weights(
    dt: Float[Tensor, "batch seq channel"],
    A_log: Float[Tensor, "channel d_state"],
    B: Float[Tensor, "batch seq d_state"],
    C: Float[Tensor, "batch seq d_state"],
    edges: Placed,
    *,
    elapsed: Between | None = None,
) -> Float[Tensor, "n channel"]:
    """sum_n C[n] exp(A[c, n] sum of dt between) B[n] dt on edges.

    `elapsed` is `Between(dt)` where it is at hand from an earlier call.
    """
    terms = _scan_terms(dt, A_log, B, C, elapsed)

    def block(at: Placed) -> Tensor:
        read_write, decay = terms(at)
        return torch.einsum("ns,nsc->nc", read_write, decay) * at.at_src(dt)

    return blockwise(block, edges, A_log.numel())


@without_autocast
def scan_weights_by_state(
    dt: Float[Tensor, "batch seq channel"],
    A_log: Float[Tensor, "channel d_state"],
    B: Float[Tensor, "batch seq d_state"],
    C: Float[Tensor, "batch seq d_state"],
    edges: Placed,
    *,
    elapsed: Between | None = None,
) -> Float[Tensor, "n d_state channel"]:
    """`scan_weights` split by state index, of which it is the sum."""
    terms = _scan_terms(dt, A_log, B, C, elapsed)

    def block(at: Placed) -> Tensor:
        read_write, decay = terms(at)
        return decay * read_write[..., None] * at.at_src(dt)[:, None]

    return blockwise(block, edges, A_log.numel())


def _scan_terms(
    dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, elapsed: Between | None
) -> Callable[[Placed], tuple[Float[Tensor, "n d_state"], Float[Tensor, "n d_state channel"]]]:
    """C B and the decay of edges; the decay is 0 where there is no edge."""
    acc = accumulation_dtype(dt, A_log, B, C)
    rates = -torch.exp(A_log.to(acc)).transpose(0, 1)
    elapsed = Between(dt) if elapsed is None else elapsed

    def at_edges(at: Placed) -> tuple[Tensor, Tensor]:
        # Masked before exp: a source in the future would overflow.
        between = elapsed(at).to(acc).masked_fill(~at.exists()[:, None], torch.inf)
        return (at.at_dest(C) * at.at_src(B)).to(acc), torch.exp(between[:, None, :] * rates)

    return at_edges


def composed_weights(
    weights_at: Callable[[Placed], Float[Tensor, "n unit"]],
    edges: Edges,
    taps: Float[Tensor, "tap batch src unit"],
    *,
    skip: Float[Tensor, " unit"] | None = None,
) -> Float[Tensor, "n unit"]:
    """Edges of a block whose values come through a short convolution: sum_l (A + skip I)[dest, src + l]
    taps[l, src].

    Args:
        weights_at: Edges of the inner operator, such as `scan_weights` with its inputs; 0 where there is
        none.
        taps: What the convolution (and a frozen activation after it) puts of position src into the value at
        src + l.
        skip: A multiple of the value that reaches its own position directly (Mamba's D).
    """
    check_axes("edges", {"taps": (taps, "tap batch src unit")})
    total = None
    for lag in range(taps.shape[0]):
        at = edges.shifted(lag)
        weights = weights_at(at)
        if skip is not None:
            weights = weights + skip * (at.src == at.dest)[:, None]
        term = weights * edges.at_src(taps[lag])
        total = term if total is None else total + term
    return total


def conv_taps(
    weight: Float[Tensor, "channel width"],
    activation: Float[Tensor, "batch seq channel"] | None = None,
    *,
    shape: tuple[int, int],
) -> Float[Tensor, "tap batch src channel"]:
    """Taps of a causal convolution for `composed_weights`.

    Args:
        activation: Factor at the convolution's output, such as sigmoid(pre) for a SiLU frozen at this input.
        shape: (batch, seq).
    """
    check_present("edges", weight=weight)
    axes = {"weight": (weight, "channel width"), "activation": (activation, "batch seq channel")}
    check_axes("edges", axes)
    taps = weight.flip(1).transpose(0, 1)[:, None, None].expand(-1, *shape, -1)
    if activation is None:
        return taps
    later = [torch.nn.functional.pad(activation, (0, 0, 0, lag))[:, lag:] for lag in range(len(taps))]
    return taps * torch.stack(later)


def abs_row_sum(
    pattern_rows: Callable[[slice], Float[Tensor, "batch unit rows src"]], seq: int, *, rows: int = 64
) -> Float[Tensor, "batch seq unit"]:
    """Sum of |A| over each row, a block of rows at a time: time is quadratic, memory is not.

    Args:
        pattern_rows: A of chosen rows, such as `gated_linear_attention.pattern` with its `rows` open.
    """
    check_count("edges", "rows", rows)
    blocks = (slice(start, min(start + rows, seq)) for start in range(0, seq, rows))
    return torch.cat([pattern_rows(block).abs().sum(dim=-1) for block in blocks], dim=-1).transpose(1, 2)


def edge_sum(weights: Float[Tensor, "n unit"], v: Tensor, edges: Edges) -> Tensor:
    """What edges add to the output: weights times the values at the sources, summed at the destinations.

    v is [batch seq unit d_v], or [batch seq unit] where each unit's value is one number.
    """
    result = torch.zeros_like(v, dtype=torch.promote_types(v.dtype, weights.dtype)).flatten(0, 1)
    start = 0
    for at in edges.blocks(v[0, 0].numel()):
        part = weights[start : start + at.src.numel()]
        values = at.at_src(v) * (part[..., None] if v.ndim == 4 else part)
        result = result.index_add(0, at.batch * v.shape[1] + at.dest, values.to(result.dtype))
        start += at.src.numel()
    return result.view(v.shape)


def _to_heads(x: Tensor, n_heads: int) -> Tensor:
    """[batch seq group d] with each group repeated for its heads."""
    return x if x.shape[2] == n_heads else x.repeat_interleave(n_heads // x.shape[2], dim=2)


def _row_sum(weights: Tensor, edges: Edges, like: Tensor) -> Tensor:
    """Sum of the weights at each destination [batch seq head 1]."""
    rows = weights.new_zeros(like.shape[0] * like.shape[1], weights.shape[1])
    rows = rows.index_add(0, edges.batch * like.shape[1] + edges.dest, weights)
    return rows.view(*like.shape[:2], -1, 1)


def _without(output: Tensor, contribution: Tensor, removed: Tensor | None) -> Tensor:
    left = output - contribution
    if removed is None:
        return left
    kept = 1 - removed
    # Where rounding is all that is left of a row, nothing is.
    gone = kept <= 8 * torch.finfo(kept.dtype).eps
    return torch.where(gone, 0, left / torch.where(gone, 1, kept))
