"""Cross entropy of a linear map's logits, in nats: what the end of a language model is trained on.

loss_i = log sum_v exp(l_iv) - l_it, l = x W^T + b, t the row's target. A row of target -1 counts for nothing.
"""

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from kernels import KernelError, cross_entropy
from kernels.checks import check_axes, check_present, resolve_backend, triton_unfit, working_dtype

OPERATOR = "linear_cross_entropy"


def reference(
    x: Float[Tensor, "row d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    target: Int[Tensor, " row"],
    *,
    bias: Float[Tensor, " d_vocab"] | None = None,
) -> Float[Tensor, " row"]:
    """Readable form: torch's linear map, and the cross entropy of its logits."""
    _check(x, weight, target, bias)
    return cross_entropy.reference(F.linear(x, weight, bias), target)


def linear_cross_entropy(
    x: Float[Tensor, "row d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    target: Int[Tensor, " row"],
    *,
    bias: Float[Tensor, " d_vocab"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, " row"]:
    """Loss of each row, float32 (float64 for float64 inputs); the logits have the dtype of F.linear's.

    Args:
        target: int64, the row's class or -1. A class that does not exist is undefined on a GPU.
        backend: "torch", "triton" (met or refused; [row d_vocab] numbers are kept for the gradient, in the
            logits' dtype), or None: by the device.

    Raises:
        KernelError: shapes or, without autocast, dtypes that disagree, a target that is not int64, a backend
            that is not available.

    Source: the gradient found in the forward pass and put in the logits' place, as in Hsu et al. 2024,
    arXiv:2410.10989 (Liger). Differs: logits are not cut into pieces, and rows keep their own cotangents.
    """
    _check(x, weight, target, bias)
    unfit = triton_unfit("chunked", {}, x, weight, bias)
    if resolve_backend(OPERATOR, backend, x, unfit) == "triton":
        from kernels.triton import linear_cross_entropy as fused

        return fused.linear_cross_entropy(x.to(working_dtype(x)), weight, bias, target)
    return reference(x, weight, target, bias=bias)


def _check(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    check_present(OPERATOR, x=x, weight=weight, target=target)
    axes = {"x": (x, "row d_model"), "weight": (weight, "d_vocab d_model"), "bias": (bias, "d_vocab")}
    sizes = check_axes(OPERATOR, axes)
    cross_entropy.check_target(OPERATOR, target, sizes["row"])
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and working_dtype(tensor) != working_dtype(x):
            raise KernelError(
                f"{OPERATOR}: {name} has dtype {tensor.dtype}, accepted is that of x, {x.dtype}, or autocast"
            )
