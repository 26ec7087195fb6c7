"""The scores of one checkpoint, or of one unit of it, in a notebook."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.figures import score_matrix
from interp.records import CheckpointScores, HeadScore, by_prefix_matching, to_plain
from interp.report_text import signed
from interp.unit_name import readings_of, several_readings, unit_name

N_UNITS = 12


def words(scores: CheckpointScores) -> list[str]:
    """What the checkpoint's losses say."""
    losses = {
        "loss": scores.loss_nats,
        "order gain": scores.order_gain_nats,
        "in-context learning": scores.in_context_learning_nats,
    }
    there = [f"{name} {signed(value, 3)} nats" for name, value in losses.items() if value is not None]
    return [f"Step {scores.step:,}: {', '.join([f'{len(scores.heads)} scored units', *there])}."]


def shown(scores: CheckpointScores) -> pd.DataFrame:
    """Its units, highest prefix matching first."""
    heads = by_prefix_matching(scores.heads)
    with_reading = several_readings(heads)
    return first_rows([unit_row(head, with_reading) for head in heads], N_UNITS)


def unit_row(head: HeadScore, with_reading: bool) -> dict[str, Any]:
    """The scores that matter most, under the names of the report."""
    return {
        "unit": unit_name(head, with_reading=with_reading),
        "prefix matching": head.prefix_matching,
        "chance": head.prefix_matching_chance,
        "previous token": head.previous_token,
        "copying at +1": head.copying_edge,
        "offset": f"{head.offset:+d}",
        "cut − random (nats)": head.offset_effect_nats,
        "copying at offset": head.copying_offset,
        "induction": head.is_induction,
    }


def to_pandas(scores: CheckpointScores) -> pd.DataFrame:
    """One row a unit and reading, every field."""
    return pd.DataFrame([{"step": scores.step, **to_plain(head)} for head in scores.heads])


def figure(scores: CheckpointScores, mode: str) -> go.Figure | None:
    """Prefix matching by layer and head, under the reading that comes last (`block` where there is one)."""
    if not scores.heads:
        return None
    return score_matrix([scores], reading=readings_of(scores.heads)[-1], mode=mode)
