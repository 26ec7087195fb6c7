"""S4D: a diagonal state-space model per channel whose parameters do not depend on content (zero-order hold).

abar = exp(dt A);  bbar = (abar - 1) / A B;  h_t = abar h_{t-1} + bbar u_t;
y_t = re_factor Re(sum_n C_n h_t[n]) + D u_t
K_l = re_factor Re(sum_n C_n bbar_n abar_n^l);  A_ij = K_{i-j}: a Toeplitz matrix, the same for every input.

Glossary: A complex with negative real part; dt = exp(log_dt), one a channel; re_factor 2 where one of each
conjugate pair is stored, 1 for a real or full state. Source: Gu et al. 2022, arXiv:2206.11893.
"""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

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

OPERATOR = "s4d"
COMPLEX = frozenset({"A", "B", "C", "state"})
Channels = Float[Tensor, "batch seq channel"]
LogStep = Float[Tensor, " channel"]
Modes = Complex[Tensor, "channel d_state"]
State = Complex[Tensor, "batch channel d_state"]


def kernel(
    log_dt: LogStep, A: Modes, B: Modes, C: Modes, seq: int, *, re_factor: float = 2.0
) -> Float[Tensor, "channel lag"]:
    """The convolution kernel K_l for lags 0 .. seq - 1."""
    _check_parameters(log_dt, A, B, C, re_factor)
    check_count(OPERATOR, "seq", seq)
    _, log_dt, A, B, C, _ = _accumulate(log_dt, log_dt, A, B, C, None)
    rate, write = _discrete(log_dt, A, B)
    return re_factor * torch.einsum("cn,cnl->cl", C * write, _powers(rate, seq)).real


def pattern(
    log_dt: LogStep, A: Modes, B: Modes, C: Modes, seq: int, *, re_factor: float = 2.0
) -> Float[Tensor, "channel dest=seq src=seq"]:
    """Implied attention, without D: kernel[i - j] at and below the diagonal."""
    return _toeplitz(kernel(log_dt, A, B, C, seq, re_factor=re_factor))


@without_autocast
def parallel(
    u: Channels,
    log_dt: LogStep,
    A: Modes,
    B: Modes,
    C: Modes,
    *,
    D: Float[Tensor, " channel"] | None = None,
    state: State | None = None,
    re_factor: float = 2.0,
) -> tuple[Channels, State]:
    """Readable form: pattern @ u per channel, plus what the initial state adds, plus D u.

    Returns:
        (y [batch seq channel], state after the last step, complex [batch channel d_state]).
    """
    _check(u, log_dt, A, B, C, D, state, re_factor)
    x, log_dt, A, B, C, state = _accumulate(u, log_dt, A, B, C, state)
    weights = pattern(log_dt, A, B, C, u.shape[1], re_factor=re_factor)
    y, state = _quadratic(x, weights, *_discrete(log_dt, A, B), re_factor * C, _start(state, x, A))
    return _skip(y, x, D).to(u.dtype), state


@without_autocast
def chunked(
    u: Channels,
    log_dt: LogStep,
    A: Modes,
    B: Modes,
    C: Modes,
    *,
    D: Float[Tensor, " channel"] | None = None,
    state: State | None = None,
    re_factor: float = 2.0,
    chunk: int = 64,
) -> tuple[Channels, State]:
    """Linear-time form: the pattern within chunks, the state between them. Arguments and results as in
    `parallel`.
    """
    _check(u, log_dt, A, B, C, D, state, re_factor)
    check_count(OPERATOR, "chunk", chunk)
    x, log_dt, A, B, C, state = _accumulate(u, log_dt, A, B, C, state)
    rate, write = _discrete(log_dt, A, B)
    weights = pattern(log_dt, A, B, C, min(chunk, u.shape[1]), re_factor=re_factor)
    state, outputs = _start(state, x, A), []
    for start in range(0, u.shape[1], chunk):
        y, state = _quadratic(x[:, start : start + chunk], weights, rate, write, re_factor * C, state)
        outputs.append(y)
    return _skip(torch.cat(outputs, dim=1), x, D).to(u.dtype), state


@without_autocast
def step(
    u: Float[Tensor, "batch channel"],
    log_dt: LogStep,
    A: Modes,
    B: Modes,
    C: Modes,
    *,
    D: Float[Tensor, " channel"] | None = None,
    state: State | None = None,
    re_factor: float = 2.0,
) -> tuple[Float[Tensor, "batch channel"], State]:
    """One position, constant time. Returns (y [batch channel], next state)."""
    _check(u, log_dt, A, B, C, D, state, re_factor, at="batch")
    x, log_dt, A, B, C, state = _accumulate(u, log_dt, A, B, C, state)
    rate, write = _discrete(log_dt, A, B)
    state = torch.exp(rate) * _start(state, x, A) + write * x[..., None]
    return _skip(re_factor * (C * state).sum(dim=-1).real, x, D).to(u.dtype), state


@without_autocast
def recurrent(
    u: Channels,
    log_dt: LogStep,
    A: Modes,
    B: Modes,
    C: Modes,
    *,
    D: Float[Tensor, " channel"] | None = None,
    state: State | None = None,
    re_factor: float = 2.0,
) -> tuple[Channels, State]:
    """Token by token through `step`. Arguments and results as in `parallel`."""
    _check(u, log_dt, A, B, C, D, state, re_factor)
    outputs = []
    for t in range(u.shape[1]):
        y, state = step(u[:, t], log_dt, A, B, C, D=D, state=state, re_factor=re_factor)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def s4d(
    u: Channels,
    log_dt: LogStep,
    A: Modes,
    B: Modes,
    C: Modes,
    *,
    D: Float[Tensor, " channel"] | None = None,
    state: State | None = None,
    re_factor: float = 2.0,
    form: str = "chunked",
    backend: str | None = None,
) -> tuple[Channels, State]:
    """S4D in a named form ("parallel", "chunked", "recurrent"). Arguments and results as in `parallel`.

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.
    """
    _check(u, log_dt, A, B, C, D, state, re_factor)
    resolve_backend(OPERATOR, backend, u)
    function = resolve_form(
        OPERATOR, form, {"parallel": parallel, "chunked": chunked, "recurrent": recurrent}
    )
    return function(u, log_dt, A, B, C, D=D, state=state, re_factor=re_factor)


def _accumulate(
    u: Tensor, log_dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """All in one accumulation dtype, A, B, C and the state in its complex one."""
    acc = accumulation_dtype(u, log_dt, A, B, C, state)
    wide = acc.to_complex()
    state = None if state is None else state.to(wide)
    return u.to(acc), log_dt.to(acc), A.to(wide), B.to(wide), C.to(wide), state


def _discrete(log_dt: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """dt A and bbar; exp(x) - 1 is computed so that small x keep their digits."""
    rate = torch.exp(log_dt)[:, None] * A
    half = torch.sin(rate.imag / 2)
    real = torch.expm1(rate.real) * torch.cos(rate.imag) - 2 * half * half
    return rate, torch.complex(real, torch.exp(rate.real) * torch.sin(rate.imag)) / A * B


def _powers(rate: Tensor, stop: int) -> Tensor:
    """abar^l for l in 0 .. stop - 1 [channel d_state l]."""
    return torch.exp(rate[..., None] * torch.arange(stop, device=rate.device))


def _quadratic(
    u: Tensor, weights: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and last state of a piece: its part of the pattern times u, and what the state before it
    adds.
    """
    n = u.shape[1]
    powers = _powers(rate, n + 1)
    y = torch.einsum("cij,bjc->bic", weights[:, :n, :n], u)
    y = y + torch.einsum("cni,bcn->bic", read[..., None] * powers[..., 1:], state).real
    to_end = write[..., None] * powers[..., :-1].flip(-1)
    return y, powers[..., n] * state + torch.einsum("cnj,bjc->bcn", to_end, u.to(to_end.dtype))


def _toeplitz(values: Tensor) -> Tensor:
    position = torch.arange(values.shape[-1], device=values.device)
    lag = position[:, None] - position[None, :]
    return torch.where(lag >= 0, values[:, lag.clamp(min=0)], values.new_zeros(()))


def _start(state: Tensor | None, x: Tensor, A: Tensor) -> Tensor:
    return A.new_zeros(x.shape[0], *A.shape) if state is None else state


def _skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    return y if D is None else y + D.to(y.dtype) * x


def _check_parameters(
    log_dt: Tensor, A: Tensor, B: Tensor, C: Tensor, re_factor: float
) -> dict[str, tuple[Tensor, str]]:
    """The axes of what does not depend on the input, checked."""
    check_present(OPERATOR, log_dt=log_dt, A=A, B=B, C=C)
    check_number(OPERATOR, "re_factor", re_factor)
    axes = {
        "log_dt": (log_dt, "channel"),
        "A": (A, "channel d_state"),
        "B": (B, "channel d_state"),
        "C": (C, "channel d_state"),
    }
    check_axes(OPERATOR, axes, may_be_complex=COMPLEX)
    return axes


def _check(
    u: Tensor,
    log_dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    re_factor: float,
    *,
    at: str = "batch seq",
) -> None:
    """Everything an evaluation takes; `at` are the axes of u before its channels."""
    axes = _check_parameters(log_dt, A, B, C, re_factor)
    check_present(OPERATOR, u=u)
    axes |= {
        "u": (u, f"{at} channel"),
        "D": (D, "channel"),
        "state": (state, "batch channel d_state"),
    }
    sizes = check_axes(OPERATOR, axes, may_be_complex=COMPLEX)
    if sizes.get("seq", 1) < 1:
        raise KernelError(f"{OPERATOR}: u has shape {tuple(u.shape)}, accepted are sequences of at least 1")
