"""Exact cuts of edges at `hook_z` of one layer, and everything above it computed anew.

Works without transformer_lens: hooks are torch's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from interp.errors import DetectionError
from interp.layer_inputs import LayerInput
from interp.offset_edges import Edges, Matches
from models.language_model import LanguageModel
from models.lens import attached
from models.mixers.reading import Reading

# Numbers in the largest temporary of one pass: source vectors of edges, logits.
_NUMBERS_PER_BLOCK = {"cpu": 1 << 24, "cuda": 1 << 27}
# The rest of a row that is rescaled after a cut: below this share it is noise.
_LEAST_REST = 1e-4


@contextmanager
def listening(module: torch.nn.Module, hook: Callable) -> Iterator[None]:
    """A forward hook that is gone afterwards; works without transformer_lens."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _most(like: Tensor) -> int:
    """Numbers in the largest temporary of a pass on a tensor's device."""
    return _NUMBERS_PER_BLOCK.get(like.device.type, _NUMBERS_PER_BLOCK["cpu"])


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers as a tensor, made once: a GPU would be waited for."""
    return torch.tensor(numbers, device=device)


class EdgeCut:
    """Variants of a layer's `hook_z` with edges taken out: one for each row."""

    def __init__(self, reading: Reading, z: Tensor, rows: list[int | None]):
        self.reading, self.z, self.rows = reading, z, rows

    def variants(self, sets: Sequence[Edges], *, renormalise: bool = False) -> Iterator[Tensor]:
        """z without the edges of a set: for each set, row by row.

        `renormalise`: what is left of a row is rescaled to sum to 1.
        """
        if renormalise or not self._apart:
            for edges in sets:
                yield from self._one_by_one(edges, renormalise)
            return
        # As many sets together as fit a block.
        most = _most(self.z)
        size = max(1, most // (self.reading.taps.shape[-1] * self.reading.n_units))
        size = max(1, size // self.z[..., 0, 0].numel())
        for start in range(0, len(sets), size):
            removed = self._removed(sets[start : start + size])[0]
            yield from self._without(removed)

    def _one_by_one(self, edges: Edges, renormalise: bool) -> Iterator[Tensor]:
        removed, share = self._removed([edges], renormalise)
        removed, share = removed[0], None if share is None else share[0]
        rest = (1 - share).clamp_min(_LEAST_REST) if renormalise else None
        for row in self.rows:
            z = self.z.flatten(2).clone()
            for unit in range(self.reading.n_units) if row is None else [row]:
                index = self.reading.z_index[unit]
                kept = index >= 0
                # Units by state share channels: subtracting in place adds their cuts up.
                z[..., index[kept]] -= removed[:, :, unit, kept]
                if renormalise:
                    z[..., index[kept]] /= rest[:, :, unit, None]
            yield z.view_as(self.z)

    @property
    def _apart(self) -> bool:
        """Whether no two units share a channel. Units by state do; reading `z_index` would wait for a GPU."""
        return self.reading.unit != "state"

    @cached_property
    def _places(self) -> tuple[Tensor, list[Tensor]]:
        """Where units that are apart have their source vectors' entries, and which channels each row cuts.

        (channel of each entry, [row channel] in blocks of rows that fit the memory)
        """
        n_channels = self.z.shape[-2] * self.z.shape[-1]
        index = self.reading.z_index.flatten()
        # Padding goes to a channel past the last.
        channels = torch.where(index >= 0, index, n_channels)
        unit_of = torch.full((n_channels + 1,), -1, device=index.device)
        unit_of[channels] = torch.arange(len(index), device=index.device) // self.reading.z_index.shape[1]
        rows = _on_device(tuple(-1 if row is None else row for row in self.rows), index.device)
        cut = (rows[:, None] == unit_of[:-1]) | (rows[:, None] < 0)
        most = _most(self.z)
        return channels, list(cut.split(max(1, most // self.z.numel())))

    def _without(self, removed: Float[Tensor, "set batch dest unit d_source"]) -> Iterator[Tensor]:
        """z of each set and row where every channel belongs to one unit."""
        channels, cut_by_rows = self._places
        flat = self.z.flatten(2)
        totals = flat.new_zeros(len(removed), *flat.shape[:2], flat.shape[2] + 1)
        totals[..., channels] = removed.flatten(3)
        # Of few rows as many sets together as fit a block.
        n_sets = max(1, _most(flat) // (len(self.rows) * flat.numel()))
        for some in totals[..., :-1].split(n_sets if len(cut_by_rows) == 1 else 1):
            for cut in cut_by_rows:
                variants = flat - some[:, None] * cut[:, None, None]
                yield from variants.view(-1, *self.z.shape).unbind()

    def _removed(
        self, sets: Sequence[Edges], with_share: bool = False
    ) -> tuple[Float[Tensor, "set batch dest unit d_source"], Float[Tensor, "set batch dest unit"] | None]:
        """Sums of the edges' source vectors, and of their weights."""
        reading = self.reading
        n_batch, seq = self.z.shape[:2]
        d_source = reading.taps.shape[-1]
        total = self.z.new_zeros(len(sets) * n_batch * seq, reading.n_units, d_source)
        share = self.z.new_zeros(len(total), reading.n_units) if with_share else None
        size = max(1, _most(self.z) // (reading.n_units * d_source))
        # The n-th set's rows lie n times the batch further on.
        first = torch.cat([torch.full_like(e.dest, n * n_batch * seq) for n, e in enumerate(sets)])
        edges = (torch.cat(parts) for parts in zip(*sets, strict=True))
        for start, batch, dest, src in zip(*(x.split(size) for x in (first, *edges)), strict=True):
            row = start + batch * seq + dest
            total.index_add_(0, row, reading.z_edges(batch, dest, src).to(total.dtype))
            if with_share:
                share.index_add_(0, row, reading.entries.edges(batch, dest, src)[..., 0].to(share.dtype))
        shape = (len(sets), n_batch, seq)
        return total.unflatten(0, shape), None if share is None else share.unflatten(0, shape)


class ScoredLosses:
    """Loss at the scored positions, a mean for each sequence, from the final residual stream."""

    def __init__(self, model: LanguageModel, matches: Matches):
        self.model = model
        self.batch, self.place, self.target = matches.predicted
        self.n = matches.n_predicted.double()

    def __call__(
        self, resid: Float[Tensor, "copies_batch seq d_model"], copies: int
    ) -> Float[Tensor, "copy batch"]:
        """`resid` holds `copies` variants of the batch, one after the other."""
        rows = resid.unflatten(0, (copies, -1))[:, self.batch, self.place].flatten(0, 1)
        target = self.target.repeat(copies)
        size = max(1, _most(rows) // self.model.config.d_vocab)
        parts = []
        for piece, wanted in zip(rows.split(size), target.split(size), strict=True):
            logits = self.model.unembed(self.model.ln_final(piece))
            logits = logits if logits.dtype == torch.float64 else logits.float()
            parts.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
        loss = torch.cat(parts).double().view(copies, -1)
        total = loss.new_zeros(copies, len(self.n)).index_add_(1, self.batch, loss)
        return total / self.n.masked_fill(self.n == 0, torch.nan)


class LayersAbove:
    """A layer and what is above it, run for variants of the layer's `hook_z`."""

    def __init__(
        self,
        model: LanguageModel,
        layer: int,
        inputs: LayerInput,
        losses: ScoredLosses,
        budget: int,
    ):
        """`inputs`: what the layer starts from (see `layer_inputs`)."""
        self.model, self.layer, self.losses = model, layer, losses
        self.resid, self.x = inputs.resid, inputs.x
        self.copies = max(1, budget // (self.resid.shape[0] * self.resid.shape[1]))

    def __call__(self, variants: Iterator[Tensor]) -> Float[Tensor, "row batch"]:
        """Loss of each variant, several in one pass."""
        found, group = [], []
        for variant in variants:
            group.append(variant)
            if len(group) == self.copies:
                found.append(self._losses(group))
                group = []
        if group:
            found.append(self._losses(group))
        return torch.cat(found)

    def _losses(self, group: list[Tensor]) -> Tensor:
        z = torch.cat(group)
        resid = self.resid.repeat(len(group), 1, 1)
        block = self.model.blocks[self.layer]
        if attached(block.attn):
            # What looks at the mixer sees it run.
            with listening(block.attn.hook_z, lambda _, args, out: z):
                after = block(resid, lambda mixer, x: mixer(x))
        else:
            after = block(resid, lambda mixer, _: mixer.output_from_z(self.x, z))
        return self.losses(self._run(after, self.layer + 1), len(group))

    def _run(self, resid: Tensor, start: int) -> Tensor:
        """The final residual stream from the one before layer `start`."""
        return self.model(resid, start_at_layer=start, stop_at_layer=self.model.config.n_layers)

    def taps(self) -> Iterator[Float[Tensor, " batch"]]:
        """Loss with each tap zeroed, by lag: 0 is the current input."""
        weight = self.model.blocks[self.layer].attn.conv1d.weight
        for lag in range(weight.shape[-1]):
            with zeroed_tap(weight, lag):
                yield self.losses(self._run(self.resid, self.layer), 1)[0]


@contextmanager
def zeroed_tap(
    weight: Float[Tensor, "channel one width"], lag: int, channels: range | None = None
) -> Iterator[None]:
    """A convolution's tap at `lag` set to 0, in all channels or some; put back afterwards."""
    width = weight.shape[-1]
    if not 0 <= lag < width:
        raise DetectionError(f"tap at lag {lag}; accepted: 0..{width - 1}")
    chosen = slice(None) if channels is None else slice(channels.start, channels.stop)
    with torch.no_grad():
        kept = weight[chosen, :, width - 1 - lag].clone()
        weight[chosen, :, width - 1 - lag] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            weight[chosen, :, width - 1 - lag] = kept
