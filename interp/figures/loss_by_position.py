"""Loss at every position of the sequence, one line a checkpoint, early ones pale."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from interp.figures.direct_label import label_ends, room_for
from interp.figures.given import checked_count, last_value, with_gaps
from interp.figures.step_axis import short
from interp.figures.theme import style, theme_of

MOST_LINES = 9


def loss_by_position(
    losses: Sequence[Sequence[float]] | np.ndarray,
    steps: Sequence[int],
    *,
    positions: tuple[int, int] | None = None,
    n_lines: int = MOST_LINES,
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Mean loss by position for some checkpoints of a series.

    Args:
        losses: [checkpoint position] nats; position p is the loss on predicting token p + 1. NaN is a gap.
        steps: [checkpoint].
        positions: (late, early) of the in-context-learning score, marked.
        n_lines: At most this many checkpoints, spread evenly over the series with its first and last.
        mode: `light` or `dark`.
        title: Of the figure.

    Raises:
        ValueError: losses and steps differ in number, or there is none; an infinite loss; a line of gaps
            alone; `n_lines` below 1.
    """
    if len(losses) != len(steps) or not len(steps):
        raise ValueError(
            f"{len(losses)} rows of losses for {len(steps)} steps; accepted: the same number, at least 1"
        )
    theme = theme_of(mode)
    n_drawn = min(checked_count(n_lines, "n_lines"), len(steps))
    chosen = sorted({round(i) for i in np.linspace(0, len(steps) - 1, n_drawn)})
    drawn = {index: with_gaps(losses[index], "losses") for index in chosen}
    figure, labels = go.Figure(), []
    for rank, index in enumerate(chosen):
        share = 1.0 if len(chosen) == 1 else rank / (len(chosen) - 1)
        colour = theme.sequential[2 + round(share * (len(theme.sequential) - 4))]
        values = drawn[index]
        last = rank == len(chosen) - 1
        figure.add_scatter(
            x=np.arange(len(values)),
            y=values,
            mode="lines",
            line={"color": colour, "width": 2.4 if last else 1.5},
            name=f"step {steps[index]:,}",
            hovertemplate=f"step {steps[index]:,}<br>position %{{x}}<br>%{{y:.3f}} nats<extra></extra>",
        )
        last_one, end = last_value(values), values[-max(1, len(values) // 16) :]
        tail = float(end.mean()) if np.isfinite(end).all() else last_one
        labels.append((f"step {short(steps[index])}", tail, theme.ink if last else theme.muted))
    style(figure, theme, title=title, height=340)
    n = max(len(row) for row in losses)
    every = np.concatenate([values[np.isfinite(values)] for values in drawn.values()])
    margin = 0.05 * float(np.ptp(every) or 1.0)
    y_range = (float(every.min()) - margin, float(every.max()) + margin)
    figure.update_xaxes(range=[-0.01 * n, 1.01 * n], title_text="position", showgrid=False)
    figure.update_yaxes(range=y_range, title_text="loss (nats)")
    label_ends(figure, labels, y_range=y_range, panel_px=270, size=11)
    for place, name in zip(positions or (), ("late", "early"), strict=False):
        figure.add_vline(
            x=place,
            line={"color": theme.muted, "width": 1, "dash": "dot"},
            annotation={
                "text": name,
                "font": {"size": 11, "color": theme.muted},
                "yanchor": "bottom",
                "y": 1,
            },
        )
    figure.update_layout(
        showlegend=False,
        margin={
            "l": 60,
            "r": room_for((text for text, _, _ in labels), size=11),
            "t": 44 if title else 22,
            "b": 50,
        },
    )
    return figure
