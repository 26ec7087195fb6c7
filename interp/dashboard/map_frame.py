"""The attention map as plain data: drawn once for a prompt, then filled with one unit's weights.

Building a figure takes plotly some 40 ms, and all of it but the weights stays the same from head to head and
from checkpoint to checkpoint. `views.attention_view` is the specification: both give the same figure.
"""

import base64
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from interp.dashboard import views
from interp.dashboard.prompt import Prompt
from interp.dashboard.sheet import Sheet
from interp.figures.attention_map import MOST_LABELS, negative_signs
from interp.figures.downsample import block_extremes, causal_blank

# Prompts, modes and sizes whose frames are kept: about 100 kB each.
MOST_FRAMES = 64


def filled_map(
    sheet: Sheet, unit: int, *, targets: bool = True, limit: float, side: int = 560, mode: str = "light"
) -> dict[str, Any]:
    """The figure of `views.attention_view` with these arguments, as the browser takes it."""
    signed = views.is_signed(sheet)
    tokens = sheet.prompt.tokens
    # Long prompts are labelled by position: one frame does for all of a length, but for names and outlines.
    named = len(tokens) > MOST_LABELS
    frame = _frame(("",) * len(tokens) if named else tokens, sheet.quantity, signed, targets, side, mode)
    z = causal_blank(block_extremes(sheet.of(unit), most=views.MOST_CELLS)[0])
    cells, outlines = frame["data"]
    ends = [-limit, 0, limit] if signed else [0, limit / 2, limit]
    marks = {"text": negative_signs(z, limit)} if "text" in cells else {}
    cells = {
        **cells,
        **marks,
        "z": typed_array(z),
        "zmin": float(ends[0]),
        "zmax": limit,
        "colorbar": {**cells["colorbar"], "tickvals": ends, "ticktext": [_number(end) for end in ends]},
    }
    layout = {**frame["layout"], "uirevision": views.revision(sheet, unit)}
    if named:
        names = _names(tokens, len(z))
        layout |= {axis: {**layout[axis], "ticktext": names} for axis in ("xaxis", "yaxis")}
        if targets and len(tokens) <= views.MOST_CELLS:
            outlines = {**outlines, **_outlines(tokens)}
    return {"data": [cells, outlines], "layout": layout}


def typed_array(values: Float[np.ndarray, "*axes"]) -> dict[str, str]:
    """Numbers as plotly.js reads them from base64."""
    packed = np.ascontiguousarray(values, dtype="<f4")
    shape = {"shape": ", ".join(str(n) for n in packed.shape)} if packed.ndim > 1 else {}
    return {"dtype": "f4", "bdata": base64.b64encode(packed).decode("ascii"), **shape}


@lru_cache(maxsize=MOST_FRAMES)
def _names(tokens: tuple[str | bytes, ...], n_cells: int) -> list[str]:
    """What hover says of each row and column: the token in the middle of the cell, and its position."""
    block = -(-len(tokens) // n_cells)
    return views.cell_names(tokens, np.arange(n_cells) * block + (block - 1) / 2)


@lru_cache(maxsize=MOST_FRAMES)
def _outlines(tokens: tuple[str | bytes, ...]) -> dict[str, Any]:
    x, y = views.outlines(tokens)
    return {"x": typed_array(x), "y": typed_array(y)} if len(x) else {"x": [], "y": []}


@lru_cache(maxsize=MOST_FRAMES)
def _frame(
    tokens: tuple[str | bytes, ...], quantity: str, signed: bool, targets: bool, side: int, mode: str
) -> dict[str, Any]:
    """The map of these tokens on any weights of this kind. Shared between threads: nothing writes to it."""
    weights = np.zeros((1, len(tokens), len(tokens)), dtype=np.float32)
    weights[0, -1, 0] = -1.0 if signed else 1.0
    sheet = Sheet(
        prompt=Prompt(ids=(0,) * len(tokens), tokens=tokens),
        layer=0,
        mixer="",
        reading="",
        unit="head",
        values="scored",
        weights=weights,
        quantity=quantity,
        signed_possible=False,
    )
    figure = views.attention_view(sheet, 0, targets=targets, side=side, mode=mode)
    return figure.to_plotly_json()


def _number(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")
