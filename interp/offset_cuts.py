"""The causal offset profile: which edges from earlier copies a layer needs, measured by cutting them exactly.

COP(delta) = E[loss | all edges s + delta -> i cut] - E[loss], over the positions that induction predicts (see
interp.offset_edges). A cut takes the edges' share out of `hook_z` of one layer, of all its units or of one,
and everything downstream is computed anew. In nats; positive where the edges help.

Controls: as many random other edges · the edges (i, i-1) · each tap of the convolution zeroed · where rows of
attention sum to 1, the edges cut and the rest rescaled to sum to 1 again.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from interp.displayed import Displayed
from interp.edge_cuts import EdgeCut, LayersAbove, ScoredLosses
from interp.errors import DetectionError
from interp.host import begin_to_host
from interp.layer_inputs import LayerInput, Visited, layer_inputs
from interp.offset_edges import Edges, Matches
from models.language_model import LanguageModel
from models.mixers.reading import Reading
from models.whole import is_whole

CONTROLS = ("random", "previous", "renormalised", "taps")
# Tokens that go through the layers above a cut together.
TOKENS_PER_PASS = {"cpu": 1 << 13, "cuda": 1 << 17}


# What a layer's profile holds by sequence.
_MEASURED = ("cut", "random", "previous", "renormalised", "taps")


@dataclass(frozen=True, kw_only=True)
class LayerProfile(Displayed, display="offset"):
    """Effects of cuts in one layer by sequence, nats; NaN where a sequence has no predicted position.

    Rows are the layer's units, then (if there are several) the whole layer.

    Attributes:
        units: Unit of each row; None is the whole layer.
        cut: COP at each offset.
        random: The control: as many random edges (mean over draws).
        previous: The edges (i, i-1) cut.
        renormalised: The cut with the rest rescaled; None where rows do not sum to 1.
        taps: Loss by lag of the convolution, that tap zeroed in all channels, minus the loss; None without
            one.
    """

    layer: int
    mixer: str
    reading: str
    unit: str
    offsets: tuple[int, ...]
    units: tuple[int | None, ...]
    cut: Float[Tensor, "row offset sequence"]
    random: Float[Tensor, "row sequence"] | None = None
    previous: Float[Tensor, "row sequence"] | None = None
    renormalised: Float[Tensor, "row offset sequence"] | None = None
    taps: Float[Tensor, "lag sequence"] | None = None

    def best(self, row: int = -1) -> int:
        """delta*: the offset >= 1 whose cut costs most."""
        allowed = [n for n, offset in enumerate(self.offsets) if offset >= 1]
        if not allowed:
            raise DetectionError(
                f"offsets {list(self.offsets)} hold none of at least 1, so there is no delta*"
            )
        return self.offsets[max(allowed, key=self.cut_means[row].__getitem__)]

    @cached_property
    def cut_means(self) -> list[list[float]]:
        """Mean of `cut` over sequences, by row and offset."""
        return mean(self.cut).tolist()

    def effect(self, row: int = -1, offset: int | None = None) -> tuple[float, float]:
        """Mean and standard error over sequences of cut minus random control, at an offset (None: delta*)."""
        return self.effects([row], offset)[0]

    def effects(self, rows: Sequence[int], offset: int | None = None) -> list[tuple[float, float]]:
        """`effect` of several rows."""
        at = [self.offsets.index(self.best(row) if offset is None else offset) for row in rows]
        values = self.cut[list(rows), at]
        if self.random is not None:
            values = values - self.random[list(rows)]
        return list(zip(mean(values).tolist(), standard_error(values).tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class OffsetProfile(Displayed, display="offset"):
    """Profiles of the layers asked for, the uncut loss by sequence, and how many edges each offset has."""

    layers: tuple[LayerProfile, ...]
    loss: Float[Tensor, " sequence"]
    n_edges: dict[int, int] = field(default_factory=dict)
    n_random: int = 0
    n_scored: int = 0

    def begin_to_host(self) -> "Callable[[], OffsetProfile]":
        """The same profile on the CPU, as `host.begin_to_host`: what is returned waits for it."""
        places = [
            (n, name)
            for n, layer in enumerate(self.layers)
            for name in _MEASURED
            if getattr(layer, name) is not None
        ]
        arrived = begin_to_host([self.loss, *(getattr(self.layers[n], name) for n, name in places)])

        def read() -> OffsetProfile:
            loss, *found = arrived()
            by_place = dict(zip(places, found, strict=True))
            layers = [
                replace(layer, **{name: by_place.get((n, name)) for name in _MEASURED})
                for n, layer in enumerate(self.layers)
            ]
            return replace(self, layers=tuple(layers), loss=loss)

        return read

    def strongest(self) -> tuple[LayerProfile, int]:
        """The layer whose whole-layer cut at delta* costs most above control, and its last row."""
        found = max(self.layers, key=lambda layer: layer.effect()[0])
        return found, len(found.units) - 1


def default_offsets(model: LanguageModel) -> range:
    """-2 .. d_conv + 1 for the widest convolution in the model (none counts as width 1)."""
    width = max(getattr(mixer, "d_conv", 1) for mixer in model.config.mixers)
    return range(-2, max(width, 1) + 2)


@torch.no_grad()
def offset_profile(
    model: LanguageModel,
    matches: Matches,
    *,
    offsets: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    by_unit: bool = True,
    reading: str | None = None,
    mamba_units: str | None = None,
    controls: Collection[str] = CONTROLS,
    n_random: int = 1,
    seed: int = 0,
    tokens_per_pass: int | None = None,
    read: dict[int, Reading] | None = None,
    visited: Visited | None = None,
    on_host: bool = True,
) -> OffsetProfile:
    """Cut the edges at each offset, layer by layer and unit by unit.

    Args:
        matches: `probe_matches(probe)` or `window_matches(tokens)`, on any device.
        offsets: Default -2 .. d_conv + 1.
        layers: Default all. `units`: default all of them; `by_unit=False`: the whole layer only.
        reading: Whose edges: by default the mixer's first reading, its own A over its own values; `block`
            cuts what leads from the layer's input positions through convolution and A.
        mamba_units: `layer` (default), `state` or `cluster:K` for Mamba-1 layers.
        controls: Which of `CONTROLS` to measure.
        n_random: Draws of the random control.
        read: Takes the reading of each layer whose edges were cut, where all sequences go in one pass.
        visited: What a visit of these sequences (and perhaps of others after them) has found already.
        on_host: False leaves the numbers on the model's device, which is then not waited for.

    Raises:
        DetectionError: no pairs, an offset outside the window, a layer or unit that does not exist.
        ConfigError: a reading or units that a mixer does not have.
    """
    matches.check()
    if unknown := set(controls) - set(CONTROLS):
        raise DetectionError(
            f"unknown controls {', '.join(sorted(unknown))}; accepted: {', '.join(CONTROLS)}"
        )
    offsets = tuple(default_offsets(model) if offsets is None else offsets)
    device = next(model.parameters()).device
    matches = matches.to(device)
    n, seq = matches.tokens.shape
    budget = tokens_per_pass or TOKENS_PER_PASS[device.type]
    size = max(1, budget // seq)
    # Clusters are made from the sequences of a batch: one batch, or they would differ.
    size = n if (mamba_units or "").startswith("cluster") else size
    run = _Run(
        model=model,
        offsets=offsets,
        layers=tuple(_checked(layers, model.config.n_layers, "layer")),
        units=units,
        by_unit=by_unit,
        reading=reading,
        mamba_units=mamba_units,
        controls=frozenset(controls),
        n_random=n_random,
        seed=seed,
        budget=budget,
        read=read if size >= n else None,
        visited=visited if size >= n else None,
    )
    parts = [run.batch(matches.take(slice(start, start + size))) for start in range(0, n, size)]
    found = _joined(parts)
    return found.begin_to_host()() if on_host else found


def mean(values: Float[Tensor, "*row sequence"]) -> Float[Tensor, "*row"]:
    """Mean over the sequences that have a value."""
    return values.nanmean(-1)


def standard_error(values: Float[Tensor, "*row sequence"]) -> Float[Tensor, "*row"]:
    """Standard error of `mean`; 0 for a single sequence, NaN for none."""
    filled = ~values.isnan()
    n = filled.sum(-1)
    centred = torch.where(filled, values - values.nanmean(-1, keepdim=True), 0)
    error = (centred.square().sum(-1) / (n - 1).clamp_min(1) / n.clamp_min(1)).sqrt()
    return torch.where(n > 0, error, torch.nan)


def _checked(chosen: Sequence[int] | None, n: int, name: str) -> Sequence[int]:
    if chosen is None:
        return range(n)
    if not len(chosen):
        raise DetectionError(f"no {name} is given; accepted: None, or some of 0..{n - 1}")
    for one in chosen:
        if not is_whole(one):
            raise DetectionError(f"{name} {one!r} is no whole number; accepted: 0..{n - 1}")
        if not 0 <= one < n:
            raise DetectionError(f"{name} index {one} is out of range; accepted: 0..{n - 1}")
    return chosen


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One measurement: its settings, and what it does with a batch of sequences."""

    model: LanguageModel
    offsets: tuple[int, ...]
    layers: tuple[int, ...]
    units: Sequence[int] | None
    by_unit: bool
    reading: str | None
    mamba_units: str | None
    controls: frozenset[str]
    n_random: int
    seed: int
    budget: int
    read: dict[int, Reading] | None
    visited: Visited | None

    def batch(self, matches: Matches) -> OffsetProfile:
        """The profile of a batch."""
        edges = {offset: matches.at(offset) for offset in self.offsets}
        window = range(min(self.offsets), max(self.offsets) + 1)
        n_random = self.n_random if "random" in self.controls else 0
        random = [matches.random(window, seed=self.seed + n) for n in range(n_random)]
        if self.visited is None:
            inputs = layer_inputs(self.model, matches.tokens)
        else:
            inputs = self.visited.first(len(matches.tokens))
        losses = ScoredLosses(self.model, matches)
        base = losses(inputs[-1].resid, 1)[0]
        profiles = [
            self._layer(layer, inputs[layer], edges, random, matches, losses, base) for layer in self.layers
        ]
        return OffsetProfile(
            layers=tuple(profiles),
            loss=base,
            n_edges={offset: len(e.dest) for offset, e in edges.items()},
            n_random=sum(len(e.dest) for e in random) // max(1, len(random)),
            n_scored=len(matches.predicted[0]),
        )

    def _layer(
        self,
        layer: int,
        inputs: LayerInput,
        edges: dict[int, Edges],
        random: list[Edges],
        matches: Matches,
        losses: "ScoredLosses",
        base: Tensor,
    ) -> LayerProfile:
        mixer = self.model.blocks[layer].attn
        if self.visited is not None and self.reading is None:
            reading = self.visited.readings[layer]
        else:
            units = self.mamba_units if mixer.kind == "mamba1" else None
            reading = mixer.read(inputs.x, self.reading, units=units)
        if self.read is not None:
            self.read[layer] = reading
        cut = EdgeCut(reading, inputs.z, self._rows(reading))
        above = LayersAbove(self.model, layer, inputs, losses, self.budget)
        sets = [*edges.values(), *random]
        if "previous" in self.controls:
            sets.append(matches.previous())
        # Each set gives one variant of z for every row; all of them go through the layers above together.
        by_set = above(cut.variants(sets)).unflatten(0, (len(sets), len(cut.rows)))
        found = by_set[: len(edges)].transpose(0, 1) - base
        controls: dict[str, Tensor | None] = {}
        if random:
            controls["random"] = by_set[len(edges) : len(edges) + len(random)].mean(0) - base
        if "previous" in self.controls:
            controls["previous"] = by_set[-1] - base
        if "renormalised" in self.controls and (reading.name, reading.normalisation) == ("pattern", "none"):
            rescaled = [above(cut.variants([e], renormalise=True)) for e in edges.values()]
            controls["renormalised"] = torch.stack(rescaled, 1) - base
        if "taps" in self.controls and getattr(mixer, "conv1d", None) is not None:
            controls["taps"] = torch.stack([loss - base for loss in above.taps()])
        return LayerProfile(
            layer=layer,
            mixer=mixer.kind,
            reading=reading.name,
            unit=reading.unit,
            offsets=self.offsets,
            units=tuple(cut.rows),
            cut=found,
            **controls,
        )

    def _rows(self, reading: Reading) -> list[int | None]:
        if not self.by_unit:
            return [None]
        kind = "head" if reading.unit == "head" else "unit"
        chosen: list[int | None] = list(_checked(self.units, reading.n_units, kind))
        return chosen if reading.n_units == 1 else [*chosen, None]


def _joined(parts: list[OffsetProfile]) -> OffsetProfile:
    """Batches of sequences side by side."""
    if len(parts) == 1:
        return parts[0]
    layers = []
    for same in zip(*(part.layers for part in parts), strict=True):
        names = [name for name in _MEASURED if getattr(same[0], name) is not None]
        joined = {name: torch.cat([getattr(layer, name) for layer in same], -1) for name in names}
        layers.append(replace(same[0], **joined))
    return OffsetProfile(
        layers=tuple(layers),
        loss=torch.cat([part.loss for part in parts]),
        n_edges={offset: sum(part.n_edges[offset] for part in parts) for offset in parts[0].n_edges},
        n_random=sum(part.n_random for part in parts),
        n_scored=sum(part.n_scored for part in parts),
    )
