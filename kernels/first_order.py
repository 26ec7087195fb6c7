"""Refusal by name of a second derivative, for operators whose backward is written by hand."""

import torch
from torch import Tensor

from kernels import KernelError


class _FirstOrder(torch.autograd.Function):
    """Identity on gradients; an error if they are differentiated again."""

    @staticmethod
    def forward(ctx, operator: str, n_gradients: int, *tensors: Tensor | None):
        ctx.operator = operator
        return tensors[:n_gradients] if n_gradients > 1 else tensors[0]

    @staticmethod
    def backward(ctx, *_):
        raise KernelError(
            f"{ctx.operator}: no second derivative in form 'chunked'; use form 'parallel' for double backward"
        )


def first_order_only(
    operator: str, gradients: tuple[Tensor | None, ...], inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients as they are, but tied to what they were computed from, so that differentiating them raises
    KernelError.

    Args:
        operator: Name used in the error.
        gradients: What a backward is about to return.
        inputs: The upstream gradients and saved tensors that they depend on.
    """
    if not torch.is_grad_enabled():
        return gradients
    present = [g for g in gradients if g is not None]
    tied = _FirstOrder.apply(operator, len(present), *present, *inputs)
    remaining = iter(tied if isinstance(tied, tuple) else (tied,))
    return tuple(None if g is None else next(remaining) for g in gradients)
