"""Which edges an offset profile cuts, and where the loss is read. Memory linear in the edges.

A match is a pair (s, i) with x_s = x_i and s < i. The edge at offset delta reads position s + delta from i.
Induction predicts position i where the bigram (x_i, x_{i+1}) has occurred before: there the loss of x_{i+1}
is read.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from interp.errors import DetectionError
from interp.sequences import RepeatedTokens


class Edges(NamedTuple):
    """Edges of a batch of sequences: dest reads src."""

    batch: Int64[Tensor, " n"]
    dest: Int64[Tensor, " n"]
    src: Int64[Tensor, " n"]


# Compared by identity: what follows from the tokens is kept with them, for every checkpoint and layer.
@dataclass(frozen=True, kw_only=True, eq=False)
class Matches:
    """Sequences, the pairs of equal tokens in them, and what induction predicts.

    `ignored` ids (BOS, document separators) match nothing.
    """

    tokens: Int64[Tensor, "batch seq"]
    ignored: frozenset[int] = frozenset()

    def take(self, sequences: slice) -> "Matches":
        """The same for some of the sequences; itself where that is all."""
        if sequences.indices(len(self.tokens)) == (0, len(self.tokens), 1):
            return self
        return Matches(tokens=self.tokens[sequences], ignored=self.ignored)

    def to(self, device: torch.device) -> "Matches":
        """The same with its tokens on `device`; itself where they are."""
        if self.tokens.device == device:
            return self
        return Matches(tokens=self.tokens.to(device), ignored=self.ignored)

    @cached_property
    def pairs(self) -> Edges:
        """All (batch, i, s) with x_s = x_i, s < i."""
        batch, seq = self.tokens.shape
        order = self.tokens.argsort(dim=1, stable=True)
        ranked = self.tokens.gather(1, order)
        new = torch.ones_like(ranked, dtype=torch.bool)
        new[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
        place = torch.arange(seq, device=ranked.device).expand(batch, -1)
        # How many equal tokens stand before each in its group.
        n_before = place - torch.where(new, place, 0).cummax(1).values
        for token in self.ignored:
            n_before = n_before.masked_fill(ranked == token, 0)
        n = n_before.flatten()
        end = torch.arange(batch * seq, device=n.device).repeat_interleave(n)
        within = torch.arange(len(end), device=n.device) - (n.cumsum(0) - n).repeat_interleave(n)
        flat = order.flatten()
        return Edges(end // seq, flat[end], flat[end - 1 - within])

    @cached_property
    def scored(self) -> Bool[Tensor, "batch seq_minus_1"]:
        """Positions i whose next token induction predicts: the bigram (x_i, x_{i+1}) occurred before."""
        tokens, pairs = self.tokens, self.pairs
        seq = tokens.shape[1]
        known = pairs.dest + 1 < seq
        after = (pairs.dest + 1).clamp_max(seq - 1)
        same = tokens[pairs.batch, pairs.src + 1] == tokens[pairs.batch, after]
        found = torch.zeros(len(tokens), seq, dtype=torch.bool, device=tokens.device)
        hit = known & same
        found[pairs.batch[hit], pairs.dest[hit]] = True
        return found[:, :-1]

    @cached_property
    def predicted(self) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """The scored positions: sequence, place, and the token that follows."""
        batch, place = self.scored.nonzero(as_tuple=True)
        return batch, place, self.tokens[batch, place + 1]

    @cached_property
    def n_predicted(self) -> Int64[Tensor, " batch"]:
        """How many scored positions each sequence has."""
        return torch.bincount(self.predicted[0], minlength=len(self.tokens))

    def at(self, offset: int) -> Edges:
        """The edges s + offset -> i of all pairs, each named once.

        Self-edges are left out (they carry the current token and a state-space mixer's skip, no match), as
        are sources before the sequence or after i.

        Raises:
            DetectionError: the offset is as long as the sequence or longer.
        """
        if offset not in self._at:
            self._at[offset] = self._edges_at(offset)
        return self._at[offset]

    def _edges_at(self, offset: int) -> Edges:
        seq = self.tokens.shape[1]
        if abs(offset) >= seq:
            raise DetectionError(
                f"offset {offset} lies outside windows of {seq} tokens; accepted: {1 - seq}..{seq - 1}"
            )
        src = self.pairs.src + offset
        kept = (src >= 0) & (src < self.pairs.dest)
        return Edges(self.pairs.batch[kept], self.pairs.dest[kept], src[kept])

    def joined(self, offsets: tuple[int, ...]) -> tuple[Edges, Int64[Tensor, " n"], list[int]]:
        """The edges at several offsets one after the other, the token that follows the earlier copy of each,
        and how many edges each offset has.
        """
        if offsets not in self._joined:
            sets = [self.at(offset) for offset in offsets]
            tokens = [self.tokens[e.batch, e.src - o + 1] for e, o in zip(sets, offsets, strict=True)]
            edges = Edges(*(torch.cat(parts) for parts in zip(*sets, strict=True)))
            self._joined[offsets] = edges, torch.cat(tokens), [len(e.dest) for e in sets]
        return self._joined[offsets]

    def previous(self) -> Edges:
        """The edges (i, i - 1) of every position but the first."""
        batch, seq = self.tokens.shape
        dest = torch.arange(1, seq, device=self.tokens.device).repeat(batch)
        which = torch.arange(batch, device=dest.device).repeat_interleave(seq - 1)
        return Edges(which, dest, dest - 1)

    def random(self, offsets: range, *, like: int = 1, seed: int = 0) -> Edges:
        """As many random edges from each position as it has at offset `like`.

        Sources avoid what the profile's `offsets` read from there, the position before and the position
        itself. A position that has too few others (a short period) gives fewer.
        """
        key = (offsets, like, seed)
        if key not in self._random:
            self._random[key] = self._random_edges(*key)
        return self._random[key]

    @cached_property
    def _at(self) -> dict[int, Edges]:
        return {}

    @cached_property
    def _joined(self) -> dict[tuple[int, ...], tuple[Edges, Tensor, list[int]]]:
        return {}

    @cached_property
    def _random(self) -> dict[tuple, Edges]:
        return {}

    def _random_edges(self, offsets: range, like: int, seed: int) -> Edges:
        seq = self.tokens.shape[1]
        targets = self.at(like)
        row = targets.batch * seq + targets.dest
        taken = [_key(self.at(offset), seq) for offset in offsets] + [_key(self.previous(), seq)]
        forbidden = torch.cat(taken).unique()
        draw = torch.Generator().manual_seed(seed)
        found = row.new_zeros(0)
        wanted = row
        # Rejection: what is forbidden or drawn twice is drawn again.
        for _ in range(12):
            if not len(wanted):
                break
            dest = wanted % seq
            chance = torch.rand(len(wanted), generator=draw, dtype=torch.float64).to(dest.device)
            key = wanted * seq + (chance * dest).long()
            key = key[~torch.isin(key, forbidden) & (dest > 0)]
            found = torch.cat((found, key)).unique()
            wanted = _missing(row, found // seq, len(self.tokens) * seq)
        return Edges(found // (seq * seq), found // seq % seq, found % seq)

    def check(self) -> None:
        """Raises DetectionError where no token or no bigram comes again: nothing to cut or to read."""
        n, seq = self.tokens.shape
        if not len(self.pairs.dest):
            raise DetectionError(f"empty pair set: no token comes again in {n} sequences of {seq} tokens")
        if not len(self.predicted[0]):
            raise DetectionError(
                f"no position is predicted by induction: no bigram comes again in {n} sequences of {seq} "
                "tokens"
            )


# The matches of each probe, whose edges are the same for every checkpoint.
_of_probe: WeakKeyDictionary[RepeatedTokens, Matches] = WeakKeyDictionary()


def probe_matches(probe: RepeatedTokens) -> Matches:
    """The matches of a probe.

    Raises:
        DetectionError: a token comes twice within a period: its copies would be at offsets of their own.
    """
    if (known := _of_probe.get(probe)) is not None:
        return known
    first = probe.tokens[:, probe.first : probe.first + probe.period]
    ranked = first.sort(dim=1).values
    twice = ranked[:, 1:] == ranked[:, :-1]
    if bool(twice.any()):
        n, place = (int(x) for x in twice.nonzero()[0])
        raise DetectionError(
            f"duplicates in the probe: sequence {n} has token {int(ranked[n, place])} twice within its "
            f"period of {probe.period}; accepted: distinct tokens"
        )
    ignored = frozenset() if probe.bos is None else frozenset({probe.bos})
    found = _of_probe[probe] = Matches(tokens=probe.tokens.long(), ignored=ignored)
    return found


def window_matches(tokens: Int[Tensor, "batch seq"], *, ignored: frozenset[int] = frozenset()) -> Matches:
    """The matches of text windows: tokens may come again anywhere."""
    return Matches(tokens=tokens.long(), ignored=ignored)


def _key(edges: Edges, seq: int) -> Int64[Tensor, " n"]:
    return (edges.batch * seq + edges.dest) * seq + edges.src


def _missing(wanted: Int64[Tensor, " n"], found: Int64[Tensor, " m"], n_rows: int) -> Int64[Tensor, " k"]:
    """Rows that `wanted` names more often than `found`, as often as they are missing."""
    short = torch.bincount(wanted, minlength=n_rows) - torch.bincount(found, minlength=n_rows)
    return torch.arange(n_rows, device=wanted.device).repeat_interleave(short.clamp_min(0))
