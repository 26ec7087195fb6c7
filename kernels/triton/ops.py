"""The library of custom operators, and what registering one takes: schema, implementation, fake, gradient.

Each operator's gradient is itself a custom operator without a gradient of its own: a second backward raises
by name.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernels import KernelError

NAMESPACE = "beyond_softmax"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def register(schema: str, implementation: Callable, fake: Callable) -> Any:
    """Define one operator for CUDA (and, for the interpreter, CPU) tensors.

    Args:
        schema: "name(Tensor x, ...) -> ..." without the namespace.
        implementation: Runs the kernels; must return fresh tensors.
        fake: Same signature; gives the shapes.

    Returns:
        The callable operator.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CUDA")
    LIBRARY.impl(name, implementation, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiable(name: str, setup: Callable, backward: Callable) -> None:
    """Give an operator its gradient; `setup(ctx, inputs, output)` saves, `backward(ctx, *grads)` computes."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=LIBRARY)


def differentiable_once(name: str) -> None:
    """Refuse the gradient of a gradient operator by name."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise KernelError(
            f"{name}: second derivatives are not available with backend 'triton', use backend='torch'"
        )

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    differentiable(name, setup, backward)
