"""The maps of a layer's units in a notebook: their shapes and sizes."""

import pandas as pd
import plotly.graph_objects as go

from interp.circuits import UnitWeights
from interp.display.page import first_rows


def words(unit: UnitWeights) -> list[str]:
    """How many units, how wide, and what stands in for what."""
    n, d_model, d_k = unit.W_Q.shape
    return [
        f"{n} units; keys {d_k}, values {unit.W_V.shape[2]} of d_model {d_model} wide; {unit.approximation}."
    ]


def shown(unit: UnitWeights) -> pd.DataFrame:
    """Sizes of the circuits by unit."""
    table = to_pandas(unit)
    return first_rows(table.to_dict("records"), 16)


def to_pandas(unit: UnitWeights) -> pd.DataFrame:
    """Frobenius norms of the QK and OV circuits, W_Q W_K^T and W_V W_O, by unit."""
    qk = (unit.W_Q @ unit.W_K.mT).detach().flatten(1).norm(dim=1).tolist()
    ov = (unit.W_V @ unit.W_O).detach().flatten(1).norm(dim=1).tolist()
    return pd.DataFrame({"unit": range(len(qk)), "qk_norm": qk, "ov_norm": ov})


def figure(unit: UnitWeights, mode: str) -> go.Figure | None:
    """None: matrices of weights are read through `ov_circuit` and `qk_circuit`."""
    return None
