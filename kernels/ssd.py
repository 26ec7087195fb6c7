"""Mamba-2's state-space duality: gated linear attention with a scalar decay, in Mamba-2's own names.

S_t = exp(-dt_t exp(A_log)) S_{t-1} + dt_t x_t B_t^T;  y_t = S_t C_t + D x_t
A_ij = <C_i, B_j> exp(-exp(A_log) sum_{r=j+1..i} dt_r) dt_j

Glossary: x values; dt step size (after softplus); C query; B key; D skip, one number a head. B and C have
n_groups heads.
Source: Dao and Gu 2024, arXiv:2405.21060. Gate and norm are outside the operator.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import gated_linear_attention as linear
from kernels.checks import check_axes, check_present

Steps = Float[Tensor, "batch seq head"]
Inputs = Float[Tensor, "batch seq head d_head"]
Shared = Float[Tensor, "batch seq group d_state"]
State = Float[Tensor, "batch head d_head d_state"]


def pattern(
    dt: Steps, A_log: Float[Tensor, " head"], B: Shared, C: Shared
) -> Float[Tensor, "batch head dest=seq src=seq"]:
    """Implied attention, signed, with dt_j inside and without D."""
    _check(dt, A_log, B, C)
    return linear.pattern(C, B, log_decay=log_decay(dt, A_log), k_weight=dt)


def log_decay(dt: Steps, A_log: Float[Tensor, " head"]) -> Steps:
    """-exp(A_log) dt."""
    check_present("ssd", dt=dt, A_log=A_log)
    check_axes("ssd", {"dt": (dt, "batch seq head"), "A_log": (A_log, "head")})
    return -torch.exp(A_log.to(dt.dtype)) * dt


def ssd(
    x: Inputs,
    dt: Steps,
    A_log: Float[Tensor, " head"],
    B: Shared,
    C: Shared,
    *,
    D: Float[Tensor, " head"] | None = None,
    state: State | None = None,
    form: str = "chunked",
    backend: str | None = None,
) -> tuple[Inputs, State]:
    """State-space duality in a named form ("parallel", "chunked", "recurrent").

    Returns:
        (y [batch seq head d_head], state after the last step [batch head d_head d_state]).

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.
    """
    check_present("ssd", x=x)
    _check(dt, A_log, B, C, x, D, state)
    start = None if state is None else linear.LinearState(s=state.transpose(-1, -2))
    y, end = linear.gated_linear_attention(
        C, B, x, log_decay=log_decay(dt, A_log), k_weight=dt, state=start, skip=D, form=form, backend=backend
    )
    return y, end.s.transpose(-1, -2)


def step(
    x: Float[Tensor, "batch head d_head"],
    dt: Float[Tensor, "batch head"],
    A_log: Float[Tensor, " head"],
    B: Float[Tensor, "batch group d_state"],
    C: Float[Tensor, "batch group d_state"],
    *,
    D: Float[Tensor, " head"] | None = None,
    state: State | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch head d_head"], State]:
    """One position, constant time; `backend` as in `gated_linear_attention.step`."""
    check_present("ssd", x=x)
    _check(dt, A_log, B, C, x, D, state, at="batch")
    start = None if state is None else linear.LinearState(s=state.transpose(-1, -2))
    decay = log_decay(dt[:, None], A_log)[:, 0]
    y, end = linear.step(C, B, x, log_decay=decay, k_weight=dt, state=start, backend=backend)
    return y if D is None else y + (D[:, None] * x).to(y.dtype), end.s.transpose(-1, -2)


def _check(
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    x: Tensor | None = None,
    D: Tensor | None = None,
    state: Tensor | None = None,
    *,
    at: str = "batch seq",
) -> None:
    """Shapes in Mamba-2's names; `at` are the axes before the heads."""
    check_present("ssd", dt=dt, A_log=A_log, B=B, C=C)
    check_axes(
        "ssd",
        {
            "dt": (dt, f"{at} head"),
            "A_log": (A_log, "head"),
            "x": (x, f"{at} head d_head"),
            "B": (B, f"{at} B_group d_state"),
            "C": (C, f"{at} C_group d_state"),
            "D": (D, "head"),
            "state": (state, "batch head d_head d_state"),
        },
    )
