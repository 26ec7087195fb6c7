"""The HTML report: one self-contained page that opens from a file and fetches nothing."""

from collections.abc import Mapping
from pathlib import Path

from plotly.offline import get_plotlyjs

from interp.records import DetectionReport, HeadScore, begins_below_chance, strongest_unit, write_text
from interp.report_figures import FigureSet, comparisons
from interp.report_sections import body, escaped, facts, figure, finding_block, methods, number, table
from interp.unit_name import several_readings, unit_name

# The page may run what it holds and load nothing else, from anywhere.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; font-src data:"
)


def html_report(report: DetectionReport, *, title: str | None = None) -> str:
    """The page of one report: a checkpoint or a series.

    Args:
        report: Of `interp.detect`.
        title: Heading; default `Induction heads in NAME`, the last part of the report's path.

    Raises:
        ValueError: the report has no checkpoint.
    """
    _refuse_empty(report, report.path)
    figures = FigureSet()
    heading = title or f"Induction heads in {_name(report.path)}"
    parts = [finding_block(report), facts(report), body(figures, report, "run"), methods()]
    return _page(heading, report.path, "".join(parts), figures)


def summary_report(
    reports: Mapping[str, DetectionReport], *, title: str = "Induction heads, run by run"
) -> str:
    """One page of several runs: a table, the runs on one axis, and each run's own report folded below.

    Raises:
        ValueError: no report, or one without a checkpoint (named).
    """
    if not reports:
        raise ValueError("a summary needs at least one report; got none")
    figures, runs = FigureSet(), []
    for name, report in reports.items():
        _refuse_empty(report, name)
    placed = comparisons(figures, dict(reports))
    captions = {
        "runs-prefix_matching": "<b>Prefix matching</b> of the unit that has most of it at the last "
        "checkpoint. Diamonds: midpoints of transitions.",
        "runs-order_gain": "<b>Order gain</b>: what the order of repeated tokens is worth.",
        "runs-in_context_learning": "<b>ICL score</b>: late minus early loss, below 0 when context helps.",
    }
    drawn = "".join(figure(name, "summary", captions[name]) for name in placed)
    for index, (name, report) in enumerate(reports.items()):
        mixers = ", ".join(dict.fromkeys(report.mixers))
        inner = f'<p class="path">{escaped(report.path)}</p>{finding_block(report)}{facts(report)}'
        inner += body(figures, report, f"run{index}")
        summary = f"<summary>{escaped(name)}<small>{escaped(mixers)}</small></summary>"
        runs.append(f'<details class="run">{summary}{inner}</details>')
    over = f"<h2>Over training</h2>{drawn}" if drawn else ""
    parts = [_run_table(reports), over, "<h2>Each run</h2>", *runs, methods()]
    return _page(title, f"{len(reports)} runs", "".join(parts), figures)


def write_report(path: str | Path, report: DetectionReport | Mapping[str, DetectionReport]) -> None:
    """Write the page of one report, or the summary of several, whole or not at all."""
    text = html_report(report) if isinstance(report, DetectionReport) else summary_report(report)
    write_text(path, text)


def _refuse_empty(report: DetectionReport, name: str) -> None:
    if not report.checkpoints:
        raise ValueError(f"the report of {name!r} has no checkpoint; at least one is needed")


def _name(path: str) -> str:
    return Path(path).name or path


def _run_table(reports: Mapping[str, DetectionReport]) -> str:
    head = [
        "run",
        "mixers",
        "check&shy;points",
        "induction heads",
        "strongest unit",
        "cut − random (nats)",
        "order gain (nats)",
    ]
    head += ["ICL score (nats)", "onset, prefix matching", "onset, order gain", "lead (steps, 95%)"]
    rows = []
    for name, report in reports.items():
        last, found = report.checkpoints[-1], report.phase_transition or {}
        best = strongest_unit(last.heads)
        n_found = len({(head.layer, head.head) for head in report.induction_heads()})
        unit = "–"
        if best is not None:
            unit = escaped(unit_name(best, with_reading=several_readings(last.heads)))
            unit += f'<br><span class="se">prefix matching {number(best.prefix_matching)}</span>'
        cells = [
            escaped(name),
            escaped(", ".join(dict.fromkeys(report.mixers))),
            str(len(report.checkpoints)),
        ]
        cells += [str(n_found), unit, _effect(best)]
        cells += [number(last.order_gain_nats), number(last.in_context_learning_nats)]
        cells += [
            _onset(found.get(key), len(report.checkpoints)) for key in ("prefix_matching", "order_gain")
        ]
        cells.append(_lead(found))
        rows.append(("yes" if n_found else "", cells))
    return '<div class="runs">' + table(head, rows) + "</div>"


def _effect(unit: HeadScore | None) -> str:
    if unit is None or unit.offset_effect_nats is None:
        return "–"
    return f"<b>{number(unit.offset_effect_nats)}</b> at {unit.offset:+d}"


def _lead(found: Mapping) -> str:
    if found.get("lead_steps") is None:
        return "–"
    names = {"prefix_matching": "prefix matching", "order_gain": "order gain", "in_context_learning": "ICL"}
    first, second = (names[name] for name in found["lead_of"])
    if "prefix_matching" in found["lead_of"] and begins_below_chance(found["prefix_matching"]):
        return '–<br><span class="se">rise begins below chance</span>'
    low, high = found["lead_steps"]
    return f'{number(low, 0)} to {number(high, 0)}<br><span class="se">{first} over {second}</span>'


def _onset(curve: Mapping | None, n_checkpoints: int) -> str:
    if curve is None:
        return "none" if n_checkpoints > 1 else "–"
    low, high = curve["onset_step"]
    below = '<br><span class="se">below chance</span>' if begins_below_chance(curve) else ""
    return f"{low:,.0f}–{high:,.0f}{below}"


def _page(heading: str, subtitle: str, content: str, figures: FigureSet) -> str:
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    plotly = get_plotlyjs().replace("</script", "<\\/script")
    return f"""<!DOCTYPE html>
<html lang="en" data-mode="light">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(heading)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header class="page"><div><h1>{escaped(heading)}</h1><p class="path">{escaped(subtitle)}</p></div>
<button id="mode" type="button">Dark mode</button></header>
<noscript><p class="finding">The figures are drawn by the script in this page; allow it to run.</p></noscript>
{content}
<footer>Made by beyond-softmax. This page loads nothing from anywhere.</footer>
</main>
<script class="figures" type="application/json">{figures.to_script()}</script>
<script>{plotly}</script>
<script>
{script}</script>
</body>
</html>
"""
