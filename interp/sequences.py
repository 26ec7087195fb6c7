"""Probe sequences: random tokens, once or repeated, and what an ideal head would attend to in them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.errors import DetectionError

T = TypeVar("T")

# Compared by identity: what is computed from the tokens is kept with them, for every checkpoint.
@dataclass(frozen=True, kw_only=True, eq=False)
class RepeatedTokens:
    """Sequences in which tokens come again, with an optional BOS at position 0.

    `period` and `repeats` say how the sequences were made; what counts as an earlier copy is always decided
    by token equality, so tokens from anywhere may be given.
    """

    tokens: Int[Tensor, "batch seq"]
    period: int
    repeats: int
    bos: int | None = None
    seed: int | None = None

    @property
    def first(self) -> int:
        """The position of the first token that is not BOS."""
        return 0 if self.bos is None else 1

    @cached_property
    def earlier(self) -> tuple[Int[Tensor, "batch seq n"], Bool[Tensor, "batch seq n"]]:
        """Positions `s < i` with `x_s = x_i`, the most recent first, and which of the n places are filled.

        BOS is no copy of anything. n is the largest number of earlier copies that any position has.
        """
        return self.earlier_of(slice(None))

    def earlier_of(
        self, rows: slice
    ) -> tuple[Int[Tensor, "batch row n"], Bool[Tensor, "batch row n"]]:
        """`earlier` of some positions, where n is the largest number of any of those."""
        order, place, count = self._copies
        place, count = place[:, rows], count[:, rows]
        n = int(count.max()) if count.numel() else 0
        lag = torch.arange(1, n + 1, device=order.device)
        filled = lag <= count[..., None]
        found = (place[..., None] - lag).clamp_min(0).flatten(1)
        source = torch.where(filled, order.gather(1, found).view(filled.shape), -1)
        return source, filled

    @cached_property
    def n_earlier(self) -> Int[Tensor, "batch seq"]:
        """How many earlier copies each position has."""
        return self._copies[2]

    @cached_property
    def latest(self) -> Int[Tensor, "batch seq"]:
        """Position of the most recent earlier copy of each token; -1 where there is none."""
        return self._copy_at(1)

    @cached_property
    def earliest(self) -> Int[Tensor, "batch seq"]:
        """Position of the first copy of each token that comes again; -1 at that copy itself."""
        return self._copy_at(self.n_earlier)

    def _copy_at(self, back: int | Tensor) -> Int[Tensor, "batch seq"]:
        order, place, count = self._copies
        return torch.where(count > 0, order.gather(1, (place - back).clamp_min(0)), -1)

    @cached_property
    def _copies(self) -> tuple[Int[Tensor, "batch seq"], ...]:
        """Positions in order of token, then time; each position's place there; how many equals precede it."""
        # What stands before the first token is like nothing else.
        tokens = self.tokens.long().clone()
        tokens[:, : self.first] = -1
        order = tokens.argsort(dim=1, stable=True)
        ranked = tokens.gather(1, order)
        index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        new = torch.ones_like(ranked, dtype=torch.bool)
        new[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
        start = torch.where(new, index, 0).cummax(dim=1).values
        place = torch.empty_like(order).scatter_(1, order, index)
        count = torch.empty_like(order).scatter_(1, order, index - start)
        return order, place, count

    @cached_property
    def edges(self) -> tuple[Int[Tensor, "batch edge"], Int[Tensor, "batch edge"]]:
        """The induction edges of each sequence as `(dest, src)`: src follows an earlier copy of dest's token.

        Padded to equal numbers with the edge (0, 1), which carries nothing: its source comes after it.
        """
        return self.edges_of(slice(0, self.tokens.shape[1]))

    def edges_of(self, rows: slice) -> tuple[Int[Tensor, "batch edge"], Int[Tensor, "batch edge"]]:
        """`edges` of some destinations, rows.start .. rows.stop-1."""
        source, filled = self.earlier_of(rows)
        dest = torch.arange(rows.start, rows.stop, device=source.device)[None, :, None].expand_as(source)
        dest, src = torch.where(filled, dest, 0), torch.where(filled, source + 1, 1)
        n = int(filled.sum((1, 2)).max())
        order = filled.flatten(1).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :n]
        return dest.flatten(1).gather(1, order), src.flatten(1).gather(1, order)

    def take(self, sequences: slice) -> "RepeatedTokens":
        """The probe of some of the sequences, the same object for the same ones; itself where that is all."""
        which = sequences.indices(len(self.tokens))
        if which == (0, len(self.tokens), 1):
            return self
        return self.once(("take", *which), lambda: replace(self, tokens=self.tokens[slice(*which)]))

    def has_target(self, offset: int) -> Bool[Tensor, "batch dest n"]:
        """Which of the n earlier copies s of each position have a readable `s + offset`.

        A target after the position itself cannot be attended to, and one before position 0 does not exist.
        """

        def found() -> Tensor:
            source, filled = self.earlier
            target = source + offset
            row = torch.arange(source.shape[1], device=source.device)[:, None]
            return filled & (target <= row) & (target >= 0)

        return self.once(("has_target", offset), found)

    def once(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """`make()` of the first call with this key: for what follows from the tokens alone."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[Hashable, ...], Any]:
        return {}

    def to(self, device: torch.device | str) -> "RepeatedTokens":
        """The same probe with its tokens on `device`."""
        return replace(self, tokens=self.tokens.to(device))


def candidates(
    d_vocab: int, *, excluded: set[int] | None = None, ranked: list[int] | None = None
) -> Int[Tensor, " candidate"]:
    """The ids that a probe may draw: no special ids, and neither the most nor the least common tenth.

    Args:
        d_vocab: Vocabulary size.
        excluded: Special ids, BOS among them.
        ranked: Ids from most to least common. None where frequencies are unknown: byte-pair ids are in order
            of merging, so in vocabularies of 1,000 and more the first and last tenth of the ids are left out;
            in smaller ones (bytes, toy tasks) nothing is.
    """
    if ranked is None:
        ids = list(range(d_vocab))
        trim = d_vocab // 10 if d_vocab >= 1000 else 0
    else:
        ids, trim = list(ranked), len(ranked) // 10
    kept = [token for token in ids[trim : len(ids) - trim] if token not in (excluded or set())]
    return torch.tensor(sorted(kept), dtype=torch.int64)


def repeated_tokens(
    n_sequences: int,
    period: int,
    repeats: int,
    *,
    ids: Int[Tensor, " candidate"],
    bos: int | None = None,
    seed: int = 0,
    shuffled: bool = False,
) -> RepeatedTokens:
    """`period` distinct random tokens, tiled `repeats` times, after BOS where one is given.

    Drawn without replacement: with replacement an ideal head would not score 1. `shuffled` puts the tokens of
    every copy after the first in an order of their own, which keeps the set of tokens and takes the order
    away; first copies are the same as without it.

    Raises:
        DetectionError: fewer candidates than `period`, or a count below 1.
    """
    if min(n_sequences, period, repeats) < 1:
        raise DetectionError(
            f"a probe of {n_sequences} sequences of {period} x {repeats}: each must be at least 1"
        )
    if len(ids) < period:
        raise DetectionError(
            f"the vocabulary has {len(ids)} usable tokens, the probe needs {period} distinct ones; "
            f"give a period of {len(ids)} or less"
        )
    draw = torch.Generator().manual_seed(seed)
    block = torch.stack([ids[torch.randperm(len(ids), generator=draw)[:period]] for _ in range(n_sequences)])
    copies = [block] * repeats
    if shuffled:
        keys = [torch.rand(n_sequences, period, generator=draw) for _ in range(repeats - 1)]
        copies = [block, *(block.gather(1, key.argsort(dim=1)) for key in keys)]
    tokens = torch.cat(copies, dim=1)
    if bos is not None:
        tokens = torch.cat([torch.full((n_sequences, 1), bos), tokens], dim=1)
    return RepeatedTokens(tokens=tokens, period=period, repeats=repeats, bos=bos, seed=seed)
