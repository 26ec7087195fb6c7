"""How a kernel is started, and what every launcher asks of its tensors."""

import functools
from typing import Any

import torch
from torch import Tensor

from kernels import KernelError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2E = 1.4426950408889634


# How to start a compiled kernel, by what it is specialised on: (run, function, metadata, constants).
_compiled: dict[tuple, tuple] = {}
# The same by the numbers themselves, which are read faster than what is specialised on.
_started: dict[tuple, tuple] = {}
_n_tensors: dict[int, int] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Start one kernel on the device of its first tensor. A grid with an empty axis starts nothing.

    Args:
        kernel: A jitted function with its constants last.
        args: Its tensors (parameters named `..._ptr`) and, after them, its numbers.
        meta: Its constants and the compiler's options, by name, in the same order at every call.
    """
    if 0 in grid:
        return
    device = args[0].get_device()
    if device < 0:
        kernel[grid](*args, **meta)
    elif device == torch._C._cuda_getDevice():
        _start(kernel, grid, args, meta, device)
    else:
        with torch.cuda.device(device):
            _start(kernel, grid, args, meta, device)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple, meta: dict[str, Any], device: int) -> None:
    """Start a kernel seen before without Triton's own look-up, which costs more than the kernel at small
    sizes, and with addresses in place of tensors, which Triton would ask the driver about."""
    name = id(kernel)
    n_tensor = _n_tensors.get(name)
    if n_tensor is None:
        n_tensor = _n_tensors[name] = _count_tensors(kernel)
    tensors, numbers = args[:n_tensor], args[n_tensor:]
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    offsets = [None if x is None else x & 15 for x in addresses]
    dtypes = [None if x is None else x.dtype for x in tensors]
    key = (name, device, *dtypes, *offsets, *numbers, *meta.values())
    found = _started.get(key)
    if found is None:
        found = _compile(kernel, grid, args, meta, device, [x == 0 for x in offsets])
        if found is None:
            return
        if len(_started) > 4096:
            _started.clear()
        _started[key] = found
    run, function, metadata, constants = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(x, y, z, stream, function, metadata, None, None, None, *addresses, *numbers, *constants)


def _count_tensors(kernel: Any) -> int:
    """Tensors of a kernel, which come before its numbers."""
    return next((n for n, name in enumerate(kernel.arg_names) if not name.endswith("_ptr")), 0)


def _compile(
    kernel: Any, grid: tuple[int, ...], args: tuple, meta: dict[str, Any], device: int, aligned: list[bool]
) -> tuple | None:
    """How to start a kernel; None where Triton had to compile or find it, and has started it."""
    key = (id(kernel), device, *map(_specialised, args), *aligned, *meta.values())
    if key in _compiled:
        return _compiled[key]
    compiled = kernel[grid](*args, **meta)
    if len(_compiled) > 4096:
        _compiled.clear()
    constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
    _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants
    return None


def _specialised(x: Any) -> Any:
    """What Triton specialises a kernel on, beside the alignment of tensors: dtypes, and of integers whether
    they are 1, multiples of 16 or beyond 32 bits; so a new length compiles nothing."""
    if isinstance(x, int):
        wide = not -0x80000000 <= x < 0x80000000
        return 1 if x == 1 else (2 if x & 15 else 16) + wide
    return type(x) if x is None or isinstance(x, float) else x.dtype


def check_dtype(operator: str, tensor: Tensor) -> None:
    """Raise KernelError for a dtype without a kernel, or bfloat16 on a GPU that has none."""
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise KernelError(
            f"{operator}: dtype {tensor.dtype} has no Triton kernel, accepted are {names} or backend 'torch'"
        )
    # torch.compile cannot trace what asks the driver.
    asked = tensor.dtype == torch.bfloat16 and tensor.is_cuda and not torch.compiler.is_compiling()
    if asked and not _has_bfloat16(tensor.device):
        name = torch.cuda.get_device_name(tensor.device)
        raise KernelError(f"{operator}: {name} has no bfloat16, accepted are float32, float16")


@functools.cache
def _has_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def check_width(operator: str, name: str, width: int, largest: int = 256) -> None:
    """Raise KernelError for a width that the kernels do not hold."""
    if not 1 <= width <= largest:
        raise KernelError(f"{operator}: {name} is {width}, accepted by the Triton kernels is 1 to {largest}")


def rows(tensor: Tensor) -> Tensor:
    """The tensor with a last axis of stride 1; other axes may have any stride."""
    return tensor if tensor.stride()[-1] == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def power_of_two(width: int, least: int = 16) -> int:
    """The smallest power of two that holds a width, at least `least`."""
    return max(least, 1 << (width - 1).bit_length())


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
