"""What cutting a unit's edges costs, at each offset from earlier copies: the numbers behind one figure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from interp.dashboard.prompt import Prompt
from interp.dashboard.quotation import quoted
from interp.dashboard.run import Run
from interp.errors import DetectionError
from interp.induction_test import N_SEQUENCES
from interp.offset_cuts import LayerProfile, default_offsets, mean, offset_profile, standard_error
from interp.offset_edges import Matches, probe_matches, window_matches
from interp.plan import make_plan
from interp.subject import LanguageModelSubject, Subject

MEASURED_ON = ("probe", "prompt")


@dataclass(frozen=True, kw_only=True)
class CutProfile:
    """Costs in nats, means over sequences: what cutting the edges at each offset adds to the loss.

    Attributes:
        cut: By unit name, one cost for each offset. The first is the chosen unit, then the whole layer.
        cut_se: Standard errors of the chosen unit's costs; empty for one sequence, which has none.
        effect, effect_se: The chosen unit's cost at its strongest offset, minus random edges.
        taps: Loss added by zeroing each lag of the short convolution, whole layer; empty without one.
    """

    offsets: tuple[int, ...]
    cut: dict[str, tuple[float, ...]]
    cut_se: tuple[float, ...]
    random: float
    previous: float
    taps: tuple[float, ...]
    best: int
    effect: float
    effect_se: float | None
    n_sequences: int
    n_scored: int
    measured_on: str


def cut_profile(run: Run, subject: Subject, prompt: Prompt, *, unit: int, **options: Any) -> CutProfile:
    """Cut the edges of one unit and of its whole layer; options and errors as `cut_profiles`."""
    return cut_profiles(run, subject, prompt, cut_units=(unit,), **options)[unit]


def cut_profiles(
    run: Run,
    subject: Subject,
    prompt: Prompt,
    *,
    layer: int,
    cut_units: Sequence[int],
    reading: str,
    units: str,
    measured_on: str = "probe",
) -> dict[int, CutProfile]:
    """Cut the edges of each of some units, and of their whole layer, on the standard probe or on the prompt.

    Raises:
        DetectionError: a model outside our own mixers; nothing in the prompt that comes again.
    """
    if measured_on not in MEASURED_ON:
        raise DetectionError(f"measured on {quoted(measured_on)}; accepted: {', '.join(MEASURED_ON)}")
    if not isinstance(subject, LanguageModelSubject):
        raise DetectionError(
            "Cuts need a model in our own mixers; this one is read through TransformerBridge."
        )
    matches = _probe(run, subject) if measured_on == "probe" else _prompt(subject, prompt)
    kind, n_seq = subject.mixers[layer], matches.tokens.shape[1]
    profile = offset_profile(
        subject.model,
        matches,
        # A short prompt has no edges at the farther ones.
        offsets=[offset for offset in default_offsets(subject.model) if abs(offset) < n_seq],
        layers=[layer],
        units=list(cut_units),
        reading=reading,
        mamba_units=units if kind == "mamba1" else None,
        controls=("random", "previous", "taps"),
    )
    said = {"n_scored": profile.n_scored, "measured_on": measured_on}
    return {unit: replace(_summary(profile.layers[0], unit), **said) for unit in cut_units}


def _probe(run: Run, subject: Subject) -> Matches:
    windows = run.source.windows
    trained = None if windows is None else windows.shape[1]
    plan = make_plan(subject, windows=windows, trained=trained)
    return probe_matches(plan.probe.take(slice(0, N_SEQUENCES)))


def _prompt(subject: Subject, prompt: Prompt) -> Matches:
    ignored = frozenset() if subject.bos is None else frozenset({subject.bos})
    return window_matches(torch.tensor([prompt.ids]), ignored=ignored)


def _summary(profile: LayerProfile, unit: int) -> CutProfile:
    rows = {"whole layer": len(profile.units) - 1}
    if len(profile.units) > 1:
        rows = {f"this {profile.unit}": profile.units.index(unit), **rows}
    row = next(iter(rows.values()))
    effect, error = profile.effect(row)
    taps = () if profile.taps is None else tuple(mean(profile.taps).tolist())
    return CutProfile(
        offsets=profile.offsets,
        cut={name: tuple(mean(profile.cut[place]).tolist()) for name, place in rows.items()},
        cut_se=tuple(standard_error(profile.cut[row]).tolist()) if profile.cut.shape[-1] > 1 else (),
        random=float(mean(profile.random[row])),
        previous=float(mean(profile.previous[row])),
        taps=taps,
        best=profile.best(row),
        effect=effect,
        effect_se=error if profile.cut.shape[-1] > 1 else None,
        n_sequences=profile.cut.shape[-1],
        n_scored=0,
        measured_on="probe",
    )
