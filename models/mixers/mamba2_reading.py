"""Readings of a Mamba-2 layer by head: the scan alone or the whole block.

Block (channel c of head h):  y_c = G_c (A_h + D_h I) Z_c (K_c x_c + b_c 1),  Z = diag(sigmoid(pre)), and G =
SiLU(z) times the gated norm's gain and scale, frozen at this input.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import gated_linear_attention
from models.mixers.entries import LinearEntries
from models.mixers.reading import Reading
from models.mixers.taps import conv_taps

if TYPE_CHECKING:
    from models.mixers.mamba2 import Mamba2, _Scan


class Mamba2Parts(NamedTuple):
    """A layer's intermediate results on one batch; `gate` includes the norm."""

    mixer: "Mamba2"
    inner: Float[Tensor, "batch seq d_inner"]
    pre: Float[Tensor, "batch seq d_inner"]
    scan: "_Scan"
    gate: Float[Tensor, "batch seq d_inner"]


def mamba2_reading(parts: Mamba2Parts, reading: str) -> Reading:
    """The reading named `reading` ("ssm" or "block"), by head."""
    mixer, scan = parts.mixer, parts.scan
    block = reading == "block"
    if block:
        taps = conv_taps(parts.inner, mixer.conv1d.weight[: mixer.d_inner, 0], torch.sigmoid(parts.pre))
        taps = taps.unflatten(-1, (mixer.n_heads, mixer.d_head))
    else:
        taps = scan.x[None]
    index = torch.arange(mixer.d_inner, device=parts.gate.device)
    return Reading(
        name=reading,
        unit="head",
        normalisation="contribution" if block else "abs_row",
        W_out=mixer.W_O,
        constant=_constant(parts, block),
        z_index=index.view(mixer.n_heads, mixer.d_head),
        entries=LinearEntries(q=scan.C, k=scan.B, n_units=mixer.n_heads, **scan.options),
        taps=taps,
        gate=parts.gate.unflatten(-1, (mixer.n_heads, mixer.d_head)),
        skip=mixer.D[:, None],
        make_pattern=None
        if block
        else lambda: gated_linear_attention.pattern(scan.C, scan.B, **scan.options),
    )


def _constant(parts: Mamba2Parts, block: bool) -> Float[Tensor, "batch dest d_model"]:
    """Output bias, and in the block reading the convolution's bias through the scan."""
    mixer, scan = parts.mixer, parts.scan
    constant = mixer.b_O.expand(*parts.gate.shape[:2], -1)
    if not block or mixer.conv1d.bias is None:
        return constant
    source = torch.sigmoid(parts.pre) * mixer.conv1d.bias[: mixer.d_inner]
    source = source.unflatten(-1, (mixer.n_heads, mixer.d_head))
    y, _ = mixer._chunked(scan._replace(x=source), None)
    y = (y + mixer.D[:, None] * source).flatten(2)
    return constant + torch.nn.functional.linear(parts.gate * y, mixer.out_proj.weight)
