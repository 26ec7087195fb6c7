"""Large maps drawn as block extremes, and the note that says so."""

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from interp.figures.theme import Theme

# Largest side drawn cell by cell.
MOST_CELLS = 256


def block_extremes(
    weights: Float[np.ndarray, "dest src"], *, most: int = MOST_CELLS
) -> tuple[Float[np.ndarray, "row column"], int]:
    """Weights as they are up to `most` a side, else the entry of largest absolute value of each block.

    Returns:
        The weights to draw, and the side of a block in positions (1: nothing was joined). An extreme keeps
        single edges of a long sequence visible, which a mean would wash out.
    """
    block = max(1, -(-len(weights) // most))
    if block == 1:
        return weights, 1
    side = -(-len(weights) // block)
    padded = np.zeros((side * block, side * block), dtype=weights.dtype)
    padded[: len(weights), : len(weights)] = weights
    tiles = padded.reshape(side, block, side, block).transpose(0, 2, 1, 3).reshape(side, side, -1)
    largest = np.abs(tiles).argmax(axis=-1)
    return np.take_along_axis(tiles, largest[..., None], axis=-1)[..., 0], block


def causal_blank(weights: Float[np.ndarray, "dest src"]) -> Float[np.ndarray, "dest src"]:
    """The weights with zeros above the diagonal as NaN, which a heatmap leaves blank."""
    above = np.triu(np.ones_like(weights, dtype=bool), k=1)
    return np.where(above & (weights == 0), np.nan, weights)


def block_note(block: int) -> str | None:
    """What a figure has to say about its cells; None where nothing was joined."""
    if block == 1:
        return None
    return f"each cell: the weight of largest size among {block} × {block} positions"


def add_note(figure: go.Figure, text: str | None, theme: Theme) -> go.Figure:
    """A line of small print above the plot, at its right end; nothing for None."""
    if text is not None:
        figure.add_annotation(
            text=text,
            x=1,
            y=1,
            xref="paper",
            yref="paper",
            xanchor="right",
            yanchor="bottom",
            yshift=3,
            showarrow=False,
            font={"size": 11, "color": theme.muted},
        )
    return figure
