"""Is there a step in this curve? One-shape models y = a + b g(x) in log-step, fitted to many curves at once.

A curve is compared with shapes on a fixed grid. For one shape the best a and b are linear least squares, so
the
residual of every shape for every curve is one matrix product; no iterative optimiser runs. Shapes with a
threshold
(a four-parameter logistic, and a level-ramp-level continuous piecewise-linear curve) stand against shapes
without
one (constant; straight in log-step; exponential relaxation from step 0, which includes straight in step).
"""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

LOGISTIC, RAMP = "logistic", "piecewise linear"
# 10-90 width, in log-step, of exponential relaxation from step 0 whatever its rate: ln(ln 10 / ln(10/9)).
# A change no sharper than that is ordinary learning.
RELAXATION_WIDTH = float(np.log(np.log(10) / np.log(10 / 9)))
# Pseudo-observations of noise added to every residual: without them a fit of few points has none to speak of.
PRIOR_POINTS = 2.0
# Below this many checkpoints four parameters leave too few residuals to measure the noise by.
FEW = 8
SIMULATED = 500
FALSE_POSITIVE_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class StepAxis:
    """Checkpoint steps on a logarithmic axis; step 0 stands one median log spacing before the first positive
    step."""

    steps: tuple[int, ...]

    @property
    def positions(self) -> Float[np.ndarray, " n"]:
        """Natural logarithm of the step, finite everywhere and strictly rising."""
        steps = np.asarray(self.steps, dtype=np.float64)
        positive = np.log(steps[steps > 0])
        if steps[0] > 0:
            return positive
        gap = float(np.median(np.diff(positive))) if positive.size > 1 else 1.0
        return np.concatenate([[positive[0] - gap], positive])

    def to_step(self, position: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
        """Steps at positions on the axis: exponential between positive checkpoints, straight from 0 to the
        first."""
        position = np.asarray(position, dtype=np.float64)
        steps = np.exp(position)
        if self.steps[0] > 0:
            return steps
        start, first = self.positions[:2]
        share = np.clip((position - start) / (first - start), 0.0, 1.0)
        return np.where(position < first, share * self.steps[1], steps)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """A grid of shapes: `unit` [shape n] centred and of unit norm, `rise` [shape] what norm 1 amounts to
    between the
    first and the last checkpoint, `points` [shape 3] where 10, 50 and 90% of that rise are reached
    (log-step)."""

    unit: Float[np.ndarray, "shape n"]
    rise: Float[np.ndarray, " shape"]
    points: Float[np.ndarray, "shape three=3"]
    n_logistic: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The best shape with a threshold for each curve, how far its BIC is below the best without one
    (`gain_bic`), and
    that one: its values and the standard deviation around it."""

    change: Float[np.ndarray, " curve"]
    points: Float[np.ndarray, "curve three=3"]
    is_logistic: np.ndarray
    gain_bic: Float[np.ndarray, " curve"]
    drift: Float[np.ndarray, "curve n"]
    drift_sd: Float[np.ndarray, " curve"]


def _logistic(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logistic curves [shape n] over centres and scales, and their within-window 10/50/90% points [shape
    3]."""
    n = x.size
    inside = np.interp(np.linspace(0, n - 1, min(6 * (n - 1) + 1, 181)), np.arange(n), x)
    centres = np.concatenate([inside, x[-1] + np.linspace(0.1, 2.0, 12)])
    scales = np.geomspace(np.diff(x).min() / 8, max(np.ptp(x) / 3, RELAXATION_WIDTH / 4), 14)
    centre, scale = (grid.ravel()[:, None] for grid in np.meshgrid(centres, scales[::-1]))
    curve = 1 / (1 + np.exp(-np.clip((x - centre) / scale, -60, 60)))
    level = curve[:, :1] + np.array([0.1, 0.5, 0.9]) * (curve[:, -1:] - curve[:, :1])
    level = np.clip(level, 1e-300, 1 - 1e-15)
    return curve, np.clip(centre + scale * np.log(level / (1 - level)), x[0], x[-1])


def _ramp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Level, straight rise, level [shape n] over pairs of knots, widest first, and their 10/50/90% points."""
    n = x.size
    knots = np.interp(np.linspace(0, n - 1, min(4 * (n - 1) + 1, 129)), np.arange(n), x)
    first, second = np.triu_indices(knots.size, k=1)
    order = np.argsort(knots[first] - knots[second], kind="stable")
    low, high = knots[first][order][:, None], knots[second][order][:, None]
    curve = np.clip((x - low) / (high - low), 0.0, 1.0)
    return curve, low + np.array([0.1, 0.5, 0.9]) * (high - low)


def _without_threshold(x: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shapes that only drift [shape n] and their parameter counts: x, the step itself, and 1 -
    exp(-step/tau).

    Rates too fast for the second checkpoint to show the relaxation are left out: those are steps.
    """
    slowest, fastest = 3.0 * steps[-1], float(steps[steps > 0][min(1, (steps > 0).sum() - 1)])
    rates = np.geomspace(fastest, max(slowest, 2 * fastest), 40)
    curves = np.vstack([x, steps, 1 - np.exp(-steps / rates[:, None])])
    return curves, np.concatenate([[2, 2], np.full(rates.size, 3)])


def _unit(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    centred = curves - curves.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(centred, axis=1)
    kept = norm > 1e-9
    return centred[kept] / norm[kept, None], kept


@functools.lru_cache(maxsize=8)
def _shapes(steps: tuple[int, ...]) -> tuple[Shapes, np.ndarray, np.ndarray]:
    """Shapes with a threshold, and the drifts [shape n] with their parameter counts, for one checkpoint
    grid."""
    x = StepAxis(steps=steps).positions
    (logistic, at_logistic), (ramp, at_ramp) = _logistic(x), _ramp(x)
    curves, points = np.vstack([logistic, ramp]), np.vstack([at_logistic, at_ramp])
    unit, kept = _unit(curves)
    shapes = Shapes(
        unit=unit,
        rise=unit[:, -1] - unit[:, 0],
        points=points[kept],
        n_logistic=int(kept[: len(logistic)].sum()),
    )
    drift, counts = _without_threshold(x, np.asarray(steps, dtype=np.float64))
    drift_unit, drift_kept = _unit(drift)
    return shapes, drift_unit, counts[drift_kept]


def fit(steps: tuple[int, ...], curves: Float[np.ndarray, "curve n"], *, noise: float) -> Fit:
    """Fit every rising curve.

    Args:
        steps: Checkpoint steps, strictly rising, at least 4.
        curves: One curve a row, rising where there is a transition (negate falling ones).
        noise: Standard deviation of the pseudo-observations in every residual, in the curves' unit.
    """
    parts = [_fit_block(steps, curves[i : i + 256], noise) for i in range(0, len(curves), 256)]
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in Fit.__dataclass_fields__
    }
    return Fit(**joined)


def _fit_block(steps: tuple[int, ...], curves: np.ndarray, noise: float) -> Fit:
    shapes, drift, drift_counts = _shapes(steps)
    n = curves.shape[1]
    centred = curves - curves.mean(axis=1, keepdims=True)
    total = (centred**2).sum(axis=1)
    slope = centred @ shapes.unit.T
    # Equal fits (a jump between two checkpoints) go to the widest shape, which the grid puts first.
    scale = np.maximum(np.sqrt(total), 1e-12)[:, None]
    best = np.round(slope / scale, 9).argmax(axis=1)
    rows = np.arange(len(curves))
    height = np.maximum(slope[rows, best], 0.0)
    residual = np.maximum(total - height**2, 0.0)

    def bic(rss: np.ndarray, n_parameters: np.ndarray | int) -> np.ndarray:
        return n * np.log((rss + PRIOR_POINTS * noise**2 + 1e-300) / n) + n_parameters * np.log(n)

    # Column 0 is the constant curve.
    along = np.concatenate([np.zeros((len(curves), 1)), centred @ drift.T], axis=1)
    counts = np.concatenate([[1], drift_counts])
    left = np.maximum(total[:, None] - along**2, 0.0)
    without = bic(left, counts)
    plain = without.argmin(axis=1)
    values = np.concatenate([np.zeros((1, n)), drift])[plain] * along[rows, plain][:, None]
    return Fit(
        change=height * shapes.rise[best],
        points=shapes.points[best],
        is_logistic=best < shapes.n_logistic,
        gain_bic=without[rows, plain] - bic(residual, 4),
        drift=values + curves.mean(axis=1, keepdims=True),
        drift_sd=np.sqrt(left[rows, plain] / np.maximum(n - counts[plain], 1)),
    )


def margin(steps: tuple[int, ...], fitted: Fit, *, noise: float) -> Float[np.ndarray, " curve"]:
    """How far below a drift's BIC a threshold's must be, so that the drift with white noise passes 1 time in
    100.

    BIC alone passes noise more often, because the place of the step is searched for. Each curve's own best
    drift and
    the noise around it are simulated on the same steps with the same fit (500 series, fixed seed). Below 8
    checkpoints
    the noise cannot be measured and is taken to be `noise`.
    """
    rng = np.random.default_rng(20220924)
    draws = rng.standard_normal((SIMULATED, len(steps)))
    few = len(steps) < FEW
    margins = []
    for drift, sd in zip(fitted.drift, fitted.drift_sd, strict=True):
        series = drift + (noise if few else max(sd, 1e-9)) * draws
        gain = fit(steps, series, noise=noise).gain_bic
        margins.append(max(0.0, float(np.quantile(gain, 1 - FALSE_POSITIVE_RATE))))
    return np.array(margins)


def crossing(curves: Float[np.ndarray, "curve n"], threshold: float) -> Float[np.ndarray, " curve"]:
    """Index of the first checkpoint at which a rising curve has crossed `threshold` for good; n where it
    never has.

    Read on the monotone (isotonic least-squares) regression of the curve, so that a single high point is no
    crossing.
    """
    n = curves.shape[1]
    sums = np.concatenate([np.zeros((len(curves), 1)), np.cumsum(curves, axis=1)], axis=1)
    start, stop = np.arange(n)[:, None], np.arange(n)[None, :]
    mean = (sums[:, None, 1:] - sums[:, :-1, None]) / np.maximum(stop - start + 1, 1)
    mean = np.where(stop >= start, mean, np.inf)
    # [curve start i]: the lowest mean over blocks start..k with k >= i; the highest over start <= i is the
    # regression.
    lowest = np.minimum.accumulate(mean[:, :, ::-1], axis=2)[:, :, ::-1]
    monotone = np.where(stop >= start, lowest, -np.inf).max(axis=1)
    above = monotone >= threshold
    return np.where(above.any(axis=1), above.argmax(axis=1), n).astype(np.float64)
