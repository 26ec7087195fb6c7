"""One curve's transition over checkpoints: onset, midpoint, width, their bootstrap intervals, and leads.

The decision and the places come from interp.transition_fit; here they get seeds, samples, censoring and
intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import Float

from interp.displayed import Displayed
from interp.transition_fit import LOGISTIC, RAMP, RELAXATION_WIDTH, Fit, StepAxis, crossing, fit, margin

MIN_CHECKPOINTS = 4
# Noise of a checkpoint's mean that is assumed before any is seen: this share of the smallest change.
NOISE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Transition(Displayed, display="transition"):
    """One curve's transition. Steps are optimiser steps; `*_interval` are 95% bootstrap intervals over the
    draws
    that are called a transition too (None: no samples, or no such draw); `support` is the share of those
    draws.

    `onset_step` are the two consecutive checkpoints that the onset lies between ([0, first] when it was
    already past
    at the first one). `change` is the fitted change between the first and the last checkpoint, in the
    curve's own unit;
    `complete` is False while more than a tenth of the change falls into the last checkpoint interval:
    midpoint and
    width then describe the run so far. `chance`: what a curve gets without learning, for curves that have
    one, and
    `above_chance_from_step` the first checkpoint from which it stays above (None: never).
    """

    onset_step: tuple[float, float]
    onset_interval: tuple[float, float] | None
    onset_definition: str
    later_onset_step: tuple[float, float] | None = None
    later_onset_definition: str | None = None
    midpoint_step: float
    midpoint_interval: tuple[float, float] | None
    width_10_90_steps: float
    width_interval: tuple[float, float] | None
    change: float
    model: str
    bic_gain: float
    bic_margin: float
    support: float | None
    complete: bool
    n_seeds: int
    n_seeds_with_transition: int
    chance: float | None = field(default=None, compare=False)
    above_chance_from_step: int | None = field(default=None, compare=False)
    onset_draws: Float[np.ndarray, "draw two=2"] = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: every field but the draws."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "onset_draws"}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in record.items()}


def fit_transition(
    steps: Sequence[int] | np.ndarray,
    values: np.ndarray,
    *,
    min_change: float,
    rising: bool = True,
    onset_thresholds: tuple[float, ...] = (),
    n_bootstrap: int = 200,
    seed: int = 0,
    name: str = "values",
) -> Transition | None:
    """The transition of one curve, or None.

    A transition beats every threshold-free curve by BIC and the noise margin, changes by at least
    `min_change` in the
    stated direction, and is sharper in log-step than exponential relaxation (10-90 ratio 21.9). With a seeds
    axis
    more than half of the seeds must have one, and places are geometric means over those that do.

    Args:
        steps: [n] strictly rising, not negative.
        values: [n], [n n_sequences] or [seed n n_sequences]; the same sequences at every step.
        min_change: Smallest change called a transition, in the unit of `values`.
        rising: Direction of the change; a change the other way is none.
        onset_thresholds: Absolute onsets: the first is `onset_step`, the second `later_onset_step`. Empty:
        the 10%
            point of the fit. A first threshold that is never crossed also falls back to the 10% point.
        n_bootstrap: Draws; 0 or a single sequence gives no intervals.
        seed: Of the bootstrap.
        name: Of the values, for error messages.

    Raises:
        ValueError: as `phase_transition`.
    """
    axis, data = _checked(steps, values, name)
    if len(axis.steps) < MIN_CHECKPOINTS:
        return None
    sign = 1.0 if rising else -1.0
    curves = sign * data.mean(axis=2)
    fitted = fit(axis.steps, curves, noise=min_change * NOISE_SHARE)
    if not _decide(fitted, 0.0, min_change).any():
        return None
    margins = margin(axis.steps, fitted, noise=min_change * NOISE_SHARE)
    is_transition = _decide(fitted, margins, min_change)
    if is_transition.sum() * 2 <= len(is_transition):
        return None
    draws = _bootstrap(sign * data, n_bootstrap, seed)
    thresholds = [t for t in onset_thresholds if _bracket(axis, curves[is_transition], t) is not None]
    first = thresholds[0] if thresholds and thresholds[0] == onset_thresholds[0] else None
    later = onset_thresholds[1] if len(onset_thresholds) > 1 else None
    return Transition(
        **_places(axis, curves[is_transition], fitted.points[is_transition], first),
        **_intervals(axis, draws, (margins.max(), min_change), first),
        onset_definition="10% of the fitted change" if first is None else f"crossing of {sign * first:g}",
        later_onset_step=_bracket(axis, curves[is_transition], later) if later in thresholds else None,
        later_onset_definition=None if later is None else f"crossing of {sign * later:g}",
        change=float(sign * fitted.change[is_transition].mean()),
        model=LOGISTIC if fitted.is_logistic[is_transition].mean() > 0.5 else RAMP,
        bic_gain=float(fitted.gain_bic[is_transition].mean()),
        bic_margin=float(margins[is_transition].mean()),
        n_seeds=len(data),
        n_seeds_with_transition=int(is_transition.sum()),
    )


def lead(first: Transition, second: Transition) -> tuple[float, float]:
    """95% interval, in steps, of how much earlier `first` sets in than `second` (positive: `first` is
    earlier).

    In each bootstrap draw either onset is known up to its pair of checkpoints, so the draw's lead is an
    interval too;
    the result covers 95% of the draws with both of its ends.
    """
    a, b = first.onset_draws, second.onset_draws
    if len(a) != len(b) or len(a) == 0:
        a, b = np.array([first.onset_step]), np.array([second.onset_step])
    both = np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1)
    if not both.any():
        a, b, both = np.array([first.onset_step]), np.array([second.onset_step]), np.array([True])
    low, high = b[both, 0] - a[both, 1], b[both, 1] - a[both, 0]
    return _covering(low, high)


def _covering(low: np.ndarray, high: np.ndarray) -> tuple[float, float]:
    """What 95% of the draws lie in with both ends, to a millionth of a step (they come out of logarithms)."""
    return round(float(np.quantile(low, 0.025)), 6), round(float(np.quantile(high, 0.975)), 6)


def _checked(steps: Any, values: Any, name: str) -> tuple[StepAxis, Float[np.ndarray, "seed n sequence"]]:
    grid, data = np.asarray(steps), np.asarray(values, dtype=np.float64)
    if (
        grid.ndim != 1
        or grid.size == 0
        or (np.diff(grid) <= 0).any()
        or grid[0] < 0
        or (grid != np.round(grid)).any()
    ):
        raise ValueError(
            f"steps must be whole numbers from 0 up, each above the one before; got {grid.tolist()}"
        )
    if data.ndim == 1:
        data = data[:, None]
    if data.ndim == 2:
        data = data[None]
    if data.ndim != 3 or data.shape[1] != grid.size or 0 in data.shape:
        shape = tuple(np.shape(values))
        raise ValueError(
            f"{name} has shape {shape}; accepted: [n], [n sequence] or [seed n sequence], n = {grid.size}"
        )
    if not np.isfinite(data).all():
        seed, row, column = np.argwhere(~np.isfinite(data))[0]
        raise ValueError(
            f"{name} holds {data[seed, row, column]} at step {int(grid[row])}, sequence {column}; "
            f"values must be finite"
        )
    return StepAxis(steps=tuple(int(step) for step in grid)), data


def _decide(fitted: Fit, margins: np.ndarray | float, min_change: float) -> np.ndarray:
    """Whether each fitted curve is a transition [curve]."""
    width = fitted.points[:, 2] - fitted.points[:, 0]
    return (fitted.gain_bic > margins) & (fitted.change >= min_change) & (width < RELAXATION_WIDTH)


def _bootstrap(data: np.ndarray, n_bootstrap: int, seed: int) -> Float[np.ndarray, "draw seed n"]:
    """Mean curves of draws that resample seeds, then sequences within each drawn seed; [0 seed n] without
    samples.

    Seeds are drawn first, so that curves of the same runs get the same seeds in the same draw.
    """
    n_seeds, n, n_sequences = data.shape
    if n_sequences == 1 and n_seeds == 1:
        return np.zeros((0, n_seeds, n))
    rng = np.random.default_rng(seed)
    chosen = rng.integers(n_seeds, size=(n_bootstrap, n_seeds))
    counts = rng.multinomial(n_sequences, np.full(n_sequences, 1 / n_sequences), size=(n_bootstrap, n_seeds))
    curves = np.empty((n_bootstrap, n_seeds, n))
    for index in range(n_seeds):
        at = chosen == index
        curves[at] = counts[at] / n_sequences @ data[index].T
    return curves


def _bracket(axis: StepAxis, curves: np.ndarray, threshold: float | None) -> tuple[float, float] | None:
    """Checkpoints around the mean (in log-step) crossing of `threshold`; None where no curve crosses it."""
    edges = _crossing_edges(axis, curves, threshold)
    edges = edges[np.isfinite(edges).all(axis=1)]
    if len(edges) == 0:
        return None
    if len(edges) == 1 or edges[:, 0].max() == edges[:, 0].min():
        return float(edges[0, 0]), float(edges[0, 1])
    middle = np.log1p(edges).mean(axis=1).mean()
    return _around(axis, np.expm1(middle))


def _crossing_edges(axis: StepAxis, curves: np.ndarray, threshold: float) -> Float[np.ndarray, "curve two=2"]:
    """The last checkpoint before and the first after each curve's crossing; infinite where it never
    crosses."""
    index = np.concatenate(
        [crossing(curves[i : i + 64], threshold) for i in range(0, len(curves), 64)]
    ).astype(int)
    grid = np.concatenate([[0.0], axis.steps, [np.inf]])
    edges = np.stack([grid[index], grid[index + 1]], axis=1)
    edges[index == len(axis.steps)] = np.inf
    return edges


def _around(axis: StepAxis, step: float) -> tuple[float, float]:
    low = int(
        np.clip(np.searchsorted(axis.steps, step * (1 + 1e-9), side="right") - 1, 0, len(axis.steps) - 2)
    )
    return float(axis.steps[low]), float(axis.steps[low + 1])


def _places(
    axis: StepAxis, curves: np.ndarray, points: np.ndarray, threshold: float | None
) -> dict[str, Any]:
    """Onset, midpoint, width and completeness of the curves that have a transition."""
    ten, fifty, ninety = axis.to_step(points.mean(axis=0))
    onset = _around(axis, float(ten)) if threshold is None else _bracket(axis, curves, threshold)
    return {
        "onset_step": onset,
        "midpoint_step": float(fifty),
        "width_10_90_steps": float(ninety - ten),
        "complete": bool(ninety <= axis.steps[-2]),
    }


def _intervals(
    axis: StepAxis, draws: np.ndarray, limits: tuple[float, float], threshold: float | None
) -> dict[str, Any]:
    """95% intervals of onset, midpoint and width over the draws, their onsets, and the share with a
    transition."""
    n_draws, n_seeds, n = draws.shape
    if n_draws == 0:
        nothing = {"onset_interval": None, "midpoint_interval": None, "width_interval": None, "support": None}
        return {**nothing, "onset_draws": np.zeros((0, 2))}
    curves, (margins, min_change) = draws.reshape(-1, n), limits
    fitted = fit(axis.steps, curves, noise=min_change * NOISE_SHARE)
    is_transition = _decide(fitted, margins, min_change)
    weight = is_transition.reshape(n_draws, n_seeds).astype(float)
    support = weight.mean(axis=1) > 0.5
    # A draw in which no seed is called a transition still has a best place: all its seeds count.
    weight[weight.sum(axis=1) == 0] = 1.0
    weight /= weight.sum(axis=1, keepdims=True)
    places = axis.to_step(np.einsum("ds,dsp->dp", weight, fitted.points.reshape(n_draws, n_seeds, 3)))
    if threshold is None:
        onsets = np.array([_around(axis, step) for step in places[:, 0]])
    else:
        edges = _crossing_edges(axis, curves, threshold).reshape(n_draws, n_seeds, 2)
        onsets = np.array([_mean_edges(row) for row in edges])
    # Where a draw has no transition it has no place either; `support` says how many were left out.
    onsets[~support] = np.inf
    seen = onsets[np.isfinite(onsets).all(axis=1)]
    places = places[support]

    def covers(low: np.ndarray, high: np.ndarray) -> tuple[float, float] | None:
        return _covering(low, high) if len(low) else None

    width = places[:, 2] - places[:, 0]
    # Shapes stand about six to a checkpoint interval: no draw knows its midpoint better than half of that.
    half = float(np.median(np.diff(axis.positions))) / 12
    return {
        "onset_interval": covers(seen[:, 0], seen[:, 1]),
        "midpoint_interval": covers(places[:, 1] * np.exp(-half), places[:, 1] * np.exp(half)),
        "width_interval": covers(width, width),
        "support": float(support.mean()),
        "onset_draws": onsets,
    }


def _mean_edges(edges: Float[np.ndarray, "seed two=2"]) -> tuple[float, float]:
    """Geometric mean over the seeds that cross; infinite where none does."""
    crossed = edges[np.isfinite(edges).all(axis=1)]
    if len(crossed) == 0:
        return np.inf, np.inf
    low, high = np.expm1(np.log1p(crossed).mean(axis=0))
    return float(low), float(high)
