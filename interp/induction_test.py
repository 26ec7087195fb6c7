"""Is a unit an induction head? Decided by what cutting its edges costs and by what they copy.

A unit passes where, at its delta* >= 1,
    cut minus random control >= MIN_EFFECT_NATS and >= MIN_STANDARD_ERRORS standard errors,
    and its edges at delta* copy: 4r - 1 of the token that followed the earlier copy >= MIN_COPYING.
The second keeps out what an upstream unit's cut breaks further down without writing the answer itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from interp.host import begin_to_host
from interp.layer_inputs import Visited, mixer_inputs
from interp.offset_cuts import LayerProfile, OffsetProfile, mean, offset_profile
from interp.offset_edges import Matches, probe_matches
from interp.records import HeadScore
from interp.sequences import RepeatedTokens
from interp.subject import LanguageModelSubject
from models.mixers.reading import Reading

# Thresholds, calibrated by experiments/calibrate_null.py (experiments/results/null_calibration.md).
# 2026-11-30, 525 units of untrained and i.i.d.-trained models of every mixer: no effect above .016 nats, no
# copying above -.68, none passed (false-positive rate below .6% with 95% confidence). The effect asked for is
# six times the null's largest. Tiny effects can be many standard errors (14.8 in the null), so that ratio
# alone decides nothing.
MIN_EFFECT_NATS = 0.1
MIN_STANDARD_ERRORS = 4.0
MIN_COPYING = 0.0
# Sequences of the probe that cuts are made on.
N_SEQUENCES = 8
# Tokens up to which the readings of all layers are kept between cuts and copying.
KEPT_TOKENS = 1 << 12
# Numbers in the directions read out together, for the edges of a block.
BLOCK = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True, kw_only=True)
class CausalScore:
    """What the causal test found for one unit.

    Attributes:
        offset: delta*. `cut_nats`: COP at each of `offsets`.
        effect_nats, effect_se_nats: Cut minus random control at delta*, and its standard error over
            sequences.
        control_nats: What as many random edges cost.
        copying: 4r - 1 of the edges at delta*, in [-1, 1]; None where they raise nothing.
    """

    layer: int
    unit: int
    reading: str
    offset: int
    offsets: tuple[int, ...]
    cut_nats: tuple[float, ...]
    effect_nats: float
    effect_se_nats: float
    control_nats: float
    copying: float | None

    @property
    def is_induction(self) -> bool:
        """Whether the unit passes all three thresholds."""
        return (
            self.effect_nats >= max(MIN_EFFECT_NATS, MIN_STANDARD_ERRORS * self.effect_se_nats)
            and self.copying is not None
            and self.copying >= MIN_COPYING
        )


def causal_scores(
    subject: LanguageModelSubject,
    probe: RepeatedTokens,
    *,
    units: str | None = None,
    layers: Sequence[int] | None = None,
    n_sequences: int | None = N_SEQUENCES,
    **options: Any,
) -> tuple[CausalScore, ...]:
    """The causal test of every unit under its mixer's first reading.

    Args:
        units: Of Mamba-1 layers. `options` go to `offset_profile`.
        n_sequences: The first sequences of the probe; None takes all.

    Raises:
        DetectionError: as `probe_matches` and `offset_profile`.
    """
    options |= {"units": units, "layers": layers, "n_sequences": n_sequences}
    return begin_causal_scores(subject, probe, **options)()


def begin_causal_scores(
    subject: LanguageModelSubject,
    probe: RepeatedTokens,
    *,
    units: str | None = None,
    layers: Sequence[int] | None = None,
    n_sequences: int | None = N_SEQUENCES,
    ahead: bool | None = None,
    visited: Visited | None = None,
    **options: Any,
) -> Callable[[], tuple[CausalScore, ...]]:
    """`causal_scores` in two steps: a GPU has been given all its work, and what is returned waits for it.

    The model may change in between. `ahead`: read copying at every offset that may be delta*, rather than
    wait for the cuts that decide it; None: on a GPU. `visited`: what a visit of the whole probe, with these
    units, has found.
    """
    probe = probe.take(slice(0, n_sequences))
    matches = probe_matches(probe)
    read: dict[int, Reading] | None = {} if probe.tokens.numel() <= KEPT_TOKENS else None
    if visited is not None and not visited.inputs:
        visited = None
    options = {"controls": ("random",), "read": read, "visited": visited, "on_host": False, **options}
    profile = offset_profile(subject.model, matches, mamba_units=units, layers=layers, **options)
    arrived = profile.begin_to_host()
    allowed = [offset for offset in profile.layers[0].offsets if offset >= 1]
    ahead = bool(allowed) and (profile.loss.is_cuda if ahead is None else ahead)
    layers_of_units = _with_units(profile if ahead else arrived())
    offsets = [
        allowed if ahead else sorted({layer.best(row) for row in _rows(layer)}) for layer in layers_of_units
    ]
    copied = _begin_copying(subject, probe, matches, layers_of_units, offsets, units, read or {})

    def scores() -> tuple[CausalScore, ...]:
        measured = zip(_with_units(arrived()), offsets, copied(), strict=True)
        return tuple(
            score
            for layer, of, values in measured
            for score in _scores(
                layer, [values[of.index(layer.best(row))][layer.units[row]] for row in _rows(layer)]
            )
        )

    return scores


def _with_units(profile: OffsetProfile) -> list[LayerProfile]:
    """The layers that have rows for units, not only for the whole."""
    return [layer for layer in profile.layers if set(layer.units) != {None}]


def _rows(layer: LayerProfile) -> list[int]:
    """The rows of units."""
    return [row for row, unit in enumerate(layer.units) if unit is not None]


def with_causal(records: Sequence[HeadScore], scores: Sequence[CausalScore]) -> tuple[HeadScore, ...]:
    """The records with the causal test's numbers and verdict.

    The verdict belongs to the unit: every reading of it carries it. The numbers belong to the reading whose
    edges were cut, and so does `offset` = delta*; in other readings the offset stays that of the weights.
    """
    found = {(score.layer, score.unit): score for score in scores}
    return tuple(
        _decided(record, found[key]) if (key := (record.layer, record.head)) in found else record
        for record in records
    )


def copying_at_offset(
    reading: Reading,
    matches: Matches,
    offset: int,
    sample: Float[Tensor, "batch token"],
    directions: Float[Tensor, "batch token d_model"],
) -> Float[Tensor, " unit"]:
    """4r - 1 of the edges s + offset -> i for the token x_{s+1}; NaN where nothing is raised.

    Each edge's contribution is centred over the sample's tokens and r = a / (a + S): a the raise of x_{s+1},
    S that of all of them. Equals `copying.edge_copying` at offset 1.

    Args:
        sample: The distinct tokens of each sequence. `directions` are theirs (`Subject.directions`).
    """
    return copying_at_offsets(reading, matches, [offset], sample, directions)[0]


def copying_at_offsets(
    reading: Reading,
    matches: Matches,
    offsets: Sequence[int],
    sample: Float[Tensor, "batch token"],
    directions: Float[Tensor, "batch token d_model"],
) -> list[Float[Tensor, " unit"]]:
    """`copying_at_offset` of several offsets, whose edges are read together."""
    centred = directions - directions.mean(1, keepdim=True)
    readout = torch.einsum("usd,bkd->busk", reading.W_out, centred.to(reading.W_out.dtype))
    edges, followers, n_edges = matches.joined(tuple(offsets))
    ratios = []
    size = max(1, BLOCK["cuda" if readout.is_cuda else "cpu"] // readout[0].numel())
    for batch, dest, src, token in zip(*(part.split(size) for part in (*edges, followers)), strict=True):
        logits = torch.einsum("nus,nusk->nuk", reading.edges(batch, dest, src), readout[batch])
        raised = logits.double().relu()
        index = (sample[batch] == token[:, None]).int().argmax(1)
        a = raised.gather(2, index[:, None, None].expand(-1, raised.shape[1], 1))[..., 0]
        total = raised.sum(-1)
        ratios.append(torch.where(total > 0, a / (a + total), torch.nan))
    by_offset = torch.cat(ratios).split(n_edges)
    return [4 * ratio.nanmean(0) - 1 for ratio in by_offset]


@torch.no_grad()
def _begin_copying(
    subject: LanguageModelSubject,
    probe: RepeatedTokens,
    matches: Matches,
    layers: Sequence[LayerProfile],
    offsets: Sequence[list[int]],
    units: str | None,
    read: dict[int, Reading],
) -> Callable[[], list[list[list[float | None]]]]:
    """Copying of each layer's units, by layer, its `offsets`, and unit; what is returned waits for it.

    `read` holds readings that are at hand.
    """
    sample = probe.tokens[:, probe.first : probe.first + probe.period]
    directions = subject.directions(sample)
    known = all(layer.layer in read for layer in layers)
    inputs = [] if known else mixer_inputs(subject.model, probe.tokens)
    found: list[Tensor] = []
    for layer, of in zip(layers, offsets, strict=True):
        if known:
            reading = read[layer.layer]
        else:
            mixer = subject.model.blocks[layer.layer].attn
            chosen = units if mixer.kind == "mamba1" else None
            reading = mixer.read(inputs[layer.layer].x, layer.reading, units=chosen)
        found.append(torch.stack(copying_at_offsets(reading, matches, of, sample, directions)))
    arrived = begin_to_host(found)

    def copied() -> list[list[list[float | None]]]:
        return [
            [[None if value != value else value for value in by_unit] for by_unit in values.tolist()]
            for values in arrived()
        ]

    return copied


def _scores(layer: LayerProfile, copying: Sequence[float | None]) -> list[CausalScore]:
    rows = _rows(layer)
    controls = [0.0] * len(rows) if layer.random is None else mean(layer.random[rows]).tolist()
    measured = zip(rows, layer.effects(rows), controls, copying, strict=True)
    return [
        CausalScore(
            layer=layer.layer,
            unit=layer.units[row],
            reading=layer.reading,
            offset=layer.best(row),
            offsets=layer.offsets,
            cut_nats=tuple(layer.cut_means[row]),
            effect_nats=effect,
            effect_se_nats=error,
            control_nats=control,
            copying=copied,
        )
        for row, (effect, error), control, copied in measured
    ]


def _decided(record: HeadScore, score: CausalScore) -> HeadScore:
    verdict = {"is_induction": score.is_induction, "decided_by": "causal"}
    if record.reading != score.reading:
        return replace(record, **verdict)
    return replace(
        record,
        offset=score.offset,
        offset_effect_nats=score.effect_nats,
        offset_effect_se_nats=score.effect_se_nats,
        offset_control_nats=score.control_nats,
        cut_by_offset_nats=score.cut_nats,
        cut_first_offset=score.offsets[0],
        copying_offset=score.copying,
        **verdict,
    )
