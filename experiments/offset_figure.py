"""The figure of the offset tables: what cutting a layer's edges costs against what the textbook score reads.

    python -m experiments.offset_figure [--html FILE]

Reads experiments/results/offset_table.jsonl and offset_text_table.jsonl.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from experiments.offset_table import RESULTS
from interp.figures.theme import style, theme_of

FAMILIES = {
    "softmax": "Softmax",
    "linear": "Linear attention",
    "mamba1": "Mamba-1",
    "mamba2": "Mamba-2",
    "s4d": "S4D",
}
SYMBOLS = {"periodic": "circle", "copy": "diamond", "gpu": "square"}
TASKS = {"periodic": "periodic tiling", "copy": "segment copy", "gpu": "real text"}


def points(results: Path) -> list[dict[str, Any]]:
    """One point for each run and seed: family, task, textbook score, effect of the strongest cut, label."""
    found = []
    for name in ("offset_table.jsonl", "offset_text_table.jsonl"):
        for line in (results / name).read_text("utf-8").splitlines():
            row = json.loads(line)
            own = row.get("probe") if "text" in row else row
            task, *parts = row["run"].removeprefix("gpu-text-").split("-")
            if "text" in row:
                task, parts = "gpu", [task, *parts]
            found.append(
                {
                    "family": parts[0],
                    "task": task,
                    "conv": "conv" in parts or parts[0].startswith(("mamba", "s4d")),
                    "textbook": own["textbook_prefix"],
                    "effect": own["effect_nats"],
                    "label": f"{row['run']}, seed {row['seed']}: +{own['delta']} in layer {own['layer']}",
                }
            )
    return [point for point in found if point["family"] in FAMILIES]


def offset_figure(found: list[dict[str, Any]], *, mode: str = "light") -> go.Figure:
    """Effect against textbook score; colour by mixer, symbol by task, open where there is no convolution."""
    theme = theme_of(mode)
    colours = dict(zip(FAMILIES, theme.series, strict=False)) | {"s4d": theme.muted}
    figure = go.Figure()
    for family, label in FAMILIES.items():
        for task, symbol in SYMBOLS.items():
            own = [point for point in found if (point["family"], point["task"]) == (family, task)]
            if not own:
                continue
            figure.add_scatter(
                x=[point["textbook"] for point in own],
                y=[point["effect"] for point in own],
                text=[point["label"] for point in own],
                mode="markers",
                name=f"{label}, {TASKS[task]}",
                hovertemplate="%{text}<br>textbook %{x:.2f}, cut %{y:.2f} nats<extra></extra>",
                marker={
                    "size": 9,
                    "symbol": [symbol if point["conv"] else f"{symbol}-open" for point in own],
                    "color": colours[family],
                    "line": {"width": 1.5, "color": colours[family]},
                },
            )
    style(figure, theme, height=460)
    figure.update_xaxes(title_text="Textbook prefix matching, strongest unit", range=[-0.03, 1.0])
    figure.update_yaxes(title_text="Strongest cut minus random cut (nats)", rangemode="tozero")
    figure.update_layout(legend={"x": 1.02, "y": 1, "font": {"size": 12}}, width=980)
    figure.add_annotation(
        text="filled: with a short convolution<br>open: without one",
        xref="paper", yref="paper", x=1.02, y=0, xanchor="left", yanchor="bottom", align="left",
        showarrow=False, font={"size": 12, "color": theme.muted},
    )  # fmt: skip
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Write the figure as a page that fetches nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--html", type=Path, default=Path("offset_figure.html"), metavar="FILE")
    options = parser.parse_args(arguments)
    config = {"displayModeBar": False, "showSendToCloud": False, "plotlyServerURL": ""}
    offset_figure(points(options.results)).write_html(options.html, include_plotlyjs=True, config=config)
    print(f"wrote {options.html}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
