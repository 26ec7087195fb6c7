"""Cross entropy of rows of logits, in nats, without a copy of the logits in float32.

loss_i = log sum_v exp(x_iv) - x_it, t the row's target. A row of target -1 counts for nothing: loss 0,
gradient 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from kernels import KernelError
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_present,
    resolve_backend,
    triton_unfit,
    without_autocast,
)

OPERATOR = "cross_entropy"
# Rows of this target are left out.
NO_TARGET = -1


@without_autocast
def reference(
    logits: Float[Tensor, "row d_vocab"], target: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """Readable form: torch's own, on logits in the accumulation dtype."""
    _check(logits, target)
    wide = logits.to(accumulation_dtype(logits))
    return F.cross_entropy(wide, target, reduction="none", ignore_index=NO_TARGET)


def cross_entropy(
    logits: Float[Tensor, "row d_vocab"], target: Int[Tensor, " row"], *, backend: str | None = None
) -> Float[Tensor, " row"]:
    """Loss of each row, float32 (float64 for float64 logits).

    Args:
        target: int64, the row's class or -1. A class that does not exist is undefined on a GPU.
        backend: "torch", "triton" (met or refused), or None: by the device.

    Raises:
        KernelError: shapes that disagree, a target that is not int64, a backend that is not available.
    """
    _check(logits, target)
    unfit = triton_unfit("chunked", {}, logits)
    if resolve_backend(OPERATOR, backend, logits, unfit) == "triton":
        from kernels.triton import cross_entropy as fused

        return fused.cross_entropy(logits, target)
    return reference(logits, target)


def _check(logits: Tensor, target: Tensor) -> None:
    check_present(OPERATOR, logits=logits, target=target)
    sizes = check_axes(OPERATOR, {"logits": (logits, "row d_vocab")})
    check_target(OPERATOR, target, sizes["row"])


def check_target(operator: str, target: Tensor, n_row: int) -> None:
    """Raise KernelError for a target that is no int64 tensor [row]."""
    if not isinstance(target, Tensor):
        raise KernelError(f"{operator}: target is a {type(target).__name__}, accepted is a tensor [row]")
    if target.dtype != torch.int64 or target.shape != (n_row,):
        raise KernelError(
            f"{operator}: target has shape {tuple(target.shape)} and dtype {target.dtype}, "
            f"accepted is [{n_row}] of torch.int64"
        )
