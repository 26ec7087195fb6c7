"""The training-step axis of figures: logarithmic, with a place for step 0 and labels at round steps."""

from collections.abc import Sequence

import numpy as np

from interp.transition_fit import StepAxis


def short(step: float) -> str:
    """A step as a short label: 0, 500, 2k, 1.5M."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if step >= unit:
            return f"{step / unit:.3g}{letter}"
    return f"{step:.3g}"


def positions(steps: Sequence[int], at: Sequence[float] | None = None) -> np.ndarray:
    """Places of `at` (default: the steps themselves) on the axis of a series of checkpoints."""
    axis = StepAxis(steps=tuple(int(step) for step in steps))
    places = axis.positions
    if at is None:
        return places
    at = np.asarray(at, dtype=np.float64)
    if axis.steps[0] > 0:
        return np.log(np.maximum(at, axis.steps[0] / 2))
    first = axis.steps[1] if len(axis.steps) > 1 else 1
    below = places[0] + (np.log(first) - places[0]) * at / first
    return np.where(at < first, below, np.log(np.maximum(at, first)))


def ticks(steps: Sequence[int], *, n_most: int = 10) -> tuple[list[float], list[str]]:
    """Places and labels of 0 (if there) and of round steps (1, 2, 5 times powers of ten) within the
    series."""
    places = positions(steps)
    first, last = max(min(step for step in steps if step > 0), 1), max(steps)
    for leading in ((1, 2, 5), (1, 3), (1,)):
        decades = range(int(np.log10(first)), int(np.log10(last)) + 1)
        rounds = [
            lead * 10**decade for decade in decades for lead in leading if first <= lead * 10**decade <= last
        ]
        if len(rounds) <= n_most:
            break
    if len(rounds) < 2:
        rounds = sorted({first, last})
    values = [float(np.log(step)) for step in rounds]
    labels = [short(step) for step in rounds]
    if 0 in steps:
        gap = (places[-1] - places[0]) / 24
        kept = [index for index, value in enumerate(values) if value - places[0] > gap]
        values = [float(places[0]), *(values[i] for i in kept)]
        labels = ["0", *(labels[i] for i in kept)]
    return values, labels


def axis_layout(steps: Sequence[int], *, title: str = "training step (log)") -> dict:
    """Plotly layout of the axis."""
    places, (values, labels) = positions(steps), ticks(steps)
    length = max(float(np.ptp(places)), 1e-6)
    return {
        "tickmode": "array",
        "tickvals": values,
        "ticktext": labels,
        "range": [places[0] - 0.02 * length, places[-1] + 0.01 * length],
        "title": {"text": title},
    }
