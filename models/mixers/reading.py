"""What one layer moved from each source position to each destination: exact, per unit, for every mixer.

A mixer's output is a sum of contributions of source positions plus a constant,

    output[i] = constant[i] + sum_u sum_{j<=i} c[i,j,u],        c[i,j,u] = y[i,j,u] @ W_out[u]
    y[i,j,u]  = gate[i,u] * sum_l (A[i,j+l,u] + skip[u] [i = j+l]) * taps[l,j,u]

where A is the mixer's implied attention, `taps[l,j]` is what the short convolution puts of source j into the
value at position j + l (one tap where the sources are the values themselves), `skip` is Mamba's D, and `gate`
holds the output gate, the weight of the gated norm and its scale, frozen at this input. A unit is a head, a
whole layer, a state index or a cluster of channels.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from models.mixers.entries import Entries

# Largest temporary tensor of a row block, in bytes.
BLOCK_BYTES = 64 * 2**20
# How many times that on a GPU, where small blocks leave it idle.
CUDA_BLOCKS = 16
# Up to how many times as wide as its vectors W_out gives the norms of contributions on a GPU itself.
WIDE_ON_CUDA = 4


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One layer's contributions on one batch of sequences.

    Attributes:
        name: "pattern" (softmax, linear), "ssm" (sources are the scan's inputs) or "block" (sources are the
        layer's
            input positions: convolution, gate and skip composed).
        unit: "head", "layer", "state" or "cluster".
        normalisation: How `weights` are made of contributions: "none", "abs_row" or "contribution".
        W_out: Output map of each unit.
        constant: What no source position of a unit carries (biases; Mamba-1 by state index: also the skip).
        z_index: Where a unit's d_source entries lie in the flattened [head d_head] of `hook_z`; -1 is
        padding.
        entries, taps, gate, skip: See the module's formula. Axes of size 1 stand for "the same for all".
        make_pattern: Computes `pattern`; None where an edge is a vector, not a scalar.
    """

    name: Literal["pattern", "ssm", "block"]
    unit: Literal["head", "layer", "state", "cluster"]
    normalisation: Literal["none", "abs_row", "contribution"]
    W_out: Float[Tensor, "unit d_source d_model"]
    constant: Float[Tensor, "batch dest d_model"]
    z_index: Int64[Tensor, "unit d_source"]
    entries: Entries
    taps: Float[Tensor, "tap batch src unit_or_1 d_source"]
    gate: Float[Tensor, "batch dest unit_or_1 d_source"] | None = None
    skip: Float[Tensor, "unit d_entry"] | None = None
    make_pattern: Callable[[], Tensor] | None = None

    @property
    def n_units(self) -> int:
        return self.entries.n_units

    @property
    def n_seq(self) -> int:
        return self.constant.shape[1]

    @property
    def n_batch(self) -> int:
        return self.constant.shape[0]

    @cached_property
    def pattern(self) -> Float[Tensor, "batch unit dest src"] | None:
        """The mixer's own signed scalar A (without the skip), where an edge is a scalar; else None."""
        return None if self.make_pattern is None else self.make_pattern()

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit d_source"]:
        """Gated source vectors y of destinations start .. stop-1, for every source (0 above the diagonal).

        Memory: batch x rows x seq x unit x d_source numbers; choose the rows.
        """
        y = self._gated_rows(start, stop)
        return torch.nn.functional.pad(y, (0, 0, 0, 0, 0, self.n_seq - stop))

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_source"]:
        """Gated source vectors y of chosen edges; zero where src > dest. Memory linear in n."""
        y = self.z_edges(batch, dest, src)
        return y if self.gate is None else y * self.gate[batch, dest]

    def contribution(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_model"]:
        """Contributions of chosen edges to the mixer's output, in the residual stream's space."""
        return torch.einsum("nus,usd->nud", self.edges(batch, dest, src), self.W_out)

    def z_edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_source"]:
        """Chosen edges at the level of `hook_z`, before gate and norm: what a causal cut subtracts there."""
        total = None
        # Every edge once for each tap, as many taps together as fit a block.
        together = max(1, int(self._block_numbers / max(1, src.numel() * self.n_units * self.taps.shape[-1])))
        for lags in torch.arange(self.taps.shape[0], device=src.device).split(together):
            n = len(lags)
            at, to = (src + lags[:, None]).flatten(), dest.repeat(n)
            entry = self.entries.edges(batch.repeat(n), to, at)
            if self.skip is not None:
                entry = entry + self.skip * (at == to)[:, None, None]
            # A tap past the end of the sequence meets an entry of 0.
            for term in (entry.unflatten(0, (n, -1)) * self.taps[lags[:, None], batch, src]).unbind():
                total = term if total is None else total + term
        return total

    def cut(
        self,
        z: Float[Tensor, "batch dest head d_head"],
        batch: Int64[Tensor, " n"],
        dest: Int64[Tensor, " n"],
        src: Int64[Tensor, " n"],
        *,
        units: list[int] | None = None,
    ) -> Float[Tensor, "batch dest head d_head"]:
        """A copy of `hook_z` with the chosen edges of the chosen units (None: all) taken out.

        Each edge is to be named once: naming it twice subtracts it twice.
        """
        chosen = (
            torch.arange(self.n_units, device=z.device) if units is None else torch.tensor(units).to(z.device)
        )
        y = self.z_edges(batch, dest, src)[:, chosen].flatten(1).to(z.dtype)
        index = self.z_index[chosen].flatten()
        kept = index >= 0
        flat = z.flatten(2)
        total = torch.zeros_like(flat).flatten(0, 1)
        wide = torch.zeros(y.shape[0], flat.shape[-1], dtype=z.dtype, device=z.device)
        wide.index_add_(1, index[kept], y[:, kept])
        total.index_add_(0, batch * flat.shape[1] + dest, wide)
        return z - total.view_as(z)

    def weights(self, rows: slice | None = None) -> Float[Tensor, "batch unit rows src"]:
        """The weights that prefix matching uses, for a range of destinations (None: all).

        normalisation "none": the pattern as it is. "abs_row": |A| / sum_j |A|. "contribution":
        norm of c[i,j] / sum_j of it. A row that moves nothing has weights 0. Memory beside the result: a
        few times `BLOCK_BYTES` (or one row, where that is more), and for Mamba-1 a few times
        [batch seq channel d_state]. No [channel dest src] tensor is made.
        """
        first, last, _ = (rows or slice(None)).indices(self.n_seq)
        out = self.constant.new_zeros(self.n_batch, self.n_units, max(last - first, 0), self.n_seq)
        for (start, stop), size in self._walk(first, last):
            if self.normalisation != "none":
                size = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
            out[:, :, start - first : stop - first, :stop] = size
        return out

    def edge_weights(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit"]:
        """`weights` on chosen edges only. The row sums they need are computed once and kept."""
        if self.normalisation == "contribution":
            y = self.edges(batch, dest, src)
            size = torch.einsum("nus,usr->nur", y, self._norm_factor).norm(dim=-1)
        else:
            size = self.entries.edges(batch, dest, src)[..., 0]
        if self.normalisation == "none":
            return size
        return size.abs() / self.row_sums[batch, :, dest].clamp_min(torch.finfo(size.dtype).tiny)

    @cached_property
    def row_sums(self) -> Float[Tensor, "batch unit dest"]:
        """Sum over sources of what `weights` are normalised with: |A|, or the norms of the contributions."""
        if self.normalisation == "abs_row":
            sums = self.entries.abs_row_sums()
            if sums is not None:
                return sums
        return torch.cat([size.abs().sum(-1) for _, size in self._walk(0, self.n_seq)], -1)

    def row_blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Ranges of destinations whose source vectors take at most `BLOCK_BYTES`, or `least_rows` long."""
        width = self.n_units * max(self.taps.shape[-1], self._norm_width)
        # A block of n rows from `start` has n (start + n) entries, as no row looks beyond the block's end.
        most = self._block_numbers / (self.n_batch * width)
        start = first
        while start < last:
            n = max(self.entries.least_rows, int((math.sqrt(start * start + 4 * most) - start) / 2))
            yield start, min(last, start + n)
            start = min(last, start + n)

    @property
    def _block_numbers(self) -> float:
        """Numbers in the largest temporary tensor."""
        numbers = BLOCK_BYTES / self.constant.element_size()
        return numbers * CUDA_BLOCKS if self.constant.is_cuda else numbers

    def _walk(self, first: int, last: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Blocks of destinations (start, stop) and their un-normalised weights [batch unit rows src=stop]."""
        blocks = list(self.row_blocks(first, last))
        for (start, stop), entry in zip(blocks, self.entries.walk(blocks), strict=True):
            if self.normalisation == "contribution":
                y = torch.einsum("bijus,usr->bijur", self._gated(entry, start, stop), self._norm_factor)
                yield (start, stop), y.norm(dim=-1).permute(0, 3, 1, 2)
            else:
                size = entry[..., 0].permute(0, 3, 1, 2)
                yield (start, stop), size if self.normalisation == "none" else size.abs()

    def _gated_rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src=stop unit d_source"]:
        return self._gated(self.entries.rows(start, stop), start, stop)

    def _gated(
        self, entry: Float[Tensor, "batch rows src unit d_entry"], start: int, stop: int
    ) -> Float[Tensor, "batch rows src unit d_source"]:
        if self.skip is not None:
            at = torch.arange(start, stop, device=entry.device)
            entry = entry.clone()
            entry[:, at - start, at] += self.skip
        y = entry * self.taps[0][:, None, :stop]
        for lag in range(1, min(self.taps.shape[0], stop)):
            y[:, :, : stop - lag] += entry[:, :, lag:] * self.taps[lag][:, None, : stop - lag]
        return y if self.gate is None else y * self.gate[:, start:stop, None]

    @property
    def _norm_width(self) -> int:
        if self.normalisation != "contribution":
            return 1
        return self.W_out.shape[2] if self._norms_by_W_out else self.W_out.shape[1]

    @property
    def _norms_by_W_out(self) -> bool:
        """Whether contributions are made whole for their norms: where that is narrow, or on a GPU quicker
        than what waits for the CPU."""
        _, d_source, width = self.W_out.shape
        return width <= (WIDE_ON_CUDA * d_source if self.W_out.is_cuda else d_source)

    @cached_property
    def _norm_factor(self) -> Float[Tensor, "unit d_source width"]:
        """F with |y @ W_out| = |y @ F|, as narrow as W_out's smaller side.

        F is the transposed triangle of W_out's QR decomposition, a square root of its Gram matrix that does
        not square rounding errors. Found on the CPU: a GPU's solver takes seconds to load and is no quicker.
        """
        if self._norms_by_W_out:
            return self.W_out
        R = torch.linalg.qr(self.W_out.transpose(1, 2).cpu(), mode="r").R
        return R.transpose(1, 2).to(self.W_out.device)
