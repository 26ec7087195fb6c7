"""Composition scores in a notebook."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from interp.composition import CompositionScores
from interp.display.page import first_rows
from interp.figures import composition_graph
from interp.report_text import signed

N_STD, N_PAIRS = 5.0, 12


def words(scores: CompositionScores) -> list[str]:
    """How many pairs compose, and which most."""
    found, n = scores.above_null(N_STD), len(_pairs(scores))
    above = f"{len(found)} of {n} pairs above both nulls by {N_STD:g} standard deviations"
    text = f"{scores.kind.upper()}-composition: {above}"
    if not found:
        return [text + "."]
    sender, receiver, score = found[0]
    return [f"{text}; strongest {_name(sender)} to {_name(receiver)}, {signed(score, 3)}."]


def _name(head: tuple[int, int]) -> str:
    return f"L{head[0]}H{head[1]}"


def _pairs(scores: CompositionScores) -> list[dict[str, Any]]:
    excess, found = scores.excess, []
    for a, b in (~scores.scores.isnan()).nonzero().tolist():
        values = {name: float(getattr(scores, name)[a, b]) for name in ("scores", *_NULLS)}
        above = float(excess[a, b])
        found.append(
            {"kind": scores.kind, "sender": scores.heads[a], "receiver": scores.heads[b]}
            | {"score": values.pop("scores"), **values, "excess": above, "above_null": above > N_STD}
        )
    return sorted(found, key=lambda pair: -pair["excess"])


_NULLS = ("gaussian_mean", "gaussian_std", "spectrum_mean", "spectrum_std")


def shown(scores: CompositionScores) -> pd.DataFrame:
    """The pairs furthest above their null."""
    rows = [
        {"sender": _name(pair["sender"]), "receiver": _name(pair["receiver"]), "score": pair["score"]}
        | {
            "null": max(pair["gaussian_mean"], pair["spectrum_mean"]),
            "standard deviations above": pair["excess"],
        }
        for pair in _pairs(scores)
    ]
    return first_rows(rows, N_PAIRS)


def to_pandas(scores: CompositionScores) -> pd.DataFrame:
    """One row for each pair of an earlier and a later unit."""
    rows = []
    for pair in _pairs(scores):
        sender, receiver = pair.pop("sender"), pair.pop("receiver")
        ends = {"sender_layer": sender[0], "sender_head": sender[1]}
        ends |= {"receiver_layer": receiver[0], "receiver_head": receiver[1]}
        rows.append({"kind": pair.pop("kind"), **ends, **pair})
    return pd.DataFrame(rows)


def figure(scores: CompositionScores, mode: str) -> go.Figure | None:
    """The graph of pairs above the null, where there are any."""
    if not scores.above_null(N_STD):
        return None
    return composition_graph(scores, n_std=N_STD, mode=mode)
