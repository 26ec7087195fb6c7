"""Mamba-1's selective scan (S6): one small diagonal state-space model per channel, driven by content.

h_t[c, n] = exp(dt_t[c] A[c, n]) h_{t-1}[c, n] + dt_t[c] B_t[n] u_t[c];
y_t[c] = (sum_n C_t[n] h_t[c, n] + D[c] u_t[c]) SiLU(z_t[c])
A_ij[c] = sum_n C_i[n] exp(A[c, n] sum_{r=j+1..i} dt_r[c]) B_j[n] dt_j[c]

Glossary: u input of the scan; dt step size (after softplus); A = -exp(A_log) decay rates; B writes, C
reads; D skip; z gate.
Source: Gu and Dao 2023, arXiv:2312.00752. B is discretised as dt B (Euler), A by the exponential.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels import KernelError
from kernels.checkpointed_scan import CheckpointedScan
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_present,
    check_rows,
    resolve_backend,
    resolve_form,
    step_unfit,
    triton_unfit,
    without_autocast,
)
from kernels.first_order import apply
from kernels.segment_sum import segment_sum, suffix_sum

OPERATOR = "selective_scan"
Channels = Float[Tensor, "batch seq channel"]
Rates = Float[Tensor, "channel d_state"]
Shared = Float[Tensor, "batch seq d_state"]
State = Float[Tensor, "batch channel d_state"]


def softplus_dt(dt_raw: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """softplus(dt_raw + dt_bias): the positive step size. Linear only where exp(-x) is below rounding."""
    x = dt_raw if dt_bias is None else dt_raw + dt_bias
    return F.softplus(x, threshold=40.0)


@without_autocast
def pattern_by_state(
    dt: Channels,
    A_log: Rates,
    B: Shared,
    C: Shared,
    *,
    channels: slice | None = None,
    rows: slice | None = None,
) -> Float[Tensor, "batch channel d_state dest src"]:
    """Implied attention split by state index: `pattern` is its sum over d_state. Memory d_state times that
    of `pattern`.
    """
    _check(dt, dt, A_log, B, C)
    return torch.stack(list(_terms(dt, A_log, B, C, channels, rows)), dim=2)


@without_autocast
def pattern(
    dt: Channels,
    A_log: Rates,
    B: Shared,
    C: Shared,
    *,
    channels: slice | None = None,
    rows: slice | None = None,
) -> Float[Tensor, "batch channel dest src"]:
    """Implied attention of the scan per channel, signed; without D and without the gate.

    Args:
        dt: Step sizes, after softplus.
        A_log: log of the decay rates.
        B, C: Shared by all channels.
        channels: Only these channels (memory is batch x channels x rows x seq).
        rows: Only these destinations.

    Raises:
        KernelError: Shapes that disagree, rows that are not consecutive.
    """
    _check(dt, dt, A_log, B, C)
    return sum(_terms(dt, A_log, B, C, channels, rows))


@without_autocast
def parallel(
    u: Channels,
    dt: Channels,
    A_log: Rates,
    B: Shared,
    C: Shared,
    *,
    D: Float[Tensor, " channel"] | None = None,
    z: Channels | None = None,
    state: State | None = None,
) -> tuple[Channels, State]:
    """Readable form: pattern @ u per channel, plus what the initial state adds, plus D u, times SiLU(z).

    Returns:
        (y [batch seq channel], state after the last step [batch channel d_state]).
    """
    _check(u, dt, A_log, B, C, D, z, state)
    dtype, (u, dt, B, C) = u.dtype, _accumulate(state, u, dt, B, C)
    y = torch.einsum("bcij,bjc->bic", pattern(dt, A_log, B, C), u)
    A = -torch.exp(A_log.to(u.dtype))
    to_end = torch.exp(suffix_sum(dt, dim=1)[..., None] * A)
    last = torch.einsum("bjcn,bjc,bjn->bcn", to_end, dt * u, B)
    if state is not None:
        from_start = torch.exp(dt.cumsum(dim=1)[..., None] * A)
        y = y + torch.einsum("bin,bicn,bcn->bic", C, from_start, state.to(u.dtype))
        last = last + from_start[:, -1] * state
    return _finish(y, u, D, z).to(dtype), last


@without_autocast
def chunked(
    u: Channels,
    dt: Channels,
    A_log: Rates,
    B: Shared,
    C: Shared,
    *,
    D: Float[Tensor, " channel"] | None = None,
    z: Channels | None = None,
    state: State | None = None,
) -> tuple[Channels, State]:
    """Linear-time form: chunk by chunk, with a backward that recomputes the states. Arguments and results
    as in `parallel`.
    """
    _check(u, dt, A_log, B, C, D, z, state)
    dtype, (u, dt, B, C) = u.dtype, _accumulate(state, u, dt, B, C)
    A = -torch.exp(A_log.to(u.dtype)).transpose(0, 1)
    start = u.new_zeros(u.shape[0], *A.shape) if state is None else state.to(u.dtype).transpose(1, 2)
    y, last = apply(OPERATOR, CheckpointedScan, u, dt, A.contiguous(), B, C, start)
    return _finish(y, u, D, z).to(dtype), last.transpose(1, 2)


@without_autocast
def step(
    u: Float[Tensor, "batch channel"],
    dt: Float[Tensor, "batch channel"],
    A_log: Rates,
    B: Float[Tensor, "batch d_state"],
    C: Float[Tensor, "batch d_state"],
    *,
    D: Float[Tensor, " channel"] | None = None,
    z: Float[Tensor, "batch channel"] | None = None,
    state: State | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch channel"], State]:
    """One position, constant time. Returns (y [batch channel], next state).

    `backend` as in `selective_scan`; Triton's step has no gradient.
    """
    _check(u, dt, A_log, B, C, D, z, state, one_step=True)
    unfit = step_unfit({"d_state": A_log.shape[1]}, u, dt, A_log, B, C, D, z, state)
    if resolve_backend(OPERATOR, backend, u, unfit) == "triton":
        from kernels.triton import decode

        return decode.scan_step(u, dt, A_log, B, C, D=D, z=z, state=state)
    dtype, (u, dt, B, C) = u.dtype, _accumulate(state, u, dt, B, C)
    written = (dt * u)[..., None] * B[:, None, :]
    if state is not None:
        written = written + torch.exp(dt[..., None] * -torch.exp(A_log.to(u.dtype))) * state
    y = torch.einsum("bcn,bn->bc", written, C)
    return _finish(y, u, D, z).to(dtype), written


@without_autocast
def recurrent(
    u: Channels,
    dt: Channels,
    A_log: Rates,
    B: Shared,
    C: Shared,
    *,
    D: Float[Tensor, " channel"] | None = None,
    z: Channels | None = None,
    state: State | None = None,
) -> tuple[Channels, State]:
    """Token by token through `step`. Arguments and results as in `parallel`."""
    _check(u, dt, A_log, B, C, D, z, state)
    outputs = []
    for t in range(u.shape[1]):
        gate = None if z is None else z[:, t]
        y, state = step(
            u[:, t], dt[:, t], A_log, B[:, t], C[:, t], D=D, z=gate, state=state, backend="torch"
        )
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def selective_scan(
    u: Channels,
    dt: Channels,
    A_log: Rates,
    B: Shared,
    C: Shared,
    *,
    D: Float[Tensor, " channel"] | None = None,
    z: Channels | None = None,
    state: State | None = None,
    form: str = "chunked",
    backend: str | None = None,
) -> tuple[Channels, State]:
    """Selective scan in a named form ("parallel", "chunked", "recurrent"). Arguments and results as in
    `parallel`.

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.
    """
    _check(u, dt, A_log, B, C, D, z, state)
    unfit = triton_unfit(form, {"d_state": A_log.shape[-1]}, u, dt, A_log, B, C, z, state)
    if resolve_backend(OPERATOR, backend, u, unfit) == "triton":
        from kernels.triton import selective_scan as fused

        return fused.selective_scan(u, dt, A_log, B, C, D=D, z=z, state=state)
    function = resolve_form(
        OPERATOR, form, {"parallel": parallel, "chunked": chunked, "recurrent": recurrent}
    )
    return function(u, dt, A_log, B, C, D=D, z=z, state=state)


def _terms(
    dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, channels: slice | None, rows: slice | None
) -> Iterator[Float[Tensor, "batch channel dest src"]]:
    """The implied attention of one state index after the other."""
    rows, channels = check_rows(OPERATOR, rows, dt.shape[1]), channels or slice(None)
    if not isinstance(channels, slice):
        raise KernelError(f"{OPERATOR}: channels is {channels!r}, accepted is None or a slice")
    dt, B, C = _accumulate(None, dt, B, C)
    A = -torch.exp(A_log.to(dt.dtype))[channels]
    elapsed = segment_sum(dt.transpose(1, 2)[:, channels], rows)
    position = torch.arange(dt.shape[1], device=dt.device)
    later = position[None, :] > position[rows, None]
    write = dt.transpose(1, 2)[:, channels]
    for n in range(A.shape[1]):
        decay = torch.exp((elapsed * A[:, n, None, None]).masked_fill(later, -torch.inf))
        yield C[:, None, rows, n, None] * decay * (write * B[:, None, :, n])[:, :, None, :]


def _accumulate(state: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Tensors in the accumulation dtype of them and a state."""
    acc = accumulation_dtype(state, *tensors)
    return [t.to(acc) for t in tensors]


def _finish(y: Tensor, u: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        y = y + D.to(y.dtype) * u
    return y if z is None else y * F.silu(z.to(y.dtype))


def _check(
    u: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    state: Tensor | None = None,
    *,
    one_step: bool = False,
) -> None:
    check_present(OPERATOR, dt=dt, u=u, A_log=A_log, B=B, C=C)
    at = "batch" if one_step else "batch seq"
    sizes = check_axes(
        OPERATOR,
        {
            "dt": (dt, f"{at} channel"),
            "u": (u, f"{at} channel"),
            "A_log": (A_log, "channel d_state"),
            "B": (B, f"{at} d_state"),
            "C": (C, f"{at} d_state"),
            "D": (D, "channel"),
            "z": (z, f"{at} channel"),
            "state": (state, "batch channel d_state"),
        },
    )
    if sizes.get("seq", 1) < 1:
        raise KernelError(f"{OPERATOR}: dt has shape {tuple(dt.shape)}, accepted are sequences of at least 1")
