"""Is a unit an induction head? Decided by what cutting its edges costs and by what they copy.

A unit passes where, at its delta* >= 1,
    cut minus random control >= MIN_EFFECT_NATS and >= MIN_STANDARD_ERRORS standard errors,
    and its edges at delta* copy: 4r - 1 of the token that followed the earlier copy >= MIN_COPYING.
The second keeps out what an upstream unit's cut breaks further down without writing the answer itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from interp.edge_cuts import layer_inputs
from interp.host import to_host
from interp.offset_cuts import LayerProfile, mean, offset_profile
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
    probe = probe.take(slice(0, n_sequences))
    matches = probe_matches(probe)
    read: dict[int, Reading] | None = {} if probe.tokens.numel() <= KEPT_TOKENS else None
    options = {"controls": ("random",), "read": read, **options}
    profile = offset_profile(subject.model, matches, mamba_units=units, layers=layers, **options)
    layers_of_units = [layer for layer in profile.layers if set(layer.units) != {None}]
    copied = _copying(subject, probe, matches, layers_of_units, units, read or {})
    return tuple(
        score
        for layer, copying in zip(layers_of_units, copied, strict=True)
        for score in _scores(layer, copying)
    )


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
def _copying(
    subject: LanguageModelSubject,
    probe: RepeatedTokens,
    matches: Matches,
    layers: Sequence[LayerProfile],
    units: str | None,
    read: dict[int, Reading],
) -> list[list[float | None]]:
    """Copying of each layer's units at their own delta*; `read` holds readings that are at hand."""
    sample = probe.tokens[:, probe.first : probe.first + probe.period]
    directions = subject.directions(sample)
    known = all(layer.layer in read for layer in layers)
    inputs = [] if known else layer_inputs(subject.model, probe.tokens)
    found: list[Tensor] = []
    for layer in layers:
        if known:
            reading = read[layer.layer]
        else:
            mixer = subject.model.blocks[layer.layer].attn
            chosen = units if mixer.kind == "mamba1" else None
            reading = mixer.read(inputs[layer.layer].x, layer.reading, units=chosen)
        rows = [(row, unit) for row, unit in enumerate(layer.units) if unit is not None]
        offsets = sorted({layer.best(row) for row, _ in rows})
        copied = copying_at_offsets(reading, matches, offsets, sample, directions)
        found.append(torch.stack([copied[offsets.index(layer.best(row))][unit] for row, unit in rows]))
    return [[None if value != value else value for value in values.tolist()] for values in to_host(found)]


def _scores(layer: LayerProfile, copying: Sequence[float | None]) -> list[CausalScore]:
    rows = [row for row, unit in enumerate(layer.units) if unit is not None]
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
