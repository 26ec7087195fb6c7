"""Numbers from a GPU to the host, together: a transfer takes as long for one number as for a thousand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, in one transfer; of different dtypes, in the one that holds them all."""
    return begin_to_host(tensors)()


def begin_to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """`to_host` in two steps: the transfer begins, and what is returned waits for it, in any thread.

    It waits for the work that the GPU was given before this call, not for what it is given in between.
    """
    if not tensors:
        return list
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    arrived = _arriving(flat)

    def read() -> list[Tensor]:
        parts = arrived().split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    return read


def _arriving(tensor: Tensor) -> Callable[[], Tensor]:
    if not tensor.is_cuda:
        return tensor.cpu
    found = tensor.to("cpu", non_blocking=True)
    # Whoever waits leaves its core to others.
    there = torch.cuda.Event(blocking=True)
    there.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        there.synchronize()
        return found

    return wait
