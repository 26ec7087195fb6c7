"""The library of custom operators, and what registering one takes: schema, implementation, fake, gradient.

Each operator's gradient is itself a custom operator without a gradient of its own: a second backward raises
by name.

`operators.<name>(...)` calls one. Where something looks at or changes what is called (torch.compile, a
dispatch or function mode, a functorch transform, forward-mode differentiation, tracing, a profiler, tensors
that are not plain) that is `torch.ops.beyond_softmax.<name>`; else the same implementation and gradient
without PyTorch's dispatcher, which costs more host time than the kernels take at small sizes.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from kernels import KernelError

NAMESPACE = "beyond_softmax"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# Operators by name; a module, which every torch.compile can look into.
operators = ModuleType("operators")
# Off: every call goes through PyTorch's dispatcher.
DIRECT = True

_NUMBERS = frozenset({int, float, bool, type(None), torch.dtype})
# What is called of an operator that is called directly.
_implementations: dict[str, Callable] = {}
_functions: dict[str, type[torch.autograd.Function]] = {}


def register(schema: str, implementation: Callable, fake: Callable) -> Any:
    """Define one operator for CUDA (and, for the interpreter, CPU) tensors.

    Args:
        schema: "name(Tensor x, ...) -> ..." without the namespace.
        implementation: Runs the kernels; must return fresh tensors.
        fake: Same signature; gives the shapes.

    Returns:
        The callable operator, also as `operators.<name>`.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    for device in ("CUDA", "CPU"):
        LIBRARY.impl(name, _with_whole_vectors(implementation), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    registered = getattr(getattr(torch.ops, NAMESPACE), name).default
    _implementations[name] = implementation
    call = _caller(name, registered, implementation)
    setattr(operators, name, call)
    return call


def _with_whole_vectors(implementation: Callable) -> Callable:
    """The implementation with the vectors of a call (sinks, skips, biases) made contiguous: kernels know no
    stride of theirs."""

    return lambda *args: implementation(*_whole_vectors(args))


def _whole_vectors(args: tuple) -> tuple:
    return tuple(x.contiguous() if isinstance(x, Tensor) and x.ndim == 1 else x for x in args)


def _caller(name: str, registered: Any, implementation: Callable) -> Callable:
    """The operator as a function that calls the implementation directly where nothing else is to see it."""
    arguments = registered._schema.arguments
    floats = tuple(n for n, argument in enumerate(arguments) if str(argument.type) == "float")

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not DIRECT or len(args) != len(arguments) or _is_seen():
            return registered(*args)
        plain = _look(name, args)
        if plain is None:
            return registered(*args)
        asks, gaps = plain
        if gaps:
            args = _whole_vectors(args)
        for n in floats:
            if type(args[n]) is not float:
                args = (*args[:n], float(args[n]), *args[n + 1 :])
        if asks and torch.is_grad_enabled() and name in _functions:
            return _functions[name].apply(*args)
        return implementation(*args)

    return call


def _is_seen() -> bool:
    """Whether something in this thread is to see the operators that are called."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _look(name: str, args: tuple) -> tuple[bool, bool] | None:
    """Whether a tensor asks for a gradient and whether a vector has gaps; None where an argument is not a
    plain tensor or a number.

    Raises:
        KernelError: Tensors on a GPU and elsewhere; a kernel would read what it cannot reach.
    """
    asks, gaps, cuda = False, False, None
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if x.requires_grad:
                asks = True
            if x.is_cuda is not cuda:
                if cuda is not None:
                    raise KernelError(f"{name}: tensors are on a GPU and on the CPU, accepted is one device")
                cuda = x.is_cuda
                if not cuda and not x.is_cpu:
                    return None
            if x.is_neg():
                return None
            if x.ndim == 1 and x.stride() != (1,):
                gaps = True
        elif kind not in _NUMBERS:
            return None
    return asks, gaps


def differentiable(name: str, setup: Callable, backward: Callable) -> None:
    """Give an operator its gradient; `setup(ctx, inputs, output)` saves, `backward(ctx, *grads)` computes."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=LIBRARY)
    implementation = _implementations[name]

    def forward(ctx: Any, *args: Any) -> Any:
        output = implementation(*args)
        setup(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _functions[name] = type(name, (torch.autograd.Function,), methods)


def differentiable_once(name: str) -> None:
    """Refuse the gradient of a gradient operator by name."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise KernelError(
            f"{name}: second derivatives are not available with backend 'triton', use backend='torch'"
        )

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    differentiable(name, setup, backward)
