"""Phase transitions in a notebook: when each curve changed."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.phase_transition import MIN_CHANGE, PhaseTransition
from interp.records import begins_below_chance
from interp.report_text import CURVES, below_chance_sentence, lead_sentence, steps_between
from interp.transition import Transition


def _curves(found: PhaseTransition | Transition) -> dict[str, Transition | None]:
    if isinstance(found, Transition):
        return {"curve": found}
    return {name: getattr(found, name) for name in MIN_CHANGE}


def words(found: PhaseTransition | Transition) -> list[str]:
    """Onsets, and the lead."""
    sentences = []
    for name, curve in _curves(found).items():
        text = CURVES.get(name, "the curve")
        text = text[0].upper() + text[1:]
        if curve is None:
            sentences.append(f"{text} has no transition.")
            continue
        if begins_below_chance(curve.to_dict()):
            sentences.append(below_chance_sentence(curve.to_dict()))
            continue
        between = steps_between(curve.onset_step)
        sentences.append(f"{text} sets in between {between}, midpoint {curve.midpoint_step:,.0f}.")
    if isinstance(found, PhaseTransition) and found.lead_steps is not None:
        sentences.append(lead_sentence(found.to_dict()))
    return sentences


def shown(found: PhaseTransition | Transition) -> pd.DataFrame:
    """Onset, midpoint, width and change of each curve that has a transition; chance is prefix matching's."""
    rows = []
    for name, curve in _curves(found).items():
        if curve is None:
            continue
        (low, high), above = curve.onset_step, curve.above_chance_from_step
        rows.append(
            {
                "curve": name.replace("_", " "),
                "onset between": f"{low:,.0f}–{high:,.0f}",
                "95%": _between(curve.onset_interval),
                "above chance from": "–" if above is None else above,
            }
            | {"midpoint": round(curve.midpoint_step), "width 10–90%": round(curve.width_10_90_steps)}
            | {"change": curve.change, "support": "–" if curve.support is None else f"{curve.support:.0%}"}
        )
    return first_rows(rows, len(MIN_CHANGE))


def _between(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:,.0f}–{interval[1]:,.0f}"


def to_pandas(found: PhaseTransition | Transition) -> pd.DataFrame:
    """One row a curve, intervals in two columns each."""
    rows = []
    for name, curve in _curves(found).items():
        row: dict[str, Any] = {"curve": name, "is_transition": curve is not None}
        for key, value in ({} if curve is None else curve.to_dict()).items():
            pair = isinstance(value, list)
            row |= {f"{key}_low": value[0], f"{key}_high": value[1]} if pair else {key: value}
        rows.append(row)
    return pd.DataFrame(rows)


def figure(found: PhaseTransition | Transition, mode: str) -> go.Figure | None:
    """None: the curves themselves are in the report, whose phase plot shades these onsets."""
    return None
