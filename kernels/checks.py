"""What every operator checks before it computes: axes, dtypes, devices, the backend and the accumulation
precision.
"""

import functools
import importlib.util
import math
import numbers
import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels import KernelError

P = ParamSpec("P")
R = TypeVar("R")

# Operators that have Triton kernels.
TRITON_OPERATORS = frozenset(
    {
        "softmax_attention",
        "gated_linear_attention",
        "selective_scan",
        "causal_conv",
        "cross_entropy",
        "elu_plus_one",
        "embedding",
        "gated_silu",
        "linear_cross_entropy",
        "packed_gated_silu",
        "packed_linear_attention",
        "rms_norm",
        "rotation",
        "ssd_block",
        "step_size",
    }
)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_present(operator: str, **tensors: Tensor | None) -> None:
    """Raise KernelError for a tensor that the operator cannot do without and that is None."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise KernelError(f"{operator}: {name} is None, accepted is a tensor")


def check_axes(
    operator: str,
    axes: dict[str, tuple[Tensor | None, str]],
    *,
    may_be_complex: frozenset[str] = frozenset(),
    **sizes: int,
) -> dict[str, int]:
    """Bind axis names to sizes over all tensors of a call; absent (None) tensors are passed over.

    Widths (`d_*`), channels, heads and groups are at least 1.

    Args:
        operator: Name used in the error.
        axes: Tensor name to (tensor, "axis axis ..."). The same axis name must have the same size everywhere.
        may_be_complex: Names of tensors that may have a complex dtype; the others have a floating one.
        sizes: Sizes that are known beforehand.

    Returns:
        Axis name to size.

    Raises:
        KernelError: No tensor, another number of axes, another size, a dtype that is not floating, or two
        devices.
    """
    first, device = "", None
    for name, (tensor, spec) in axes.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise KernelError(f"{operator}: {name} is a {kind}, accepted is a tensor [{spec}]")
        names, shape = spec.split(), tensor.shape
        if len(shape) != len(names):
            raise KernelError(f"{operator}: {name} has shape {tuple(shape)}, accepted is [{spec}]")
        if not (tensor.is_floating_point() or (name in may_be_complex and tensor.is_complex())):
            raise KernelError(
                f"{operator}: {name} has dtype {tensor.dtype}, accepted are floating-point dtypes"
            )
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise KernelError(f"{operator}: {name} is on {tensor.device}, but {first} is on {device}")
        for axis, size in zip(names, shape, strict=True):
            if size == 0 and (axis.startswith("d_") or axis.endswith(("channel", "head", "group"))):
                raise KernelError(
                    f"{operator}: {name} has shape {tuple(shape)} for [{spec}]; {axis} is 1 or more"
                )
            if sizes.setdefault(axis, size) != size:
                raise KernelError(
                    f"{operator}: {name} has shape {tuple(shape)} for [{spec}], "
                    f"but {axis} is {sizes[axis]} elsewhere"
                )
    return sizes


def check_shape(operator: str, name: str, tensor: Tensor, last: str = "") -> str:
    """Raise KernelError unless this is a floating tensor with a last axis, where that is named; its axes for
    `check_axes`.
    """
    check_present(operator, **{name: tensor})
    n_axes = max(tensor.ndim, bool(last)) if isinstance(tensor, Tensor) else 1
    axes = [f"axis_{n}" for n in range(n_axes - bool(last))] + [last] * bool(last)
    check_axes(operator, {name: (tensor, " ".join(axes))})
    return " ".join(axes)


def check_groups(operator: str, n_heads: int, **groups: int) -> None:
    """Raise KernelError unless every number of groups divides the number of heads."""
    for name, count in groups.items():
        if count < 1 or n_heads % count:
            raise KernelError(f"{operator}: {name} has {count} heads, accepted are divisors of {n_heads}")


def check_number(operator: str, name: str, value: float, least: float = -math.inf) -> None:
    """Raise KernelError unless an option is a finite number (a Python or NumPy one) of at least `least`."""
    real = type(value) in (int, float) or isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (real and least <= value and -math.inf < value < math.inf):
        at_least = "" if least == -math.inf else f" of at least {least:g}"
        raise KernelError(f"{operator}: {name} is {value!r}, accepted is a finite number{at_least}")


def check_count(operator: str, name: str, value: int, accepted: str = "a whole number of at least 1") -> None:
    """Raise KernelError unless an option is a whole number (a Python or NumPy one) of at least 1."""
    whole = type(value) is int or isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (whole and value >= 1):
        raise KernelError(f"{operator}: {name} is {value!r}, accepted is {accepted}")


def check_window(operator: str, window: int | None) -> None:
    """Raise KernelError unless a window is None or a whole number of at least 1."""
    if window is not None:
        check_count(operator, "window", window, "None or a whole number of at least 1")


def check_rows(operator: str, rows: slice | None, seq: int) -> slice:
    """The destinations that `rows` names as (start, stop) of a sequence; None is all of them.

    Raises:
        KernelError: No slice, a step other than 1, or a slice that ends before it starts.
    """
    accepted = "None or a slice of consecutive positions in order"
    if rows is None:
        return slice(0, seq)
    if not isinstance(rows, slice):
        raise KernelError(f"{operator}: rows is {rows!r}, accepted is {accepted}")
    try:
        start, stop, step = rows.indices(seq)
    except (TypeError, ValueError):
        raise KernelError(f"{operator}: rows is {rows!r}, accepted is {accepted}") from None
    if step != 1 or stop < start:
        raise KernelError(f"{operator}: rows is {rows!r} of {seq} positions, accepted is {accepted}")
    return slice(start, stop)


def resolve_backend(operator: str, backend: str | None, tensor: Tensor, unfit: str | None = None) -> str:
    """The backend that computes a call: the tensor's device decides, an explicit request is met or refused.

    Args:
        unfit: What of this call the Triton kernels do not take, if anything.

    Returns:
        "triton" for a CUDA tensor where the operator has Triton kernels that take the call, else "torch".

    Raises:
        KernelError: A backend that is unknown, or not available for this operator, device or call.
    """
    has_triton = operator in TRITON_OPERATORS
    if backend is None:
        return "triton" if has_triton and tensor.is_cuda and unfit is None and _triton_found() else "torch"
    if backend not in ("torch", "triton"):
        raise KernelError(f"{operator}: backend {backend!r} is unknown, accepted are 'torch' and 'triton'")
    if backend == "torch":
        return backend
    if not has_triton:
        raise KernelError(
            f"{operator}: backend 'triton' is not available for this operator, accepted is 'torch'"
        )
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelError(f"{operator}: backend 'triton' needs CUDA tensors, got {tensor.device}")
    if not _triton_found():
        raise KernelError(f"{operator}: backend 'triton' needs the package triton, which is not installed")
    if unfit is not None:
        raise KernelError(
            f"{operator}: backend 'triton' does not take {unfit}, accepted is backend 'torch'"
        )
    return backend


# Looked up here because torch.compile cannot trace the look-up.
_TRITON_FOUND = importlib.util.find_spec("triton") is not None


def _triton_found() -> bool:
    """Whether Triton can be imported; says so once if it cannot."""
    if not _TRITON_FOUND:
        _say_missing()
    return _TRITON_FOUND


@functools.cache
def _say_missing() -> None:
    warnings.warn("triton is not installed: CUDA tensors run in the slower torch forms", stacklevel=4)


def triton_unfit(
    form: str, widths: dict[str, int], *tensors: Tensor | None, limit: int = 256
) -> str | None:
    """What the Triton kernels do not take, or None: a form but "chunked", float64, widths above `limit`."""
    if form != "chunked":
        return f"form {form!r}"
    wide = next((t.dtype for t in tensors if t is not None and t.dtype not in TRITON_DTYPES), None)
    if wide is not None:
        return f"dtype {wide}"
    return next((f"{name} {width}" for name, width in widths.items() if width > limit), None)


def step_unfit(widths: dict[str, int], *tensors: Tensor | None) -> str | None:
    """What the Triton kernels of one-token steps do not take, or None: a gradient, and what `triton_unfit`
    names.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return "a gradient through a step"
    return triton_unfit("chunked", widths, *tensors)


def resolve_form(operator: str, form: str, forms: dict[str, Callable]) -> Callable:
    """The function of a named form; raises KernelError for a name that is not one of them."""
    if not isinstance(form, str) or form not in forms:
        raise KernelError(f"{operator}: form {form!r} is unknown, accepted are {sorted(forms)}")
    return forms[form]


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64 (or complex128), else float32."""
    wide = (torch.float64, torch.complex128)
    return torch.float64 if any(t is not None and t.dtype in wide for t in tensors) else torch.float32


def working_dtype(x: Tensor) -> torch.dtype:
    """What projections of x work in: under autocast its dtype (float64 stays), else that of x."""
    autocast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Switch autocast off inside an operator, so that its sums stay in the accumulation dtype."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped
