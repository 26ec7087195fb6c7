"""Numbers from a GPU to the host, together: a transfer takes as long for one number as for a thousand."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, in one transfer; of different dtypes, in the one that holds them all."""
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
