"""Entries of an implied attention that were computed once: every score of a layer reads the same table."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.mixers.entries import Entries
from models.mixers.reading import Reading

# Largest table that is kept, in bytes; beyond it entries are computed as they are asked for.
MAX_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}


@dataclass(frozen=True, kw_only=True)
class TableEntries(Entries):
    """`Entries` out of a table that is 0 above the diagonal."""

    table: Float[Tensor, "batch dest src unit d_entry"]

    @property
    def n_units(self) -> int:
        return self.table.shape[3]

    @property
    def d_entry(self) -> int:
        return self.table.shape[4]

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch rows src=stop unit d_entry"]:
        """Destinations start .. stop-1, sources 0 .. stop-1."""
        return self.table[:, start:stop, :stop]

    def edges(
        self, batch: Int[Tensor, " n"], dest: Int[Tensor, " n"], src: Int[Tensor, " n"]
    ) -> Float[Tensor, "n unit d_entry"]:
        """Chosen entries; 0 where src > dest or past the end."""
        allowed = (src >= 0) & (src <= dest)
        found = self.table[batch, dest, torch.where(allowed, src, 0)]
        return found * allowed[:, None, None]


def from_pattern(pattern: Float[Tensor, "batch head dest src"]) -> TableEntries:
    """A pattern that a forward pass has made."""
    return TableEntries(table=pattern.permute(0, 2, 3, 1)[..., None])


def computed_once(readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """The readings of one layer on one table of their entries, where it is small enough.

    The readings of a layer differ in sources, gate and skip; the implied attention is one and the same.
    """
    first = readings[0]
    entries: Entries = first.entries
    n_bytes = first.n_batch * first.n_seq**2 * entries.n_units * entries.d_entry
    n_bytes *= first.constant.element_size()
    if isinstance(entries, TableEntries) or n_bytes > _most_bytes(first.constant):
        return readings
    table = TableEntries(table=entries.rows(0, first.n_seq))
    return tuple(_with_entries(reading, table) for reading in readings)


def may_stay(reading: Reading, n_layers: int) -> bool:
    """Whether as many tables as this reading's are small enough to be kept together."""
    entries = reading.entries
    return isinstance(entries, TableEntries) and n_layers * entries.table.nbytes <= _most_bytes(entries.table)


def _most_bytes(like: Tensor) -> int:
    return MAX_BYTES["cuda" if like.is_cuda else "cpu"]


def _with_entries(reading: Reading, entries: TableEntries) -> Reading:
    names = reading.__dataclass_fields__
    return Reading(**{name: getattr(reading, name) for name in names} | {"entries": entries})
