"""What the offset tables say of one model: textbook scores beside causal effects with their controls."""

from typing import Any

import torch
from torch import Tensor

from interp import in_context_learning as icl
from interp.head_scores import HeadScores
from interp.induction_test import causal_scores
from interp.offset_cuts import LayerProfile, OffsetProfile, mean, offset_profile, standard_error
from interp.offset_edges import probe_matches, window_matches
from interp.plan import Plan, make_plan
from interp.records import HeadScore
from interp.subject import LanguageModelSubject
from models.language_model import LanguageModel


@torch.no_grad()
def measure_model(model: LanguageModel, windows: Tensor, *, trained: int) -> dict[str, Any]:
    """Scores, causal profile and induction heads on the repeated-token probe.

    Args:
        windows: Held-out windows, which tell what tokens there are.
        trained: Length of the training sequences; the probe stays within.
    """
    subject = LanguageModelSubject(model)
    plan = make_plan(subject, windows=windows.long(), trained=trained)
    heads = HeadScores(subject, plan.probe)
    heads.visit()
    records = heads.records()
    profile = offset_profile(model, probe_matches(plan.probe))
    causal = causal_scores(subject, plan.probe)
    induction = [[c.layer, c.unit, c.offset] for c in causal if c.is_induction]
    return {
        "probe": [plan.probe.period, plan.probe.repeats, len(plan.probe.tokens)],
        **behaviour(subject, plan),
        "textbook_prefix": _best(records, block=False),
        "block_prefix": _best(records, block=True),
        **profile_summary(profile),
        "best_unit_effect_nats": max((c.effect_nats for c in causal), default=None),
        "n_induction": len(induction),
        "induction": induction,
    }


@torch.no_grad()
def measure_windows(
    model: LanguageModel, windows: Tensor, *, by_unit: bool = False, ignored: frozenset[int] = frozenset()
) -> dict[str, Any]:
    """The causal profile on real text: loss at the second and later occurrences of a bigram in a window."""
    matches = window_matches(windows.long(), ignored=ignored)
    return profile_summary(offset_profile(model, matches, by_unit=by_unit))


def behaviour(subject: LanguageModelSubject, plan: Plan) -> dict[str, Any]:
    """Repeat loss and order gain."""
    in_order = subject.losses(plan.loss_in_order.tokens)
    shuffled = subject.losses(plan.loss_shuffled.tokens)
    losses = icl.repeat_losses(in_order, shuffled, plan.loss_in_order)
    return {
        "repeat_loss_nats": float(losses.later_copies.mean()),
        "order_gain_nats": float(losses.order_gain.mean()),
    }


def profile_summary(profile: OffsetProfile) -> dict[str, Any]:
    """Whole-layer effects: the strongest layer's delta*, its cut and control, and every layer's numbers."""
    layer, row = profile.strongest()
    effect, error = layer.effect(row)
    best = layer.offsets.index(layer.best(row))
    previous = {part.layer: float(mean(part.previous[-1])) for part in profile.layers}
    strongest = max(previous, key=previous.__getitem__)
    rescaled = None if layer.renormalised is None else float(mean(layer.renormalised[row, best]))
    return {
        "loss_nats": float(mean(profile.loss)),
        "layer": layer.layer,
        "delta": layer.best(row),
        "cut_nats": float(mean(layer.cut[row, best])),
        "random_nats": float(mean(layer.random[row])),
        "effect_nats": effect,
        "effect_se_nats": error,
        "renormalised_nats": rescaled,
        "previous_nats": previous[strongest],
        "previous_layer": strongest,
        "taps_nats": _taps(layer),
        "n_scored": profile.n_scored,
        "n_edges": {str(offset): n for offset, n in profile.n_edges.items()},
        "n_random": profile.n_random,
        "layers": [_layer(part) for part in profile.layers],
    }


def _taps(layer: LayerProfile) -> list[float] | None:
    return None if layer.taps is None else mean(layer.taps).tolist()


def _layer(layer: LayerProfile) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "mixer": layer.mixer,
        "offsets": list(layer.offsets),
        "units": [-1 if unit is None else unit for unit in layer.units],
        "cut_nats": mean(layer.cut).tolist(),
        "cut_se_nats": standard_error(layer.cut).tolist(),
        "random_nats": mean(layer.random).tolist(),
        "previous_nats": mean(layer.previous).tolist(),
        "renormalised_nats": None if layer.renormalised is None else mean(layer.renormalised).tolist(),
        "taps_nats": _taps(layer),
    }


def _best(records: tuple[HeadScore, ...], *, block: bool) -> float | None:
    """Highest prefix matching of any unit, in block readings or in the mixers' own."""
    values = [record.prefix_matching for record in records if (record.reading == "block") == block]
    return max(values, default=None)
