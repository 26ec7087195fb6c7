"""Figures of a report page as JSON: each in its light form, and what the dark form changes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from interp.figures import (
    MODES,
    attention_map,
    loss_by_position,
    offset_profile,
    phase_plot,
    run_comparison,
    score_matrix,
)
from interp.figures.offset_profile import RAW_COST
from interp.figures.score_matrix import score_frames
from interp.figures.step_axis import positions
from interp.records import AttentionMap, CheckpointScores, DetectionReport, HeadScore, by_prefix_matching
from interp.unit_name import readings_of, several_readings, unit_name

SHOWN_SCORES = ("previous_token", "prefix_matching", "copying_edge")
N_PROFILES = 4


@dataclass
class FigureSet:
    """Figures of one page by id, ready to be embedded."""

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, draw: Callable[..., go.Figure], **extra: Any) -> str:
        """Draw in both modes and keep the light JSON and the difference; returns `name`. `extra` goes to the
        script."""
        light, dark = (json.loads(draw(mode=mode).to_json()) for mode in MODES)
        for figure in (light, dark):
            figure["layout"].pop("template", None)
        self.figures[name] = {"figure": light, "dark": difference(light, dark), **extra}
        return name

    def to_script(self) -> str:
        """JSON that is inert inside a script element: no `<` and no line separators in it."""
        text = json.dumps(self.figures, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def difference(light: Any, dark: Any) -> Any:
    """What to write over `light` to get `dark`: nested objects keyed by member or index, whole values at the
    ends.

    Both have the same members and lengths wherever they are containers; anything else is replaced whole.
    None: equal.
    """
    if light == dark:
        return None
    if isinstance(light, dict) and isinstance(dark, dict) and light.keys() == dark.keys():
        pairs = [(key, light[key], dark[key]) for key in light]
    elif isinstance(light, list) and isinstance(dark, list) and len(light) == len(dark):
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(light, dark, strict=True))]
    else:
        return {"=": dark}
    return {key: difference(old, new) for key, old, new in pairs if old != new}


def phase(figures: FigureSet, report: DetectionReport, name: str) -> str:
    """The phase plot; the script moves a cursor over it."""
    steps = [checkpoint.step for checkpoint in report.checkpoints]
    places = {str(step): float(place) for step, place in zip(steps, positions(steps), strict=True)}
    return figures.add(
        name,
        lambda mode: phase_plot(report.checkpoints, transition=report.phase_transition, mode=mode),
        places=places,
        role="phase",
    )


def matrices(figures: FigureSet, report: DetectionReport, prefix: str) -> dict[str, list[tuple[str, str]]]:
    """(score, id) of the score matrices by reading."""
    heads = report.checkpoints[-1].heads
    placed: dict[str, list[tuple[str, str]]] = {}
    for reading in readings_of(heads):
        units = [head for head in heads if head.reading == reading]
        # Where edges were cut, the copying of those edges is what decides.
        shown = [*SHOWN_SCORES[:-1], "copying_offset"] if _cut(units) else SHOWN_SCORES
        there = [score for score in shown if any(getattr(head, score) is not None for head in units)]
        if _cut(units):
            there.append("offset_effect_nats")
        for score in there:
            name, options = f"{prefix}-{reading}-{score}", {"score": score, "reading": reading}
            placed.setdefault(reading, []).append(
                (score, _matrix(figures, report.checkpoints, name, options))
            )
    return placed


def _cut(units: Sequence[HeadScore]) -> bool:
    return any(head.offset_effect_nats is not None for head in units)


def _matrix(
    figures: FigureSet, checkpoints: Sequence[CheckpointScores], name: str, options: dict[str, str]
) -> str:
    """A score matrix of the last checkpoint; what changes at the others goes to the script, in both modes."""
    light, dark = (score_frames(checkpoints, mode=mode, **options) for mode in MODES)
    frames = {"frames": light, "dark_frames": difference(light, dark)}
    draw = _bound(score_matrix, checkpoints, slider=False, **options)
    return figures.add(name, draw, role="matrix", **frames)


def _bound(draw: Callable[..., go.Figure], *arguments: Any, **options: Any) -> Callable[..., go.Figure]:
    return lambda mode: draw(*arguments, mode=mode, **options)


def maps(figures: FigureSet, report: DetectionReport, prefix: str) -> list[tuple[str, AttentionMap]]:
    """Ids and records of the attention maps."""
    placed = []
    for index, picture in enumerate(report.attention_maps):
        matrix = np.round(np.asarray(picture.matrix, dtype=np.float64), 5)
        quantity = {"none": "weight", "abs_row": "share of |weight|"}.get(
            picture.normalisation, "share of contribution"
        )
        draw = _bound(attention_map, matrix, picture.tokens, quantity=quantity)
        placed.append((figures.add(f"{prefix}-{index}", draw, role="map"), picture))
    return placed


def losses(figures: FigureSet, report: DetectionReport, name: str) -> str | None:
    """Loss by position of the checkpoints that have it; None where none has."""
    rows = [checkpoint for checkpoint in report.checkpoints if checkpoint.loss_by_position_nats]
    if not rows:
        return None
    values, steps = (
        [checkpoint.loss_by_position_nats for checkpoint in rows],
        [checkpoint.step for checkpoint in rows],
    )
    return figures.add(name, _bound(loss_by_position, values, steps, positions=rows[-1].icl_positions))


def offsets(figures: FigureSet, report: DetectionReport, name: str) -> str | None:
    """Weight by offset of the units of highest prefix matching; None where it was not measured."""
    heads = report.checkpoints[-1].heads
    found = [head for head in by_prefix_matching(heads)[:N_PROFILES] if head.weight_by_offset]
    if not found:
        return None
    with_reading = several_readings(heads)
    profiles = {unit_name(head, with_reading=with_reading): head.weight_by_offset for head in found}
    chance = float(np.mean([head.prefix_matching_chance for head in found]))
    draw = _bound(offset_profile, profiles, controls={"chance": chance}, quantity="attention weight")
    return figures.add(name, draw)


def cuts(figures: FigureSet, report: DetectionReport, name: str) -> str | None:
    """Cost of cutting a unit's edges by offset, of the units whose cut costs most; None where none was
    cut."""
    heads = [head for head in report.checkpoints[-1].heads if head.cut_by_offset_nats]
    if not heads:
        return None
    found = sorted(heads, key=lambda head: -(head.offset_effect_nats or 0))[:N_PROFILES]
    profiles = {unit_name(head): head.cut_by_offset_nats for head in found}
    control = float(np.mean([head.offset_control_nats for head in found]))
    options = {"first_offset": found[0].cut_first_offset, "controls": {"random edges": control}}
    draw = _bound(offset_profile, profiles, quantity=RAW_COST, **options)
    return figures.add(name, draw)


def comparisons(figures: FigureSet, reports: dict[str, DetectionReport]) -> list[str]:
    """Ids of the figures that put several runs on one axis: prefix matching of the unit that has
    most of it, order gain, in-context learning."""
    series = {name: report for name, report in reports.items() if len(report.checkpoints) > 1}
    placed = []
    for key, quantity in (
        ("prefix_matching", "prefix matching, highest unit"),
        ("order_gain", "order gain (nats)"),
        ("in_context_learning", "ICL score (nats)"),
    ):
        curves = {name: _curve(report, key) for name, report in series.items()}
        curves = {name: curve for name, curve in curves.items() if len(curve[0]) > 1}
        if not curves:
            continue
        middles = {
            name: ((series[name].phase_transition or {}).get(key) or {}).get("midpoint_step")
            for name in curves
        }
        y_range = (-0.03, 1.04) if key == "prefix_matching" and _within_one(curves) else None
        draw = _bound(run_comparison, curves, quantity=quantity, midpoints=middles, y_range=y_range)
        placed.append(figures.add(f"runs-{key}", draw))
    return placed


def _within_one(curves: dict[str, tuple[list[int], list[float]]]) -> bool:
    return all(-0.03 <= value <= 1.04 for _, values in curves.values() for value in values)


def _curve(report: DetectionReport, key: str) -> tuple[list[int], list[float]]:
    """Steps and values; prefix matching is that of the unit that has most of it at the last
    checkpoint, followed back."""
    if key != "prefix_matching":
        # As in the phase plot, whose midpoints these curves share.
        windows = [c.in_context_learning_window_nats for c in report.checkpoints]
        if key == "in_context_learning" and None not in windows:
            key = "in_context_learning_window"
        rows = [(c.step, getattr(c, f"{key}_nats")) for c in report.checkpoints]
        rows = [(step, value) for step, value in rows if value is not None]
        return [step for step, _ in rows], [value for _, value in rows]
    best = by_prefix_matching(report.checkpoints[-1].heads)
    if not best:
        return [], []
    same = (best[0].layer, best[0].head, best[0].unit, best[0].reading)
    rows = [
        (checkpoint.step, head.prefix_matching)
        for checkpoint in report.checkpoints
        for head in checkpoint.heads
        if (head.layer, head.head, head.unit, head.reading) == same
    ]
    return [step for step, _ in rows], [value for _, value in rows]
