"""Patching results in a notebook: how far each site takes the metric to the other run's."""

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.figures.effect_bars import MOST_BARS, effect_bars
from interp.figures.effect_matrix import effect_matrix
from interp.patching import PatchingResult
from interp.report_text import signed

N_SITES = 12
QUANTITY = "share recovered"


def _recovered(result: PatchingResult) -> list[float]:
    """One number a site: the mean over whatever axes the metric has."""
    return (
        result.recovered.double().flatten(1).mean(1).tolist()
        if result.values.ndim > 1
        else result.recovered.tolist()
    )


def words(result: PatchingResult) -> list[str]:
    """The site that recovers most."""
    shares = _recovered(result)
    finite = [k for k in range(len(shares)) if math.isfinite(shares[k])]
    base, source = float(result.base.double().mean()), float(result.source.double().mean())
    text = (
        f"{len(shares)} sites patched; the metric is {signed(base, 3)} in the base run and "
        f"{signed(source, 3)} in the source run."
    )
    if not finite:
        return [f"{text} The two are equal, so that there is no share to recover."]
    best = max(finite, key=shares.__getitem__)
    return [f"{text} {result.sites[best].label} recovers most: {signed(shares[best], 3)}."]


def shown(result: PatchingResult) -> pd.DataFrame:
    """The sites that recover most, either way."""
    rows = [
        {"site": s.label, QUANTITY: share} for s, share in zip(result.sites, _recovered(result), strict=True)
    ]
    return first_rows(sorted(rows, key=lambda row: -abs(row[QUANTITY])), N_SITES)


def to_pandas(result: PatchingResult) -> pd.DataFrame:
    """One row a site; metrics with axes of their own as means over these."""
    values = result.values.double().reshape(len(result.sites), -1).mean(1).tolist()
    return pd.DataFrame(
        [
            {"kind": site.kind, "layer": site.layer, "head": site.head, "positions": site.positions}
            | {"channels": site.channels, "lag": site.lag, "value": value, "recovered": share}
            for site, value, share in zip(result.sites, values, _recovered(result), strict=True)
        ]
    )


def figure(result: PatchingResult, mode: str) -> go.Figure | None:
    """Layer by head or by position where the sites are such a grid; else bars by site, if few enough."""
    shares = _recovered(result)
    for named, column in (("head", lambda s: s.head), ("position", _position)):
        places = [(site.layer, column(site)) for site in result.sites]
        if _is_grid(result, places, named):
            return effect_matrix(
                dict(zip(places, shares, strict=True)), columns=named, quantity=QUANTITY, mode=mode
            )
    if len(shares) > MOST_BARS:
        return None
    bars = {site.label: share for site, share in zip(result.sites, shares, strict=True)}
    return effect_bars(bars, quantity=QUANTITY, mode=mode) if len(bars) == len(shares) else None


def _position(site: Any) -> int | None:
    return site.positions[0] if site.positions is not None and len(site.positions) == 1 else None


def _is_grid(result: PatchingResult, places: list[tuple[int, int | None]], named: str) -> bool:
    """One kind of site, each place once, several columns, and nothing else that tells sites apart."""
    alike = {
        (s.kind, s.channels, s.lag, s.head if named == "position" else s.positions) for s in result.sites
    }
    columns = {column for _, column in places}
    return len(alike) == 1 and None not in columns and len(columns) > 1 and len(set(places)) == len(places)
