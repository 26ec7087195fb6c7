"""Refusal by name of what derivatives written by hand, or by PyTorch, do not have: second ones, and in part
`torch.func`.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import KernelError


class _FirstOrder(torch.autograd.Function):
    """Identity on gradients; an error if they are differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: str, n_gradients: int, *tensors: Tensor | None):
        # Views: what `torch.func` transforms may not be returned as it is.
        kept = tuple(t.view_as(t) for t in tensors[:n_gradients])
        return kept if n_gradients > 1 else kept[0]

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operator = inputs[0]

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

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operator = inputs[0]

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        return None, *first_order_only(ctx.operator, gradients, gradients)


def differentiable_once(operator: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as they are, for an operation of PyTorch's whose own backward has no derivative."""
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _Once.apply(operator, *tensors) if needed else tensors


def apply(operator: str, function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`. Raises KernelError inside a transform of `torch.func`, which it does not take."""
    try:
        return function.apply(*inputs)
    except RuntimeError as error:
        if "functorch transforms" not in str(error):
            raise
        raise KernelError(
            f"{operator}: form 'chunked' has no transforms of torch.func (grad, vmap, jvp, ...), "
            "accepted are forms 'parallel' and 'recurrent'"
        ) from None
