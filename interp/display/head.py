"""One unit's scores in a notebook."""

import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.figures import offset_profile
from interp.figures.unit_name import unit_name
from interp.records import HeadScore, to_plain
from interp.report_text import signed

_LONG = ("weight_by_offset", "cut_by_offset_nats")


def words(head: HeadScore) -> list[str]:
    """What it is, and on what ground."""
    kind = "an induction head" if head.is_induction else "no induction head"
    effect = head.offset_effect_nats
    cost = "" if effect is None else f", cutting its edges there costs {signed(effect, 2)} nats"
    return [
        f"{unit_name(head, with_reading=True)}: {kind} by the {head.decided_by} test; prefix matching "
        f"{signed(head.prefix_matching)} (chance {signed(head.prefix_matching_chance)}), strongest offset "
        f"{head.offset:+d}{cost}."
    ]


def shown(head: HeadScore) -> pd.DataFrame:
    """Every score and its value."""
    values = {name: value for name, value in to_plain(head).items() if name not in _LONG}
    return first_rows([{"score": name, "value": value} for name, value in values.items()], len(values))


def to_pandas(head: HeadScore) -> pd.DataFrame:
    """One row, every field."""
    return pd.DataFrame([to_plain(head)])


def figure(head: HeadScore, mode: str) -> go.Figure | None:
    """Cost of cuts by offset where measured, else weight by offset."""
    name = unit_name(head, with_reading=True)
    if head.cut_by_offset_nats:
        control = head.offset_control_nats
        return offset_profile(
            {name: head.cut_by_offset_nats},
            first_offset=head.cut_first_offset,
            controls={} if control is None else {"random edges": control},
            quantity="cost of the cut (nats)",
            mode=mode,
        )
    if not head.weight_by_offset:
        return None
    return offset_profile({name: head.weight_by_offset}, quantity="attention weight", mode=mode)
