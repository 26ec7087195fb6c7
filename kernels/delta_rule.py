"""Delta rule: each step first reads what the state holds for its key, then writes the difference;
optionally gated.

S' = exp(log_decay_t) S_{t-1};  w_t = beta_t (v_t - S'^T k_t);  S_t = S' + k_t w_t^T;  o_t = scale q_t^T S_t
A = scale (Q K^T * G) (I + tril(diag(beta) (K K^T * G), -1))^{-1} diag(beta),  G_ij = exp(sum_{r=j+1..i}
log_decay_r) for j <= i

Keys come normalised and are used as given; beta in (0, 2]. Without log_decay, G is the causal mask.
Source: Yang et al. 2024, arXiv:2406.06484; gated: Yang et al. 2024, arXiv:2412.06464.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import KernelError
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_count,
    check_number,
    check_present,
    resolve_backend,
    resolve_form,
    without_autocast,
)
from kernels.segment_sum import segment_sum, suffix_sum

OPERATOR = "delta_rule"
Keys = Float[Tensor, "batch seq head d_k"]
Values = Float[Tensor, "batch seq head d_v"]
Steps = Float[Tensor, "batch seq head"]
State = Float[Tensor, "batch head d_k d_v"]


@without_autocast
def pattern(
    q: Keys, k: Keys, beta: Steps, *, log_decay: Steps | None = None, scale: float = 1.0
) -> Float[Tensor, "batch head dest=seq src=seq"]:
    """Implied attention, signed: later writes to the same key take an earlier value's weight away.

    Args:
        beta: Writing strength of each step.
        log_decay: Natural log of each step's decay, at most 0.
        scale: Multiplies q.

    Raises:
        KernelError: Shapes that disagree.
    """
    _check(q, k, k, beta, log_decay, None, scale)
    q, k, beta, decay = _heads_first(None, q, k, beta, log_decay)
    return _pattern(q * scale, k, beta, decay)


@without_autocast
def parallel(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Steps,
    *,
    log_decay: Steps | None = None,
    scale: float = 1.0,
    state: State | None = None,
) -> tuple[Values, State]:
    """Readable form: pattern @ v, plus what the initial state adds.

    Returns:
        (output [batch seq head d_v], state after the last step [batch head d_k d_v]).
    """
    _check(q, k, v, beta, log_decay, state, scale)
    *inputs, values = _heads_first(state, q, k, beta, log_decay, v)
    output, end = _quadratic(inputs[0] * scale, *inputs[1:], values, _start(state, inputs[1], values))
    return output.transpose(1, 2).to(v.dtype), end


@without_autocast
def chunked(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Steps,
    *,
    log_decay: Steps | None = None,
    scale: float = 1.0,
    state: State | None = None,
    chunk: int = 64,
) -> tuple[Values, State]:
    """Linear-time form: the quadratic form within chunks, each recomputed in the backward; the state
    between them.
    """
    _check(q, k, v, beta, log_decay, state, scale)
    check_count(OPERATOR, "chunk", chunk)
    q_h, k_h, beta_h, decay, values = _heads_first(state, q, k, beta, log_decay, v)
    end, outputs = _start(state, k_h, values), []
    for start in range(0, q.shape[1], chunk):
        t = slice(start, start + chunk)
        inputs = q_h[:, :, t] * scale, k_h[:, :, t], beta_h[:, :, t], decay[:, :, t], values[:, :, t], end
        output, end = checkpoint(_quadratic, *inputs, use_reentrant=False, preserve_rng_state=False)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(v.dtype), end


@without_autocast
def step(
    q: Float[Tensor, "batch head d_k"],
    k: Float[Tensor, "batch head d_k"],
    v: Float[Tensor, "batch head d_v"],
    beta: Float[Tensor, "batch head"],
    *,
    log_decay: Float[Tensor, "batch head"] | None = None,
    scale: float = 1.0,
    state: State | None = None,
) -> tuple[Float[Tensor, "batch head d_v"], State]:
    """One position, constant time. Returns (output [batch head d_v], next state)."""
    _check(q, k, v, beta, log_decay, state, scale, at="batch")
    acc = accumulation_dtype(q, k, v, beta, log_decay, state)
    dtype, (q, k, v, beta) = v.dtype, (t.to(acc) for t in (q, k, v, beta))
    state = _start(state, k, v)
    if log_decay is not None:
        state = state * torch.exp(log_decay.to(acc))[..., None, None]
    write = beta[..., None] * (v - torch.einsum("bhdv,bhd->bhv", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return torch.einsum("bhd,bhdv->bhv", q * scale, state).to(dtype), state


@without_autocast
def recurrent(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Steps,
    *,
    log_decay: Steps | None = None,
    scale: float = 1.0,
    state: State | None = None,
) -> tuple[Values, State]:
    """Token by token through `step`. Arguments and results as in `parallel`."""
    _check(q, k, v, beta, log_decay, state, scale)
    outputs = []
    for t in range(q.shape[1]):
        decay = None if log_decay is None else log_decay[:, t]
        output, state = step(q[:, t], k[:, t], v[:, t], beta[:, t], log_decay=decay, scale=scale, state=state)
        outputs.append(output)
    return torch.stack(outputs, dim=1), state


@without_autocast
def writes(
    k: Keys, v: Values, beta: Steps, *, log_decay: Steps | None = None, state: State | None = None
) -> Values:
    """w_t, what each step adds to the state for its key: beta times the value less what was already stored
    for it.
    """
    _check(k, k, v, beta, log_decay, state, 1.0)
    _, keys, beta, decay, values = _heads_first(state, k, k, beta, log_decay, v)
    kept = torch.matmul(keys * torch.exp(decay.cumsum(dim=-1))[..., None], _start(state, keys, values))
    return torch.matmul(_transform(keys, beta, _between(decay)), values - kept).transpose(1, 2).to(v.dtype)


def delta_rule(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Steps,
    *,
    log_decay: Steps | None = None,
    scale: float = 1.0,
    state: State | None = None,
    form: str = "chunked",
    backend: str | None = None,
) -> tuple[Values, State]:
    """(Gated) delta rule in a named form ("parallel", "chunked", "recurrent"). Arguments and results as in
    `parallel`.

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.
    """
    _check(q, k, v, beta, log_decay, state, scale)
    resolve_backend(OPERATOR, backend, q)
    function = resolve_form(
        OPERATOR, form, {"parallel": parallel, "chunked": chunked, "recurrent": recurrent}
    )
    return function(q, k, v, beta, log_decay=log_decay, scale=scale, state=state)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    scale: float,
    *,
    at: str = "batch seq",
) -> None:
    """Everything an evaluation takes; `at` are the axes before the heads."""
    check_present(OPERATOR, q=q, k=k, v=v, beta=beta)
    check_number(OPERATOR, "scale", scale)
    sizes = check_axes(
        OPERATOR,
        {
            "q": (q, f"{at} head d_k"),
            "k": (k, f"{at} head d_k"),
            "v": (v, f"{at} head d_v"),
            "beta": (beta, f"{at} head"),
            "log_decay": (log_decay, f"{at} head"),
            "state": (state, "batch head d_k d_v"),
        },
    )
    if sizes.get("seq", 1) < 1:
        raise KernelError(f"{OPERATOR}: q has shape {tuple(q.shape)}, accepted are sequences of at least 1")


def _heads_first(
    state: Tensor | None, q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor | None, *values: Tensor
) -> list[Tensor]:
    """q, k, beta, the log decay (0 if there is none) and values with the head axis before the sequence, in
    the accumulation dtype of them and the state.
    """
    acc = accumulation_dtype(state, q, k, beta, log_decay, *values)
    log_decay = torch.zeros_like(beta) if log_decay is None else log_decay
    return [t.to(acc).transpose(1, 2) for t in (q, k, beta, log_decay, *values)]


def _start(state: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.to(v.dtype)


def _transform(k: Tensor, beta: Tensor, between: Tensor) -> Tensor:
    """(I + tril(diag(beta) (K K^T * G), -1))^{-1} diag(beta) [batch head seq seq]: from values to what is
    written.
    """
    overlap = (torch.matmul(k, k.transpose(-1, -2)) * between * beta[..., None]).tril(-1)
    return torch.linalg.solve_triangular(overlap, torch.diag_embed(beta), upper=False, unitriangular=True)


def _between(decay: Tensor) -> Tensor:
    causal = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device).tril()
    return torch.exp(segment_sum(decay).masked_fill(~causal, -torch.inf))


def _pattern(q: Tensor, k: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    between = _between(decay)
    return torch.matmul(torch.matmul(q, k.transpose(-1, -2)) * between, _transform(k, beta, between))


def _quadratic(
    q: Tensor, k: Tensor, beta: Tensor, decay: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and last state of a piece, heads first: A acts on the values less what the initial state
    already gives.
    """
    between = _between(decay)
    transform = _transform(k, beta, between)
    weights = torch.matmul(torch.matmul(q, k.transpose(-1, -2)) * between, transform)
    from_start = torch.exp(decay.cumsum(dim=-1))[..., None]
    new = v - torch.matmul(k * from_start, state)
    output = torch.matmul(weights, new) + torch.matmul(q * from_start, state)
    to_end = k * torch.exp(suffix_sum(decay, dim=-1))[..., None]
    written = torch.matmul(to_end.transpose(-1, -2), torch.matmul(transform, new))
    return output, from_start[..., -1:, :] * state + written
