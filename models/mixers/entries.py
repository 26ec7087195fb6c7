"""Entries of each implied attention on demand: row blocks and chosen edges, nothing larger.

Each class computes the function of its kernel's `pattern`.
"""

import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kernels import KernelError, gated_linear_attention, selective_scan, softmax_attention
from kernels import edges as edge_kernels
from kernels.checks import resolve_backend, triton_unfit
from kernels.edge_set import Between, LogDecayBetween, Placed
from kernels.row_sums import linear_abs_row_sum
from models.mixers.scan_rows import TILE, scan_rows, walk_scan_rows


class Entries(abc.ABC):
    """An implied attention by entry: a number (`d_entry` 1) or a vector of the unit's d_source numbers."""

    n_units: int
    d_entry: int
    # Fewer rows than these in a block cost as much time as they do.
    least_rows: ClassVar[int] = 1

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit d_entry"]:
        """Destinations start .. stop-1, sources 0 .. stop-1; 0 above the diagonal."""

    @abc.abstractmethod
    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_entry"]:
        """Chosen entries; those with src > dest, or src past the end, are 0. Memory linear in n."""

    def walk(
        self, blocks: Iterable[tuple[int, int]]
    ) -> Iterator[Float[Tensor, "batch rows src unit d_entry"]]:
        """`rows` of blocks (start, stop), each beginning where the one before ended."""
        return (self.rows(*block) for block in blocks)

    def abs_row_sums(self) -> Float[Tensor, "batch unit dest"] | None:
        """sum_j |A| where there is a quicker way to it than through all rows of A; else None."""
        return None

    def match_sums(
        self,
        label_dest: Int64[Tensor, "batch seq"],
        label_src: Int64[Tensor, "batch seq"],
        *,
        backend: str | None = None,
    ) -> Float[Tensor, "batch unit dest"] | None:
        """sum of A[i, j] over the sources j <= i with label_src[j] = label_dest[i], by the fused kernels.

        Time and memory do not grow with the number of matches. None where the entries have no such kernel or
        the backend is torch, by the rule of `kernels.checks.resolve_backend`.

        Args:
            label_dest, label_src: Numbers from 0 up; -2 among the destinations and -1 among the sources match
                nothing.
            backend: "triton" is met or refused; None goes by the tensors' device.

        Raises:
            KernelError: backend "triton" where it is not available.
        """
        if backend == "triton":
            raise KernelError(f"match_sums: {type(self).__name__} has no Triton kernel; accepted: 'torch'")
        return None


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
        at = Placed(batch=batch, dest=dest, src=src)
        options = {"scale": self.scale, "window": self.window}
        return edge_kernels.softmax_weights(self.q, self.k, at, self._lse, **options)[..., None]

    def match_sums(
        self,
        label_dest: Int64[Tensor, "batch seq"],
        label_src: Int64[Tensor, "batch seq"],
        *,
        backend: str | None = None,
    ) -> Float[Tensor, "batch unit dest"] | None:
        """One pass over the tiles for all matches."""
        if self._backend(backend) == "torch":
            return None
        from kernels.triton.edges import softmax_matches

        return softmax_matches(self.q, self.k, label_dest, label_src, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window, "sink": self.sink}

    def _backend(self, asked: str | None) -> str:
        unfit = triton_unfit("chunked", {"d_head": self.q.shape[-1]}, self.q, self.k)
        return resolve_backend("softmax_attention", asked, self.q, unfit)

    @cached_property
    def _lse(self) -> Float[Tensor, "batch seq head"]:
        if self._backend(None) == "triton":
            from kernels.triton.softmax_attention import softmax_attention as fused

            # Nothing is done with the values: those of the keys' width need no kernel of their own.
            return fused(self.q, self.k, self.k, **self._options)[1].transpose(1, 2)
        return softmax_attention.logsumexp(self.q, self.k, **self._options).transpose(1, 2)


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
        before = {name: None if x is None else x[:, :stop] for name, x in self._gates.items()}
        rows = gated_linear_attention.pattern(
            self.q[:, :stop], self.k[:, :stop], scale=self.scale, rows=slice(start, stop), **before
        )
        if self.normalise:
            rows = rows / self._denominator[:, start:stop].transpose(1, 2)[..., None]
        return rows.permute(0, 2, 3, 1)[..., None]

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit 1"]:
        """The same function on chosen edges."""
        weights = edge_kernels.linear_weights(
            self.q,
            self.k,
            Placed(batch=batch, dest=dest, src=src),
            self._denominator if self.normalise else None,
            n_heads=self.n_units,
            scale=self.scale,
            between=self._between,
            **self._gates,
        )
        return weights[..., None]

    def abs_row_sums(self) -> Float[Tensor, "batch unit dest"]:
        """sum_j |A| without any row of A."""
        sums = linear_abs_row_sum(self.q, self.k, n_heads=self.n_units, scale=self.scale, **self._gates)
        return (sums / self._denominator.abs() if self.normalise else sums).transpose(1, 2)

    def match_sums(
        self,
        label_dest: Int64[Tensor, "batch seq"],
        label_src: Int64[Tensor, "batch seq"],
        *,
        backend: str | None = None,
    ) -> Float[Tensor, "batch unit dest"] | None:
        """The operator itself over positions in order of label: linear in length."""
        # As wide as the operator's own kernels go.
        unfit = triton_unfit("chunked", {"d_k": self.q.shape[-1]}, self.q, self.k, limit=128)
        if resolve_backend("gated_linear_attention", backend, self.q, unfit) == "torch":
            return None
        from kernels.triton.edges import linear_matches

        sums = linear_matches(self.q, self.k, label_dest, label_src, scale=self.scale, **self._gates)
        sums = sums.repeat_interleave(self.n_units // sums.shape[1], 1)
        return sums / self._denominator.transpose(1, 2) if self.normalise else sums

    @property
    def _gates(self) -> dict[str, Tensor | None]:
        return {"log_decay": self.log_decay, "k_weight": self.k_weight}

    @cached_property
    def _between(self) -> LogDecayBetween | None:
        shape = (*self.q.shape[:2], self.n_units)
        return None if self.log_decay is None else edge_kernels.decay_between(self.log_decay, shape)

    @cached_property
    def _denominator(self) -> Float[Tensor, "batch seq head"]:
        if not self.q.is_cuda:
            options = {"n_heads": self.n_units, "scale": self.scale, "eps": self.eps}
            return edge_kernels.linear_denominator(self.q, self.k, **options, **self._gates)
        # The same through the operator, which has kernels there.
        ones = torch.ones(*self.q.shape[:2], self.n_units, 1, dtype=self.q.dtype, device=self.q.device)
        operator = gated_linear_attention.gated_linear_attention
        return operator(self.q, self.k, ones, scale=self.scale, **self._gates)[0][..., 0] + self.eps


@dataclass(frozen=True, kw_only=True)
class ScanEntries(Entries):
    """Mamba-1's scan: one unit whose entries are vectors over channels, or one such unit per state index."""

    dt: Float[Tensor, "batch seq channel"]
    A_log: Float[Tensor, "channel d_state"]
    B: Float[Tensor, "batch seq d_state"]
    C: Float[Tensor, "batch seq d_state"]
    by_state: bool = False
    least_rows = TILE

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

    def walk(
        self, blocks: Iterable[tuple[int, int]]
    ) -> Iterator[Float[Tensor, "batch rows src unit channel"]]:
        """The same, block after block; without gradients in one pass over the sequence."""
        inputs = (self.dt, self.A_log, self.B, self.C)
        if self.by_state or torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            return super().walk(blocks)
        return (rows[:, :, :, None] for rows in walk_scan_rows(*inputs, blocks))

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit channel"]:
        """The same on chosen edges: n x unit x channel numbers and temporaries of a fixed size."""
        at = Placed(batch=batch, dest=dest, src=src)
        inputs = (self.dt, self.A_log, self.B, self.C, at)
        if self.by_state:
            return edge_kernels.scan_weights_by_state(*inputs, elapsed=self._elapsed)
        return edge_kernels.scan_weights(*inputs, elapsed=self._elapsed)[:, None]

    @cached_property
    def _elapsed(self) -> Between:
        return Between(self.dt)


@dataclass(frozen=True, kw_only=True)
class GroupedEntries(Entries):
    """Entries of one unit regrouped into units of chosen channels; index -1 is padding and gives 0."""

    whole: ScanEntries
    index: Int64[Tensor, "unit d_entry"]
    least_rows = TILE

    @property
    def n_units(self) -> int:
        return self.index.shape[0]

    @property
    def d_entry(self) -> int:
        return self.index.shape[1]

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src unit d_entry"]:
        """Destinations start .. stop-1, sources 0 .. stop-1."""
        return self._grouped(self.whole.rows(start, stop))

    def walk(
        self, blocks: Iterable[tuple[int, int]]
    ) -> Iterator[Float[Tensor, "batch rows src unit d_entry"]]:
        """The same, block after block."""
        return (self._grouped(rows) for rows in self.whole.walk(blocks))

    def edges(
        self, batch: Int64[Tensor, " n"], dest: Int64[Tensor, " n"], src: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_entry"]:
        """The same on chosen edges."""
        return self._grouped(self.whole.edges(batch, dest, src))

    def _grouped(self, entry: Tensor) -> Tensor:
        return entry[..., 0, :][..., self.index.clamp_min(0)] * (self.index >= 0)
