"""Readings of a Mamba-1 layer: scan alone or whole block; by layer, state index or cluster of channels.

Block (channel c):  y_c = G_c (A_c + D_c I) Z_c (K_c x_c + b_c 1),  G = diag(SiLU(z)), Z = diag(sigmoid(pre)),
because SiLU(x) = x sigmoid(x).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import selective_scan
from models.errors import ConfigError
from models.mixers.clusters import cluster_channels
from models.mixers.entries import Entries, GroupedEntries, ScanEntries
from models.mixers.reading import Reading
from models.mixers.taps import conv_taps

if TYPE_CHECKING:
    from models.mixers.mamba1 import Mamba1, _Scan


class Mamba1Parts(NamedTuple):
    """A layer's intermediate results on one batch."""

    mixer: "Mamba1"
    inner: Float[Tensor, "batch seq d_inner"]
    pre: Float[Tensor, "batch seq d_inner"]
    scan: "_Scan"
    gate: Float[Tensor, "batch seq d_inner"]


def mamba1_reading(parts: Mamba1Parts, reading: str, units: str) -> Reading:
    """The reading named `reading` ("ssm", "block") in units "layer", "state" or "cluster:K".

    By state index the skip D belongs to no unit: it is part of `constant`.
    """
    mixer, scan = parts.mixer, parts.scan
    whole = ScanEntries(dt=scan.dt, A_log=mixer.A_log, B=scan.B, C=scan.C, by_state=units == "state")
    index = _channel_index(whole, units)
    entries: Entries = GroupedEntries(whole=whole, index=index) if units.startswith("cluster") else whole
    if reading == "ssm":
        taps = scan.u[None]
    else:
        taps = conv_taps(parts.inner, mixer.conv1d.weight[:, 0], torch.sigmoid(parts.pre))
    return Reading(
        name=reading,
        unit=units.split(":")[0],
        normalisation="contribution",
        W_out=_grouped(mixer.out_proj.weight, index).permute(1, 2, 0),
        constant=_constant(parts, reading, units),
        z_index=index,
        entries=entries,
        taps=_grouped(taps, _shared(index)),
        gate=_grouped(parts.gate, _shared(index)),
        skip=None if units == "state" else _grouped(mixer.D, index),
    )


def _channel_index(whole: ScanEntries, units: str) -> Tensor:
    """Channels of each unit [unit d_source]; -1 is padding."""
    kind, _, count = units.partition(":")
    if kind == "cluster":
        if not count.isdecimal():
            raise ConfigError(f"units are {units!r}; accepted: layer, state, cluster:K with a number K")
        return cluster_channels(whole, int(count))
    return torch.arange(whole.d_entry, device=whole.dt.device).expand(whole.n_units, -1)


def _shared(index: Tensor) -> Tensor:
    """One row where all units have the same channels, so that nothing is copied for each of them."""
    return index[:1] if index.shape[0] > 1 and index.stride(0) == 0 else index


def _grouped(x: Float[Tensor, "*lead channel"], index: Tensor) -> Float[Tensor, "*lead unit d_source"]:
    if index.shape[0] == 1 or index.stride(0) == 0:
        return x[..., None, :].expand(*x.shape[:-1], *index.shape)
    return x[..., index.clamp_min(0)] * (index >= 0)


def _constant(parts: Mamba1Parts, reading: str, units: str) -> Float[Tensor, "batch dest d_model"]:
    """Output bias; the convolution's bias through the scan (block); by state index also the skip."""
    mixer, scan = parts.mixer, parts.scan
    constant = mixer.b_O.expand(*parts.gate.shape[:2], -1)
    inner = torch.zeros_like(scan.u)
    if reading == "block" and mixer.conv1d.bias is not None:
        source = torch.sigmoid(parts.pre) * mixer.conv1d.bias
        D = None if units == "state" else mixer.D
        inner = selective_scan.selective_scan(source, scan.dt, mixer.A_log, scan.B, scan.C, D=D)[0]
    if units == "state":
        inner = inner + mixer.D * scan.u
    return constant + torch.nn.functional.linear(parts.gate * inner, mixer.out_proj.weight)
