"""One unit's scores in a notebook."""

import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.figures import offset_profile
from interp.figures.offset_profile import RAW_COST
from interp.records import HeadScore, to_plain
from interp.report_text import signed
from interp.unit_name import unit_name

SHOWN = (
    *("prefix_matching", "prefix_matching_chance", "previous_token", "previous_token_chance"),
    *("copying", "copying_edge", "copying_eigenvalue", "offset", "offset_effect_nats", "copying_offset"),
    *("offset_effect_se_nats", "offset_control_nats", "is_induction", "decided_by"),
)


def words(head: HeadScore) -> list[str]:
    """What it is, and on what ground."""
    kind = "an induction head" if head.is_induction else "no induction head"
    effect = head.offset_effect_nats
    cost = " by weight" if effect is None else f", cutting its edges there costs {signed(effect, 2)} nats"
    return [
        f"{unit_name(head, with_reading=True)}: {kind} by the {head.decided_by} test; prefix matching "
        f"{signed(head.prefix_matching)} (chance {signed(head.prefix_matching_chance)}), strongest offset "
        f"{head.offset:+d}{cost}."
    ]


def shown(head: HeadScore) -> pd.DataFrame:
    """The scores that matter most."""
    rows = [{"score": name.replace("_", " "), "value": getattr(head, name)} for name in SHOWN]
    return first_rows(rows, len(rows))


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
            quantity=RAW_COST,
            mode=mode,
        )
    if not head.weight_by_offset:
        return None
    return offset_profile({name: head.weight_by_offset}, quantity="attention weight", mode=mode)
