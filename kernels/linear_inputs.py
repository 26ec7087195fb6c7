"""What the forms of gated linear attention take: a state, and inputs that are checked and shaped alike."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kernels import KernelError
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_groups,
    check_number,
    check_present,
)

OPERATOR = "gated_linear_attention"
Queries = Float[Tensor, "batch seq _ d_k"]
Values = Float[Tensor, "batch seq head d_v"]


@dataclass(frozen=True, kw_only=True)
class LinearState:
    """Sum of decayed key-value products `s`, and of decayed keys `z` where the output is normalised."""

    s: Float[Tensor, "batch head d_k d_v"]
    z: Float[Tensor, "batch head d_k"] | None = None


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    log_decay: Tensor | None,
    k_weight: Tensor | None,
    state: LinearState | None,
    normalise: bool,
    scale: float,
    eps: float,
    *,
    one_step: bool = False,
) -> dict[str, int]:
    """Sizes of all axes: batch, seq (not in one step), head, q_head, k_head, d_k, and d_v where there are
    values.
    """
    check_present(OPERATOR, q=q, k=k)
    check_number(OPERATOR, "scale", scale)
    check_number(OPERATOR, "eps", eps)
    if state is not None and not isinstance(state, LinearState):
        raise KernelError(f"{OPERATOR}: state is a {type(state).__name__}, accepted is None or a LinearState")
    s, z = state_tensors(state)
    if state is not None:
        check_present(OPERATOR, **{"state.s": s})
    at = "batch" if one_step else "batch seq"
    decays = {len(axes.split()): axes for axes in ("head", f"{at} head", f"{at} head d_k")}
    n_axes = log_decay.ndim if isinstance(log_decay, Tensor) else 1
    if n_axes not in decays:
        first, second, third = decays.values()
        raise KernelError(
            f"{OPERATOR}: log_decay has shape {tuple(log_decay.shape)}, accepted are [{first}], "
            f"[{second}] and [{third}]"
        )
    sizes = check_axes(
        OPERATOR,
        {
            "v": (v, f"{at} head d_v"),
            "log_decay": (log_decay, decays[n_axes]),
            "k_weight": (k_weight, f"{at} head"),
            "q": (q, f"{at} q_head d_k"),
            "k": (k, f"{at} k_head d_k"),
            "state.s": (s, "batch head d_k d_v"),
            "state.z": (z, "batch head d_k"),
        },
    )
    heads = sizes.setdefault("head", max(sizes["q_head"], sizes["k_head"]))
    check_groups(OPERATOR, heads, q=sizes["q_head"], k=sizes["k_head"])
    if sizes.get("seq", 1) < 1:
        raise KernelError(f"{OPERATOR}: q has shape {tuple(q.shape)}, accepted are sequences of at least 1")
    if normalise and state is not None and state.z is None:
        raise KernelError(f"{OPERATOR}: normalise=True needs a state with z, got z=None")
    return sizes


def state_tensors(state: LinearState | None) -> tuple[Tensor | None, Tensor | None]:
    """s and z, None where there is none."""
    return (None, None) if state is None else (state.s, state.z)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    log_decay: Tensor | None,
    k_weight: Tensor | None,
    state: LinearState | None,
    normalise: bool,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check everything; scaled q, weighted k and log decay [batch seq head (d_k or 1)] for every head,
    accumulation dtype.
    """
    sizes = check_inputs(q, k, v, log_decay, k_weight, state, normalise, scale, eps)
    heads = sizes["head"]
    acc = accumulation_dtype(q, k, v, log_decay, k_weight, *state_tensors(state))
    q = q.to(acc).repeat_interleave(heads // sizes["q_head"], dim=2) * scale
    k = k.to(acc).repeat_interleave(heads // sizes["k_head"], dim=2)
    if k_weight is not None:
        k = k * k_weight.to(acc)[..., None]
    if log_decay is None:
        return q, k, q.new_zeros(*q.shape[:3], 1)
    decay = log_decay.to(acc)
    return q, k, decay if decay.ndim == 4 else decay.expand(q.shape[:3])[..., None]
