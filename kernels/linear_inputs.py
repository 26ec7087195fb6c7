"""What the forms of gated linear attention take: a state, and inputs that are checked and shaped alike."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kernels import KernelError
from kernels.checks import accumulation_dtype, check_axes, check_groups

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


def prepare(
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
    sizes = check_inputs(q, k, v, log_decay, k_weight, state, normalise)
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
