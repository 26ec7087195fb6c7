"""Refusal by name of a second derivative, for operators whose backward is written by hand or by PyTorch."""

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


class _Once(torch.autograd.Function):
    """Identity on (operator, tensors); their gradients raise KernelError if they are differentiated."""

    @staticmethod
    def forward(ctx, operator: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operator = operator
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        return None, *first_order_only(ctx.operator, gradients, gradients)


def differentiable_once(operator: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as they are, for an operation of PyTorch's whose own backward has no derivative."""
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _Once.apply(operator, *tensors) if needed else tensors
