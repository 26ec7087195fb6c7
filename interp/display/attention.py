"""One attention map in a notebook."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from interp.display.page import first_rows
from interp.figures import attention_map
from interp.records import AttentionMap
from interp.unit_name import unit_name

N_EDGES = 8


def words(picture: AttentionMap) -> list[str]:
    """Whose map it is."""
    return [
        f"{unit_name(picture, with_reading=True)} at step {picture.step:,}, {len(picture.tokens)} tokens, "
        f"normalisation {picture.normalisation}."
    ]


def shown(picture: AttentionMap) -> pd.DataFrame:
    """Its largest weights."""
    edges = to_pandas(picture)
    order = edges["weight"].abs().sort_values(ascending=False).index
    return first_rows(edges.loc[order].to_dict("records"), N_EDGES)


def to_pandas(picture: AttentionMap) -> pd.DataFrame:
    """One row for each edge from a destination to a source at or before it."""
    weights = np.asarray(picture.matrix, dtype=np.float64)
    dest, src = np.tril_indices(len(weights))
    # Objects: a text column would refuse halves of surrogate pairs.
    tokens = pd.Series(list(picture.tokens), dtype=object)
    read_by, read = (tokens.iloc[at].reset_index(drop=True) for at in (dest, src))
    columns = {"dest": dest, "dest_token": read_by, "src": src, "src_token": read}
    return pd.DataFrame({**columns, "weight": weights[dest, src]})


def figure(picture: AttentionMap, mode: str) -> go.Figure:
    """The map."""
    return attention_map(picture.matrix, picture.tokens, mode=mode)
