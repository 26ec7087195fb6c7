"""The figures of an exported page without their numbers: each once in light, and what dark changes.

The script puts the numbers of the chosen prompt, checkpoint, layer, reading and unit into them.
"""

from typing import Any

from interp.dashboard import views
from interp.dashboard.sheet import Sheet
from interp.dashboard.states import StateNorms
from interp.records import DetectionReport
from interp.report_figures import FigureSet, matrices, phase

# Side of the square of cells where there is most room, pixels: the script makes it smaller and leaves labels
# out. As in export_views.js.
MOST_ROOM = 620


def map_figure(figures: FigureSet, name: str, sheet: Sheet) -> None:
    """The map of a prompt on the scale of this sheet, without cells."""

    def draw(mode: str) -> Any:
        figure = views.attention_view(sheet, 0, mode=mode, side=MOST_ROOM)
        marked = figure.data[0].texttemplate is not None
        figure.data[0].update(z=None, text=None)
        # Kept as a list: the script replaces the numbers beside them.
        figure.data[1].update(x=_plain(figure.data[1].x), y=_plain(figure.data[1].y))
        figure.layout.meta = {"marked": marked}
        return figure

    figures.add(name, draw)


def _plain(values: Any) -> list[float | None]:
    return [None if value is None or value != value else float(value) for value in values]


def weight_figure(figures: FigureSet, name: str, sheet: Sheet) -> bool:
    """Weight by offset on a prompt; False where no token comes again."""
    if views.weight_by_offset(sheet, 0) is None:
        return False
    figures.add(name, lambda mode: views.weight_by_offset(sheet, 0, mode=mode))
    return True


def weight_values(sheet: Sheet, unit: int) -> dict[str, Any]:
    """Bars and control of one unit, for the figure of its prompt."""
    figure = views.weight_by_offset(sheet, unit)
    return {
        "values": [float(f"{value:.5g}") for value in figure.data[0].y],
        "control": float(figure.layout.shapes[0].y0),
    }


def cut_figure(figures: FigureSet, name: str, profile: Any) -> None:
    """Cost of cuts by offset."""
    figures.add(name, lambda mode: views.cut_view(profile, mode=mode))


def state_figure(figures: FigureSet, name: str, norms: StateNorms, tokens: Any) -> None:
    """Norms of the state by position; hover names are kept once, for all lines."""

    def draw(mode: str) -> Any:
        figure = views.state_view(norms, tokens, mode=mode)
        names = list(figure.data[0].customdata)
        for trace in figure.data:
            trace.update(customdata=None, y=None, x=list(range(len(names))))
        figure.layout.meta = {"names": names}
        return figure

    figures.add(name, draw)


def training_figures(figures: FigureSet, report: DetectionReport, run: int) -> dict[str, Any]:
    """Phase plot and score matrices of a run; their frames are by training step."""
    return {
        "phase": phase(figures, report, f"phase-{run}"),
        "matrices": matrices(figures, report, f"matrix-{run}"),
    }
