"""The training view: a run's scores, asked for while they are made, then its curves and matrices."""

from typing import Any

from dash import Dash, Input, Output, ctx

from interp.dashboard import views
from interp.dashboard.controls import SIDES
from interp.dashboard.desk import Desk
from interp.dashboard.layout import BLANK, MATRICES
from interp.dashboard.messages import attempt
from interp.dashboard.request import Request, asked
from interp.dashboard.scoring import Progress
from interp.dashboard.selection import Selection

_SENTENCE = (
    "{n} checkpoints. Shaded: where a transition sets in. Upright line: the chosen checkpoint. Copying and "
    "cuts are not part of this scoring; detect-induction makes them."
)


def register(app: Dash, desk: Desk) -> None:
    """Attach it to the app."""
    figures = ("phase", *MATRICES)

    @app.callback(
        *[Output(f"{side}-{name}", "figure") for side in SIDES for name in figures],
        *[Output(f"{side}-training-caption", "children") for side in SIDES],
        *[Output(f"{side}-progress", name) for side in SIDES for name in ("value", "max", "hidden")],
        Output("poll", "disabled"),
        asked("training"),
        Input("poll", "n_intervals"),
    )
    def draw(data: dict | None, ticks: int) -> list[Any]:
        request = Request(data)
        drawn, captions, bars, waiting = [], [], [], False
        for side in SIDES:
            progress, error = _progress(desk, request, side, again=ctx.triggered_id == "training-request")
            report = None if progress is None else progress.report
            waiting |= progress is not None and report is None and progress.error is None
            drawn += [BLANK] * len(figures) if report is None else _drawn(desk, request, side, report)
            captions.append(error or _said(progress))
            bars += _bar(progress)
        return [*drawn, *captions, *bars, not waiting]


def _progress(desk: Desk, request: Request, side: str, *, again: bool) -> tuple[Progress | None, str | None]:
    """How far the scoring of a side's run is; None with a sentence where there is nothing to score.

    `again`: The view was asked for, so what has failed is tried anew.
    """
    raw = request.raw[side]
    if raw is None:
        return None, ""
    run, error = attempt(lambda: desk.run(Selection.of(raw)))
    if error is not None:
        return None, error
    if len(run.steps) < 2:
        return None, f"{run.name} is a single checkpoint: there is nothing over training to show."
    if side == "b" and request.raw["a"].get("run") == raw["run"]:
        return None, "The same run as A: its dotted line there is this checkpoint."
    return desk.scoring.of(run, again=again), None


def _drawn(desk: Desk, request: Request, side: str, report: Any) -> list[Any]:
    chosen = Selection.of(request.raw[side])
    raw = request.raw["b" if side == "a" else "a"]
    other, _ = attempt(lambda: None if raw is None else Selection.of(raw))
    steps = desk.run(chosen).steps
    marked = [steps[chosen.step]]
    if other is not None and other.run == chosen.run and 0 <= other.step < len(steps):
        marked.append(steps[other.step])
    # A checkpoint that was deleted, or written since, has no scores.
    scored = {checkpoint.step for checkpoint in report.checkpoints}
    there = [step for step in marked if step in scored]
    phase = views.phase_view(report, steps=there, mode=request.mode)
    if marked[0] not in scored:
        return [phase] + [BLANK] * len(MATRICES)
    matrices = [
        views.score_view(report, step=marked[0], reading=chosen.reading, score=score, mode=request.mode)
        for score in MATRICES
    ]
    return [phase, *matrices]


def _said(progress: Progress | None) -> str:
    if progress is None:
        return ""
    if progress.error is not None:
        return f"The run cannot be scored: {progress.error}"
    if progress.report is None:
        return f"Scoring checkpoint {min(progress.done + 1, progress.total)} of {progress.total} ..."
    said = _SENTENCE.format(n=len(progress.report.checkpoints))
    return " ".join([said, *(f"Left out, {why}." for why in progress.left_out)])


def _bar(progress: Progress | None) -> list[Any]:
    busy = progress is not None and progress.report is None and progress.error is None
    return [str(progress.done), str(progress.total), False] if busy else ["0", "1", True]
