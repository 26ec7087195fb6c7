"""When did induction appear, and when in-context learning? Transitions of a run over its checkpoints, and
their lead.

Each curve is fitted in log-step by a four-parameter logistic and a level-ramp-level piecewise-linear model,
and called
a transition when the better of them beats every curve without a threshold (interp.transition,
interp.transition_fit).
Everything is read on plain arrays; `from_checkpoints` takes the records of a detection report.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from interp.displayed import Displayed
from interp.records import CheckpointScores, HeadScore
from interp.transition import MIN_CHECKPOINTS, Transition, fit_transition, lead

__all__ = ["PhaseTransition", "Transition", "fit_transition", "from_checkpoints", "lead", "phase_transition"]

# Smallest change that is called a transition: score units for prefix matching, nats for the losses.
MIN_CHANGE = {"prefix_matching": 0.1, "order_gain": 0.2, "in_context_learning": 0.1}
ORDER_GAIN_ONSETS_NATS = (0.1, 1.0)

METHOD = (
    "log-step; four-parameter logistic and level-ramp-level piecewise-linear fits against constant, "
    "log-linear,"
    " linear and exponential-relaxation curves by BIC, with a margin that the best of those plus white noise "
    "passes 1 time in 100 on the same steps; onset = the pair of checkpoints around the 10% point of "
    "the fitted"
    " rise (order gain: around its crossing of 0.1 nat), midpoint = 50%, width = 10% to 90%; "
    "intervals: 95% of "
    "those of {draws} bootstrap draws over {levels} (seed {seed}) that have a transition; lead = "
    "onset of the "
    "second minus onset of the first, grid censoring included, positive when the first named changes first; "
    "above_chance_from_step = the first checkpoint from which prefix matching stays two standard errors "
    "above uniform attention: an onset before it is of a rise from below chance"
)


@dataclass(frozen=True, kw_only=True)
class PhaseTransition(Displayed, Mapping, display="transition"):
    """The transitions of one run: None for a curve without one. `lead_steps` is the 95% interval of the lead
    of
    `lead_of[0]` over `lead_of[1]`, in steps; None where either has no transition.

    Also a mapping of its JSON: `found.order_gain.onset_step` is `found["order_gain"]["onset_step"]`, a tuple.
    """

    prefix_matching: Transition | None
    order_gain: Transition | None
    in_context_learning: Transition | None
    lead_steps: tuple[float, float] | None
    lead_of: tuple[str, str] | None
    method: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the `phase_transition` key."""
        curves = {name: getattr(self, name) for name in MIN_CHANGE}
        return {
            **{name: None if curve is None else curve.to_dict() for name, curve in curves.items()},
            "lead_steps": None if self.lead_steps is None else list(self.lead_steps),
            "lead_of": None if self.lead_of is None else list(self.lead_of),
            "method": self.method,
        }

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())


def phase_transition(
    steps: Sequence[int] | np.ndarray,
    *,
    prefix_matching: np.ndarray | None = None,
    chance: float | None = None,
    order_gain: np.ndarray | None = None,
    in_context_learning: np.ndarray | None = None,
    min_change: Mapping[str, float] = MIN_CHANGE,
    n_bootstrap: int = 200,
    seed: int = 0,
) -> PhaseTransition | None:
    """Transitions of induction (prefix matching, order gain) and of the in-context-learning score in one run.

    Args:
        steps: [n] checkpoint steps, strictly rising.
        prefix_matching: [n n_sequences] (or [seed n n_sequences], or [n]) score of one head, rising.
        chance: Of prefix matching: what uniform attention gets on the same tokens. A head may rise from far
            below it; `Transition.above_chance_from_step` says from when on it is two standard errors above.
        order_gain: the same for the order gain, nats, rising.
        in_context_learning: the same for the in-context-learning score, nats, falling (negative is better).
        min_change: Smallest change of each curve that is called a transition, in the curve's own units.
        n_bootstrap: Draws for the intervals.
        seed: Of the bootstrap.

    Returns:
        None when the order gain has no transition (where it is not given: when prefix matching has none). The
        other two move without induction too: a one-layer model learns which tokens occur, and on i.i.d. data
        a head's weights drift, with nothing to hold them. None for fewer than 4 checkpoints.

    Raises:
        ValueError: steps that do not rise, shapes that differ, a value that is not finite.

    Source: Olsson et al. 2022, arXiv:2209.11895, for the curves. Differs: fitted, interval-censored, against
    a null.
    """
    curves = {
        "prefix_matching": (prefix_matching, True, ()),
        "order_gain": (order_gain, True, ORDER_GAIN_ONSETS_NATS),
        "in_context_learning": (in_context_learning, False, ()),
    }
    found: dict[str, Transition | None] = {}
    for name, (values, rising, thresholds) in curves.items():
        options = {"rising": rising, "min_change": min_change[name], "n_bootstrap": n_bootstrap, "seed": seed}
        if values is None:
            found[name] = None
            continue
        found[name] = fit_transition(steps, values, name=name, onset_thresholds=thresholds, **options)
    if chance is not None and found["prefix_matching"] is not None:
        above = _above_from(steps, np.asarray(prefix_matching, dtype=np.float64), chance)
        found["prefix_matching"] = replace(
            found["prefix_matching"], chance=chance, above_chance_from_step=above
        )
    # A head's weights drift where nothing depends on them (seen on i.i.d. data): behaviour decides.
    if found["prefix_matching" if order_gain is None else "order_gain"] is None:
        return None
    lead_of = _pair(found)
    with_seeds = any(np.ndim(values) == 3 for values, _, _ in curves.values())
    levels = "training seeds and sequences" if with_seeds else "sequences"
    return PhaseTransition(
        **found,
        lead_steps=None if lead_of is None else lead(*(found[name] for name in lead_of)),
        lead_of=lead_of,
        method=METHOD.format(draws=n_bootstrap, levels=levels, seed=seed),
    )


def _above_from(steps: Sequence[int] | np.ndarray, values: np.ndarray, chance: float) -> int | None:
    """The first step from which the mean stays two standard errors above chance."""
    by_sequence = values.mean(axis=0) if values.ndim == 3 else values.reshape(len(values), -1)
    n = by_sequence.shape[1]
    error = by_sequence.std(axis=1, ddof=1) / np.sqrt(n) if n > 1 else 0.0
    below = np.flatnonzero(by_sequence.mean(axis=1) - 2 * error <= chance)
    first = 0 if len(below) == 0 else int(below[-1]) + 1
    return int(steps[first]) if first < len(by_sequence) else None


def _pair(found: dict[str, Transition | None]) -> tuple[str, str] | None:
    """Prefix matching (else order gain) over the in-context-learning score; without the latter, over order
    gain."""
    there = [
        name for name in ("prefix_matching", "order_gain", "in_context_learning") if found[name] is not None
    ]
    return (there[0], there[-1]) if len(there) > 1 else None


def from_checkpoints(
    checkpoints: Sequence[CheckpointScores], *, n_bootstrap: int = 200, seed: int = 0
) -> PhaseTransition | None:
    """`phase_transition` of a report's checkpoints, prefix matching of the unit that is strongest at the
    last one.

    The unit is fixed by the last checkpoint and followed back: the maximum over units at every checkpoint
    would rise
    with the number of units. A score that some checkpoint lacks is left out.
    """
    if len(checkpoints) < MIN_CHECKPOINTS:
        return None
    heads = checkpoints[-1].heads
    best = max(heads, key=lambda head: head.prefix_matching, default=None)
    scores = [] if best is None else [_same_unit(checkpoint, best) for checkpoint in checkpoints]
    prefix = [None if s is None else (s.prefix_matching_by_sequence or (s.prefix_matching,)) for s in scores]
    order = [c.order_gain_by_sequence or _alone(c.order_gain_nats) for c in checkpoints]
    learning = [c.in_context_learning_by_window or _alone(c.in_context_learning_nats) for c in checkpoints]
    return phase_transition(
        [checkpoint.step for checkpoint in checkpoints],
        prefix_matching=_table(prefix),
        chance=None if best is None else best.prefix_matching_chance,
        order_gain=_table(order),
        in_context_learning=_table(learning),
        n_bootstrap=n_bootstrap,
        seed=seed,
    )


def _alone(value: float | None) -> tuple[float] | None:
    return None if value is None else (value,)


def _same_unit(checkpoint: CheckpointScores, best: HeadScore) -> HeadScore | None:
    key = (best.layer, best.head, best.unit, best.reading)
    return next((h for h in checkpoint.heads if (h.layer, h.head, h.unit, h.reading) == key), None)


def _table(rows: list[tuple[float, ...] | None]) -> np.ndarray | None:
    """[n n_sequences], or the means [n 1] where the checkpoints' samples differ in number; None where one
    lacks."""
    if not rows or any(row is None for row in rows):
        return None
    if len({len(row) for row in rows}) > 1:
        return np.array([[np.mean(row)] for row in rows])
    return np.array(rows, dtype=np.float64)
