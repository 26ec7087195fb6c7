"""Entries of each implied attention on demand: row blocks and chosen edges, nothing larger.

Each class computes the function of its kernel's `pattern`.
"""

import abc
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kernels import selective_scan, softmax_attention
from kernels.segment_sum import segment_sum
from models.mixers.scan_rows import scan_rows

# Numbers in the largest temporary tensor of an edge computation.
EDGE_BLOCK = 2**24


class Entries(abc.ABC):
    """An implied attention by entry: a number (`d_entry` 1) or a vector of the unit's d_source numbers."""

    n_units: int
    d_entry: int

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit d_entry"]:
        """Destinations start .. stop-1, sources 0 .. stop-1; 0 above the diagonal."""

    @abc.abstractmethod
    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_entry"]:
        """Chosen entries; those with src > dest, or src past the end, are 0. Memory linear in n."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxEntries(Entries):
    """Softmax attention: q and k as they are multiplied (rotated, normalised)."""

    q: Float[Tensor, "batch seq head d_head"]
    k: Float[Tensor, "batch seq kv_head d_head"]
    scale: float
    window: int | None = None
    sink: Float[Tensor, " head"] | None = None
    d_entry: int = 1

    @property
    def n_units(self) -> int:
        return self.q.shape[2]

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit 1"]:
        """Destinations start .. stop-1, sources 0 .. stop-1."""
        rows = softmax_attention.pattern(
            self.q[:, start:stop], self.k[:, :stop], scale=self.scale, window=self.window, sink=self.sink
        )
        return rows.permute(0, 2, 3, 1)[..., None]

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit 1"]:
        """exp(score - logsumexp) on chosen edges."""
        allowed, src = _causal(dest, src, self.q.shape[1])
        if self.window is not None:
            allowed = allowed & (src > dest - self.window)
        keys = self.k[batch, src].repeat_interleave(self.n_units // self.k.shape[2], 1)
        scores = (self.q[batch, dest] * keys).sum(-1) * self.scale
        weights = torch.exp((scores - self._lse[batch, dest]).masked_fill(~allowed[:, None], -math.inf))
        return weights[..., None]

    @cached_property
    def _lse(self) -> Float[Tensor, "batch seq head"]:
        lse = softmax_attention.logsumexp(
            self.q, self.k, scale=self.scale, window=self.window, sink=self.sink
        )
        return lse.transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class LinearEntries(Entries):
    """Linear attention and Mamba-2's scan: q and k after their feature map, per head or group of heads."""

    q: Float[Tensor, "batch seq group d_k"]
    k: Float[Tensor, "batch seq group d_k"]
    n_units: int
    scale: float = 1.0
    log_decay: Float[Tensor, "batch seq head"] | None = None
    k_weight: Float[Tensor, "batch seq head"] | None = None
    normalise: bool = False
    eps: float = 0.0
    d_entry: int = 1

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit 1"]:
        """Destinations start .. stop-1, sources 0 .. stop-1."""
        q, k = self._heads(self.q[:, start:stop]), self._heads(self.k[:, :stop])
        products = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        at = torch.arange(stop, device=q.device)
        later = at > at[start:, None]
        if self.log_decay is None:
            products = products.masked_fill(later, 0)
        else:
            decay = segment_sum(self.log_decay[:, :stop].transpose(1, 2), slice(start, stop))
            products = products * torch.exp(decay.masked_fill(later, -math.inf))
        if self.k_weight is not None:
            products = products * self.k_weight[:, :stop].transpose(1, 2)[:, :, None]
        if self.normalise:
            products = products / self._denominator[:, start:stop].transpose(1, 2)[..., None]
        return products.permute(0, 2, 3, 1)[..., None]

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit 1"]:
        """The same function on chosen edges."""
        allowed, src = _causal(dest, src, self.q.shape[1])
        repeat = self.n_units // self.q.shape[2]
        products = (self.q[batch, dest] * self.k[batch, src]).sum(-1).repeat_interleave(
            repeat, 1
        ) * self.scale
        if self.log_decay is not None:
            elapsed = (self._total_decay[batch, dest] - self._total_decay[batch, src]).to(products.dtype)
            products = products * torch.exp(elapsed.masked_fill(~allowed[:, None], -math.inf))
        if self.k_weight is not None:
            products = products * self.k_weight[batch, src]
        if self.normalise:
            products = products / self._denominator[batch, dest]
        return products.masked_fill(~allowed[:, None], 0)[..., None]

    def _heads(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.n_units // x.shape[2], 2)

    @cached_property
    def _total_decay(self) -> Float[Tensor, "batch seq head"]:
        # Differences of long sums: float64 keeps their digits.
        return self.log_decay.double().cumsum(1)

    @cached_property
    def _denominator(self) -> Float[Tensor, "batch seq head"]:
        if self.log_decay is not None or self.k_weight is not None:
            blocks = [
                self._plain.rows(start, min(start + 64, self.q.shape[1]))[..., 0].sum(2)
                for start in range(0, self.q.shape[1], 64)
            ]
            return torch.cat(blocks, 1) + self.eps
        row_sum = (self.q * self.k.cumsum(1)).sum(-1) * self.scale + self.eps
        return row_sum.repeat_interleave(self.n_units // self.q.shape[2], 2)

    @cached_property
    def _plain(self) -> "LinearEntries":
        return LinearEntries(
            q=self.q, k=self.k, n_units=self.n_units, scale=self.scale,
            log_decay=self.log_decay, k_weight=self.k_weight,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScanEntries(Entries):
    """Mamba-1's scan: one unit whose entries are vectors over channels, or one such unit per state index."""

    dt: Float[Tensor, "batch seq channel"]
    A_log: Float[Tensor, "channel d_state"]
    B: Float[Tensor, "batch seq d_state"]
    C: Float[Tensor, "batch seq d_state"]
    by_state: bool = False

    @property
    def n_units(self) -> int:
        return self.A_log.shape[1] if self.by_state else 1

    @property
    def d_entry(self) -> int:
        return self.A_log.shape[0]

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit channel"]:
        """Destinations start .. stop-1, sources 0 .. stop-1; batch x rows x stop x unit x channel numbers."""
        inputs = (self.dt[:, :stop], self.A_log, self.B[:, :stop], self.C[:, :stop])
        if self.by_state:
            rows = selective_scan.pattern_by_state(*inputs, rows=slice(start, stop))
            return rows.permute(0, 3, 4, 2, 1)
        return scan_rows(*inputs, start, stop)[:, :, :, None]

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit channel"]:
        """The same on chosen edges: n x unit x channel numbers and temporaries of `EDGE_BLOCK`."""
        size = max(1, EDGE_BLOCK // (self.d_entry * self.A_log.shape[1]))
        blocks = zip(batch.split(size), dest.split(size), src.split(size), strict=True)
        return torch.cat([self._edge_block(*block) for block in blocks])

    def _edge_block(self, batch: Tensor, dest: Tensor, src: Tensor) -> Tensor:
        allowed, src = _causal(dest, src, self.dt.shape[1])
        elapsed = (self._total_dt[batch, dest] - self._total_dt[batch, src]).to(self.dt.dtype)
        rates = -torch.exp(self.A_log)
        # Masked before exp: a source in the future would overflow.
        decay = torch.exp(
            (elapsed[:, None] * rates.T).masked_fill(~allowed[:, None, None], -math.inf)
        )  # [n d_state channel]
        terms = decay * (self.C[batch, dest] * self.B[batch, src])[..., None]
        if not self.by_state:
            terms = terms.sum(1, keepdim=True)
        return terms * self.dt[batch, src][:, None]

    @cached_property
    def _total_dt(self) -> Float[Tensor, "batch seq channel"]:
        return self.dt.double().cumsum(1)


@dataclass(frozen=True, kw_only=True)
class GroupedEntries(Entries):
    """Entries of one unit regrouped into units of chosen channels; index -1 is padding and gives 0."""

    whole: ScanEntries
    index: Int64[Tensor, "unit d_entry"]

    @property
    def n_units(self) -> int:
        return self.index.shape[0]

    @property
    def d_entry(self) -> int:
        return self.index.shape[1]

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit d_entry"]:
        """Destinations start .. stop-1, sources 0 .. stop-1."""
        return self._grouped(self.whole.rows(start, stop))

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_entry"]:
        """The same on chosen edges."""
        return self._grouped(self.whole.edges(batch, dest, src))

    def _grouped(self, entry: Tensor) -> Tensor:
        return entry[..., 0, :][..., self.index.clamp_min(0)] * (self.index >= 0)


def _causal(
    dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"], seq: int
) -> tuple[Bool[Tensor, " n"], Int64[Tensor, " n"]]:
    """Which edges exist, and sources that can be indexed everywhere."""
    return (src >= 0) & (src <= dest), src.clamp(0, seq - 1)
