"""Causal offset profiles in a notebook: what cutting the edges at each offset costs."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.figures import offset_profile
from interp.figures.offset_profile import RAW_COST
from interp.offset_cuts import LayerProfile, OffsetProfile, mean, standard_error
from interp.report_text import signed

N_ROWS, N_DRAWN = 16, 4
Row = tuple[LayerProfile, int]


def _rows(profile: OffsetProfile | LayerProfile) -> list[Row]:
    """Rows of every layer that have an offset of at least 1, the dearest cut first."""
    layers = profile.layers if isinstance(profile, OffsetProfile) else (profile,)
    rows = [(layer, row) for layer in layers if max(layer.offsets) >= 1 for row in range(len(layer.units))]
    return sorted(rows, key=lambda pair: -pair[0].effect(pair[1])[0])


def _name(layer: LayerProfile, row: int) -> str:
    unit = layer.units[row]
    letter = {"head": "H", "state": "S", "cluster": "C"}.get(layer.unit)
    return f"L{layer.layer}" if unit is None or letter is None else f"L{layer.layer}{letter}{unit}"


def words(profile: OffsetProfile | LayerProfile) -> list[str]:
    """The dearest cut, and on how many edges and positions it rests."""
    rows = _rows(profile)
    if not rows:
        return ["No offset of at least 1 was cut."]
    layer, row = rows[0]
    effect, error = layer.effect(row)
    found = [
        f"The dearest cut: {_name(layer, row)} ({layer.mixer}, {layer.reading}) at offset "
        f"{layer.best(row):+d} from the earlier copy, {signed(effect, 3)} ± {signed(error, 3)} nats above "
        "random edges."
    ]
    if isinstance(profile, OffsetProfile):
        found.append(
            f"Loss uncut {signed(float(mean(profile.loss)), 3)} nats, {profile.n_scored:,} positions."
        )
    return found


def shown(profile: OffsetProfile | LayerProfile) -> pd.DataFrame:
    """Each row's strongest offset and its cost."""
    found = []
    for layer, row in _rows(profile):
        effect, error = layer.effect(row)
        found.append(
            {"unit": _name(layer, row), "mixer": layer.mixer, "reading": layer.reading}
            | {"offset": f"{layer.best(row):+d}", "above random (nats)": effect, "standard error": error}
            | {"random (nats)": None if layer.random is None else float(mean(layer.random[row]))}
        )
    return first_rows(found, N_ROWS)


def to_pandas(profile: OffsetProfile | LayerProfile) -> pd.DataFrame:
    """One row for each layer, unit (missing: the whole layer) and offset; means over sequences, nats."""
    layers = profile.layers if isinstance(profile, OffsetProfile) else (profile,)
    return pd.DataFrame([line for layer in layers for line in _lines(layer)])


def _lines(layer: LayerProfile) -> list[dict[str, Any]]:
    found = []
    for row, unit in enumerate(layer.units):
        random = None if layer.random is None else float(mean(layer.random[row]))
        for k, offset in enumerate(layer.offsets):
            cut = layer.cut[row, k]
            again = None if layer.renormalised is None else float(mean(layer.renormalised[row, k]))
            found.append(
                {"layer": layer.layer, "unit": unit, "mixer": layer.mixer, "reading": layer.reading}
                | {"offset": offset, "cut_nats": float(mean(cut)), "cut_se_nats": float(standard_error(cut))}
                | {"random_nats": random, "renormalised_nats": again}
            )
    return found


def figure(profile: OffsetProfile | LayerProfile, mode: str) -> go.Figure | None:
    """Cost by offset of the rows whose cuts are dearest."""
    rows = _rows(profile)[:N_DRAWN]
    if not rows:
        return None
    found = {_name(layer, row): mean(layer.cut[row]).tolist() for layer, row in rows}
    random = [float(mean(layer.random[row])) for layer, row in rows if layer.random is not None]
    controls = {"random edges": sum(random) / len(random)} if random else None
    options = {"offsets": rows[0][0].offsets, "controls": controls, "mode": mode}
    return offset_profile(found, quantity=RAW_COST, **options)
