"""What steering did, in a notebook."""

import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.figures.effect_bars import effect_bars
from interp.offset_cuts import mean, standard_error
from interp.report_text import signed
from interp.steering import SteeringEffect

KINDS = {"repeat": "at repeats", "ordinary": "elsewhere"}


def words(effect: SteeringEffect) -> list[str]:
    """Both changes."""
    parts = []
    for which, text in KINDS.items():
        change, error = effect.change(which)
        parts.append(f"{text} {signed(change, 3)} ± {signed(error, 3)}")
    return [f"Loss change under steering ({effect.form.value}), nats: {', '.join(parts)}."]


def shown(effect: SteeringEffect) -> pd.DataFrame:
    """Losses with and without."""
    rows = [
        {
            "positions": KINDS[row["positions"]],
            "loss (nats)": row["loss_nats"],
            "steered": row["steered_nats"],
        }
        | {"change": row["change_nats"], "standard error": row["change_se_nats"]}
        for row in to_pandas(effect).to_dict("records")
    ]
    return first_rows(rows, len(rows))


def to_pandas(effect: SteeringEffect) -> pd.DataFrame:
    """One row for each kind of position."""
    found = effect.to_dict()
    return pd.DataFrame(
        [
            {
                "positions": which,
                "loss_nats": found[f"{which}_loss_nats"],
                "steered_nats": found[f"{which}_loss_steered_nats"],
            }
            | {
                "change_nats": found[f"{which}_change_nats"],
                "change_se_nats": found[f"{which}_change_se_nats"],
            }
            for which in KINDS
        ]
    )


def figure(effect: SteeringEffect, mode: str) -> go.Figure:
    """The four losses as bars."""
    values = {}
    for which, text in KINDS.items():
        for steered in ("", "_steered"):
            losses = getattr(effect, which + steered)
            values[f"{text}{', steered' if steered else ''}"] = (
                float(mean(losses)),
                float(standard_error(losses)),
            )
    bars, errors = ({name: pair[k] for name, pair in values.items()} for k in (0, 1))
    return effect_bars(bars, errors=errors, quantity="loss (nats)", mode=mode)
