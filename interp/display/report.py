"""Detection reports in a notebook: the finding, the phase plot or the strongest unit's map, the units."""

import pandas as pd
import plotly.graph_objects as go

from interp.display import checkpoint
from interp.display.page import first_rows
from interp.figures import attention_map, phase_plot
from interp.records import DetectionReport, rows
from interp.report_text import finding

N_UNITS = 12


def words(report: DetectionReport) -> list[str]:
    """The finding, sentence by sentence, and what was read."""
    if not report.checkpoints:
        return [f"{report.path}: no checkpoint."]
    mixers = ", ".join(dict.fromkeys(report.mixers))
    steps = [c.step for c in report.checkpoints]
    series = (
        f"{len(steps)} checkpoints, steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else "1 checkpoint"
    )
    return [f"{report.path}: {report.n_layers} layers ({mixers}), {series}.", *finding(report), *report.notes]


def shown(report: DetectionReport) -> pd.DataFrame:
    """The units of the last checkpoint, highest prefix matching first."""
    return checkpoint.shown(report.checkpoints[-1]) if report.checkpoints else first_rows([], N_UNITS)


def to_pandas(report: DetectionReport) -> pd.DataFrame:
    """One row for each step, layer, head and reading, the columns of the CSV, cuts by offset as a list."""
    return pd.DataFrame(rows(report, lists=True))


def figure(report: DetectionReport, mode: str) -> go.Figure | None:
    """Phase plot of a series; of one checkpoint the strongest unit's map, or its scores where it has none."""
    if len(report.checkpoints) > 1:
        return phase_plot(report.checkpoints, transition=report.phase_transition, mode=mode)
    if report.attention_maps:
        picture = report.attention_maps[0]
        return attention_map(picture.matrix, picture.tokens, mode=mode)
    return checkpoint.figure(report.checkpoints[-1], mode) if report.checkpoints else None
