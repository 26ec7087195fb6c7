"""The input of a mixer's short convolution, seen while the model runs, and the convolution with a tap's input
changed.
"""

from typing import Self

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from interp.errors import InterventionError
from kernels import causal_conv
from models.mixers.base import Mixer


class ConvInput:
    """A context in which `last` is what the convolution was given in the latest run of its mixer."""

    def __init__(self, mixer: Mixer):
        if getattr(mixer, "conv1d", None) is None:
            raise InterventionError(
                f"a {mixer.kind} mixer without a convolution has no taps; accepted: d_conv above 0"
            )
        self.mixer = mixer
        self._projected: Tensor | None = None

    def __enter__(self) -> Self:
        self._handle = self.mixer.in_proj.register_forward_hook(self._see)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _see(self, module: object, args: object, out: Tensor) -> None:
        self._projected = out

    @property
    def last(self) -> Float[Tensor, "batch seq channel"]:
        """[batch seq channel], the channels as `hook_conv` has them."""
        if self._projected is None:
            raise InterventionError("the convolution has not run in this context")
        start = conv_start(self.mixer)
        return self._projected[..., start : start + self.mixer.conv1d.weight.shape[0]]

    def output(
        self, x: Float[Tensor, "batch seq channel"], change: Float[Tensor, "batch seq channel"], lag: int
    ) -> Float[Tensor, "batch seq channel"]:
        """`hook_conv` where the tap at `lag` alone reads x + change. Whole sequences, nothing before them."""
        weight, bias = self.mixer.conv1d.weight[:, 0], self.mixer.conv1d.bias
        pre, _ = causal_conv.causal_conv(x, weight, bias)
        shifted = F.pad(change, (0, 0, lag, 0))[:, : x.shape[1]]
        pre = pre + weight[:, weight.shape[-1] - 1 - lag] * shifted
        return F.silu(pre) if self.mixer.kind.startswith("mamba") else pre


def conv_start(mixer: Mixer) -> int:
    """Where in `in_proj`'s output the convolution's channels begin (Mamba-2's gate stands before them)."""
    return mixer.d_inner if mixer.kind == "mamba2" else 0
