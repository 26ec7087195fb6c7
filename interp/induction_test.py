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

from interp.offset_edges import Matches, probe_matches
from interp.offset_profile import LayerProfile, OffsetProfile, mean, offset_profile
from interp.records import HeadScore
from interp.sequences import RepeatedTokens
from interp.subject import LanguageModelSubject, LayerView, Subject
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
    options = {"controls": ("random",), **options}
    profile = offset_profile(subject.model, matches, mamba_units=units, layers=layers, **options)
    copied = _copying(subject, probe, matches, profile, units)
    return tuple(
        _score(layer, row, unit, copied[layer.layer][row])
        for layer in profile.layers
        for row, unit in enumerate(layer.units)
        if unit is not None
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
    edges = matches.at(offset)
    centred = directions - directions.mean(1, keepdim=True)
    readout = torch.einsum("usd,bkd->busk", reading.W_out, centred.to(reading.W_out.dtype))
    follower = matches.tokens[edges.batch, edges.src - offset + 1]
    ratios = []
    size = max(1, (1 << 22) // (readout[0].numel()))
    for batch, dest, src, token in zip(*(part.split(size) for part in (*edges, follower)), strict=True):
        logits = torch.einsum("nus,nusk->nuk", reading.edges(batch, dest, src), readout[batch])
        raised = logits.double().relu()
        index = (sample[batch] == token[:, None]).int().argmax(1)
        a = raised.gather(2, index[:, None, None].expand(-1, raised.shape[1], 1))[..., 0]
        total = raised.sum(-1)
        ratios.append(torch.where(total > 0, a / (a + total), torch.nan))
    return 4 * torch.cat(ratios).nanmean(0) - 1


def _copying(
    subject: Subject, probe: RepeatedTokens, matches: Matches, profile: OffsetProfile, units: str | None
) -> dict[int, dict[int, float | None]]:
    """Copying of each unit (row) of each layer at its own delta*."""
    sample = probe.tokens[:, probe.first : probe.first + probe.period]
    directions = subject.directions(sample)
    rows: dict[int, LayerProfile] = {layer.layer: layer for layer in profile.layers}
    found: dict[int, dict[int, float | None]] = {}

    def look(view: LayerView) -> None:
        layer = rows.get(view.layer)
        if layer is None:
            return
        best = {row: layer.best(row) for row, unit in enumerate(layer.units) if unit is not None}
        reading = next(r for r in view.readings if r.name == layer.reading)
        by_offset = {
            offset: copying_at_offset(reading, matches, offset, sample, directions)
            for offset in set(best.values())
        }
        values = {row: float(by_offset[offset][layer.units[row]]) for row, offset in best.items()}
        found[view.layer] = {row: None if value != value else value for row, value in values.items()}

    with torch.no_grad():
        subject.visit(probe.tokens, look, units=units)
    return found


def _score(layer: LayerProfile, row: int, unit: int, copying: float | None) -> CausalScore:
    effect, error = layer.effect(row)
    return CausalScore(
        layer=layer.layer,
        unit=unit,
        reading=layer.reading,
        offset=layer.best(row),
        offsets=layer.offsets,
        cut_nats=tuple(mean(layer.cut[row]).tolist()),
        effect_nats=effect,
        effect_se_nats=error,
        control_nats=0.0 if layer.random is None else float(mean(layer.random[row])),
        copying=copying,
    )


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
