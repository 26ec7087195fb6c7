"""How a kernel is started, and what every launcher asks of its tensors."""

import functools
from typing import Any

import torch
from torch import Tensor

from kernels import KernelError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2E = 1.4426950408889634


# Compiled kernels and their constant arguments, by what a kernel is specialised on.
_compiled: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Start one kernel on the device of its first tensor. A grid with an empty axis starts nothing.

    Args:
        kernel: A jitted function with its constants last.
        args: Its tensors and numbers, in order.
        meta: Its constants and the compiler's options, by name.
    """
    if 0 in grid:
        return
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(kernel, grid, args, meta, device.index)
    else:
        _start(kernel, grid, args, meta, device.index)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple, meta: dict[str, Any], device: int | None) -> None:
    """Start a kernel seen before without Triton's own look-up, which costs more than the kernel at small
    sizes."""
    if device is None:
        kernel[grid](*args, **meta)
        return
    aligned = 0
    parts = [id(kernel), device]
    for x in args:
        if isinstance(x, Tensor):
            parts.append(x.dtype)
            aligned = aligned << 1 | (x.data_ptr() & 15 == 0)
        else:
            parts.append(float if type(x) is float else x)
    key = (*parts, aligned, *meta.items())
    found = _compiled.get(key)
    if found is not None:
        found[0][(*grid, 1, 1)[:3]](*args, *found[1])
        return
    compiled = kernel[grid](*args, **meta)
    if len(_compiled) > 4096:
        _compiled.clear()
    _compiled[key] = compiled, tuple(meta[name] for name in kernel.arg_names[len(args) :])


def check_dtype(operator: str, tensor: Tensor) -> None:
    """Raise KernelError for a dtype without a kernel, or bfloat16 on a GPU that has none."""
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise KernelError(
            f"{operator}: dtype {tensor.dtype} has no Triton kernel, accepted are {names} or backend 'torch'"
        )
    if tensor.dtype == torch.bfloat16 and tensor.is_cuda and not _has_bfloat16(tensor.device):
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
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def power_of_two(width: int, least: int = 16) -> int:
    """The smallest power of two that holds a width, at least `least`."""
    return max(least, 1 << (width - 1).bit_length())
