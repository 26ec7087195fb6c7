"""Chosen pairs of positions, and sums of log decays or step sizes between them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from kernels import KernelError

# Numbers in the largest temporary tensor of a block of edges.
BLOCK = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Pairs of positions in a batch of sequences, of which not all need be edges: position `dest` of sequence
    `batch` and position `src`, which may lie outside the sequence or after `dest`.
    """

    batch: Int64[Tensor, " n"]
    dest: Int64[Tensor, " n"]
    src: Int64[Tensor, " n"]

    def blocks(self, numbers_per_edge: int) -> list["Placed"]:
        """The edges in blocks whose temporaries stay small."""
        most = BLOCK.get(self.dest.device.type, BLOCK["cpu"])
        size = max(1, most // max(1, numbers_per_edge))
        pieces = zip(self.batch.split(size), self.dest.split(size), self.src.split(size), strict=True)
        return [Placed(batch=b, dest=d, src=s) for b, d, s in pieces]

    def exists(self, window: int | None = None) -> Tensor:
        """True where the edge exists [n]."""
        causal = (self.src >= 0) & (self.src <= self.dest)
        return causal if window is None else causal & (self.src > self.dest - window)

    def at_dest(self, x: Tensor) -> Tensor:
        """Rows of x [batch seq ...] at the destinations."""
        return x[self.batch, self.dest]

    def at_src(self, x: Tensor) -> Tensor:
        """Rows of x [batch seq ...] at the sources; any row where there is none."""
        return x[self.batch, self.src.clamp(0, x.shape[1] - 1)]

    def shifted(self, lag: int) -> "Placed":
        """Sources `lag` later."""
        return Placed(batch=self.batch, dest=self.dest, src=self.src + lag)


@dataclass(frozen=True, kw_only=True)
class Edges(Placed):
    """Edges that exist, each once: position `dest` of sequence `batch` reads position `src`.

    Raises:
        KernelError: No edge, arrays that differ in length or are not int64, a source after its destination, a
        negative position, or an edge that is named twice.
    """

    def __post_init__(self):
        for name in ("batch", "dest", "src"):
            index = getattr(self, name)
            if not isinstance(index, Tensor):
                raise KernelError(f"edges: {name} is a {type(index).__name__}, accepted is an int64 tensor")
            if index.ndim != 1 or index.dtype != torch.int64 or index.shape != self.batch.shape:
                raise KernelError(
                    f"edges: {name} is {index.dtype} {tuple(index.shape)}, "
                    "accepted are int64 arrays of one length"
                )
        if self.batch.numel() == 0:
            raise KernelError("edges: there is no edge, accepted is at least one")
        if bool((self.src > self.dest).any()) or bool((torch.minimum(self.batch, self.src) < 0).any()):
            raise KernelError("edges: a source is after its destination or an index is negative")
        codes = torch.stack([self.batch, self.dest, self.src]).unique(dim=1)
        if codes.shape[1] != self.batch.numel():
            raise KernelError(f"edges: {self.batch.numel() - codes.shape[1]} edges are named twice")


class Between:
    """Sum of x [batch seq ...] over src < r <= dest. Cumulative sums in float64, so that differences keep
    their digits.
    """

    def __init__(self, x: Tensor):
        self.total = x.double().cumsum(dim=1)

    def __call__(self, at: Placed) -> Tensor:
        return at.at_dest(self.total) - at.at_src(self.total)


class LogDecayBetween:
    """The same for log decays, which may be -inf (a reset): -inf where a reset lies between."""

    def __init__(self, log_decay: Tensor):
        self.per_channel = log_decay.ndim == 4
        resets = torch.isneginf(log_decay)
        self.finite = Between(log_decay.masked_fill(resets, 0))
        # To ask a GPU whether there is one would take longer.
        self.resets = Between(resets) if resets.is_cuda or bool(resets.any()) else None

    def __call__(self, at: Placed) -> Tensor:
        sums = self.finite(at)
        hidden = (~at.exists()).view(-1, *[1] * (sums.ndim - 1))
        if self.resets is not None:
            hidden = hidden | (self.resets(at) > 0)
        return sums.masked_fill(hidden, -torch.inf)


def blockwise(block: Callable[[Placed], Tensor], edges: Placed, numbers_per_edge: int) -> Tensor:
    """A function of edges, evaluated in blocks; `numbers_per_edge` sizes them."""
    return torch.cat([block(at) for at in edges.blocks(numbers_per_edge)])


def check_range(edges: Edges, x: Tensor) -> None:
    """Raise KernelError for what is not Edges, or an edge outside x [batch seq ...]."""
    if not isinstance(edges, Edges):
        raise KernelError(f"edges: edges is a {type(edges).__name__}, accepted is an Edges")
    batch, seq = x.shape[:2]
    if int(edges.batch.max()) >= batch or int(edges.dest.max()) >= seq:
        raise KernelError(
            f"edges: largest batch {int(edges.batch.max())} and destination {int(edges.dest.max())}, "
            f"accepted are below {batch} and {seq}"
        )
