"""Rows of a table by number: what a language model begins with."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from kernels import KernelError
from kernels.checks import check_axes, check_present, resolve_backend, triton_unfit

OPERATOR = "embedding"


def reference(
    tokens: Int[Tensor, "*batch"], weight: Float[Tensor, "d_vocab d_model"]
) -> Float[Tensor, "*batch d_model"]:
    """Readable form: torch's own."""
    return F.embedding(tokens, weight)


def embedding(
    tokens: Int[Tensor, "*batch"], weight: Float[Tensor, "d_vocab d_model"], *, backend: str | None = None
) -> Float[Tensor, "*batch d_model"]:
    """weight[tokens]; the gradient adds rows up in the order of their places, float32, alike at every run.

    Args:
        tokens: int64 or int32, 0 to d_vocab - 1. Others are torch's error; on a GPU that is CUDA's.
        backend: "torch", "triton" (met or refused; only the gradient has kernels), or None: by the device.

    Raises:
        KernelError: tokens of another dtype, a table that has not two axes, two devices, a backend that is
            not available.
    """
    check_present(OPERATOR, tokens=tokens, weight=weight)
    check_axes(OPERATOR, {"weight": (weight, "d_vocab d_model")})
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise KernelError(f"{OPERATOR}: tokens are {kind}, accepted is a tensor of torch.int64 or int32")
    if tokens.device != weight.device:
        raise KernelError(f"{OPERATOR}: tokens are on {tokens.device}, but weight is on {weight.device}")
    unfit = triton_unfit("chunked", {}, weight) or _transform()
    if resolve_backend(OPERATOR, backend, weight, unfit) == "triton":
        from kernels.triton import embedding as fused

        return fused.embedding(tokens.flatten(), weight).view(*tokens.shape, weight.shape[1])
    return reference(tokens, weight)


def _transform() -> str | None:
    """A transform of `torch.func` or forward-mode differentiation, which torch's own rows take and ours do
    not."""
    if torch.compiler.is_compiling():
        return None
    seen = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return "a transform of torch.func" if seen else None
