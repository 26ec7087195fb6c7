"""The parts of a report page as HTML. Every text that comes from a model, a file or a name is escaped
here."""

import html
import json
from collections.abc import Iterable, Sequence

from interp.figures.attention_map import MOST_LABELS, MOST_SMALL
from interp.figures.score_matrix import SCORES
from interp.figures.token_text import visible
from interp.records import DetectionReport, HeadScore, begins_below_chance, by_prefix_matching
from interp.report_figures import FigureSet, cuts, losses, maps, matrices, offsets, phase
from interp.report_terms import TERMS
from interp.report_text import finding, signed
from interp.unit_name import READINGS, several_readings, unit_name

N_HEADS_SHOWN = 24
TRANSITION_NAMES = {
    "prefix_matching": "prefix matching",
    "order_gain": "order gain (nats)",
    "in_context_learning": "ICL score (nats)",
}


def escaped(text: object) -> str:
    """Text for HTML, with control and bidirectional characters made visible (spaces stay)."""
    return html.escape(visible(str(text)).replace("␣", " "), quote=True)


def figure(name: str, run: str, caption: str, *, heading: str = "", wide: bool = False) -> str:
    """A place that the script draws figure `name` into; `caption` is HTML, `wide` takes a grid's whole
    row."""
    text = f"<figcaption>{caption}</figcaption>" if caption else ""
    above = f"<h4>{escaped(heading)}</h4>" if heading else ""
    place = f'<div class="plot" id="{escaped(name)}" data-run="{escaped(run)}"></div>'
    return f"<figure{' class=whole' if wide else ''}>{above}{place}{text}</figure>"


def table(head: Sequence[str], body: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of HTML cells; each row is (class, cells)."""
    columns = "".join(f"<th>{cell}</th>" for cell in head)
    rows = "".join(
        f'<tr class="{name}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for name, cells in body
    )
    return f'<div class="scroll"><table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></div>'


def number(value: float | None, digits: int = 2) -> str:
    """A signed number, or a dash where it was not measured."""
    return "–" if value is None else signed(value, digits)


def finding_block(report: DetectionReport) -> str:
    """The finding line."""
    return '<div class="finding">' + "".join(f"<p>{escaped(text)}</p>" for text in finding(report)) + "</div>"


def facts(report: DetectionReport) -> str:
    """What was measured, on what."""
    probe, last = report.probe, report.checkpoints[-1]
    steps = [checkpoint.step for checkpoint in report.checkpoints]
    series = (
        f"{len(steps)}, steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"1, step {steps[0]:,}"
    )
    counts: dict[str, int] = {}
    for mixer in report.mixers:
        counts[mixer] = counts.get(mixer, 0) + 1
    normalisations = sorted({f"{head.reading}: {head.normalisation}" for head in last.heads})
    bos = "no BOS" if probe.bos is None else f"BOS {probe.bos}"
    rows = {
        "Layers and mixers": f"{report.n_layers}: "
        + ", ".join(f"{n} × {mixer}" for mixer, n in counts.items()),
        "Checkpoints": series,
        "Score probe": f"{probe.n_sequences} sequences, {probe.period} tokens × {probe.repeats}, {bos}",
        "Loss probe": (
            f"{probe.loss_period} tokens × {probe.loss_repeats}, {probe.d_candidates:,} "
            f"candidate tokens"
        ),
        "Aggregation, seed": f"{probe.aggregation}, seed {probe.seed}",
        "Normalisation": "; ".join(normalisations) or "–",
        "Order gain": f"{number(last.order_gain_nats)} nats",
        "ICL score": f"{number(last.in_context_learning_nats)} nats"
        + (f" (positions {last.icl_positions[0]} − {last.icl_positions[1]})" if last.icl_positions else ""),
        "Text": report.text or "–",
        "Versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()) or "–",
    }
    cells = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>" for name, text in rows.items()
    )
    return f'<dl class="facts">{cells}</dl>'


def phase_section(figures: FigureSet, report: DetectionReport, run: str) -> str:
    """Phase plot and the table of transitions; empty for a single checkpoint."""
    if len(report.checkpoints) < 2:
        return ""
    found = report.phase_transition
    caption = (
        "Units are named by layer and head; ● marks an induction head; grey lines are the other "
        "units. Dotted: chance, "
        "and 0 nats. Bands around lines: one standard error. Step 0 stands at the left end of the "
        "logarithmic axis."
        + (" Shaded: 95% interval of the onset; dashed: midpoint." if found else "")
        + " Click a point to show its checkpoint below."
    )
    parts = ["<h2>Over training</h2>", figure(phase(figures, report, f"{run}-phase"), run, caption)]
    return "".join([*parts, transition_table(report) if found else ""])


def _between(interval: Sequence[float] | None, digits: int = 0) -> str:
    if interval is None:
        return "–"
    return "–".join(f"{end:,.{digits}f}" for end in interval)


def transition_table(report: DetectionReport) -> str:
    """Onset, midpoint, width and support of each curve, and the lead."""
    found, rows = report.phase_transition, []
    for key, name in TRANSITION_NAMES.items():
        curve = found.get(key)
        if curve is None:
            rows.append(("", [name, "no transition", *["–"] * 6]))
            continue
        midpoint = f"{curve['midpoint_step']:,.0f}"
        width = f"{curve['width_10_90_steps']:,.0f}"
        support = curve.get("support")
        model = escaped(curve.get("model", "–")) + ("" if curve.get("complete", True) else ", still changing")
        above = ""
        if begins_below_chance(curve):
            from_step = curve["above_chance_from_step"]
            from_then = "never" if from_step is None else f"from {from_step:,}"
            above = f'<br><span class="se">below chance; above it {from_then}</span>'
        cells = [_between(curve["onset_step"]) + above, _between(curve.get("onset_interval")), midpoint]
        cells += [_between(curve.get("midpoint_interval")), width, number(curve.get("change")), model]
        rows.append(("", [name, *cells[:-1], cells[-1] + ("" if support is None else f", {support:.0%}")]))
    head = [
        "curve",
        "onset between",
        "95%",
        "midpoint",
        "95%",
        "width 10–90%",
        "change",
        "model, bootstrap support",
    ]
    method = f'<p class="lede" style="margin-top:12px">Method: {escaped(found.get("method", ""))}.</p>'
    drawn = f'<div class="transitions">{table(head, rows)}</div>'
    return drawn + f"<details><summary>How transitions are found</summary>{method}</details>"


def matrix_section(figures: FigureSet, report: DetectionReport, run: str) -> str:
    """Score matrices by reading, under one slider for a series."""
    placed = matrices(figures, report, f"{run}-matrix")
    if not placed:
        return ""
    series = len(report.checkpoints) > 1
    about = "Layer by head, fixed scales; outlined cells are induction heads."
    parts = ["<h2>Scores by layer and head</h2>", f'<p class="lede">{about}</p>']
    if series:
        steps = json.dumps([checkpoint.step for checkpoint in report.checkpoints])
        last = len(report.checkpoints) - 1
        parts.append(
            f'<div class="steps" data-run="{escaped(run)}" data-steps="{escaped(steps)}">'
            '<button type="button">Play</button>'
            f'<input type="range" min="0" max="{last}" value="{last}" step="1" aria-label="checkpoint">'
            "<output></output></div>"
        )
    for reading, names in placed.items():
        parts.append(f"<h3>{escaped(READINGS.get(reading, reading))}</h3>")
        parts.append(
            '<div class="grid">'
            + "".join(figure(name, run, "", heading=SCORES[score][0]) for score, name in names)
            + "</div>"
        )
    return "".join(parts)


def map_section(figures: FigureSet, report: DetectionReport, run: str) -> str:
    """Attention maps of the units of highest prefix matching and of the previous-token one."""
    placed = maps(figures, report, f"{run}-map")
    if not placed:
        return ""
    parts = []
    with_reading = len({picture.reading for _, picture in placed}) > 1
    for name, picture in placed:
        parts.append(
            figure(
                name,
                run,
                f"<b>{escaped(unit_name(picture, with_reading=with_reading))}</b> at step "
                f"{picture.step:,}, reading "
                f"{escaped(picture.reading)}, normalisation {escaped(picture.normalisation)}.",
                wide=MOST_SMALL < len(picture.tokens) <= MOST_LABELS,
            )
        )
    about = (
        "What each destination (row) reads from each source (column). Outlines are the induction "
        "targets: the tokens "
        "that followed earlier copies of the destination's token. Point at a cell for both tokens and "
        "the value."
    )
    return f'<h2>Attention maps</h2><p class="lede">{about}</p><div class="grid wide">{"".join(parts)}</div>'


def curve_section(figures: FigureSet, report: DetectionReport, run: str) -> str:
    """Loss by position, weight by offset and cost of cuts by offset, where measured."""
    parts = []
    if (name := losses(figures, report, f"{run}-losses")) is not None:
        parts.append(
            figure(
                name,
                run,
                "<b>Loss by position</b>, mean over the windows, one line a checkpoint; dotted: the two "
                "positions that the ICL score compares.",
            )
        )
    if (name := offsets(figures, report, f"{run}-offsets")) is not None:
        text = (
            "<b>Weight by offset</b> from the earlier copy: +1 is the textbook induction target; "
            "dotted: chance."
        )
        parts.append(figure(name, run, text))
    if (name := cuts(figures, report, f"{run}-cuts")) is not None:
        text = (
            "<b>Causal offset profile</b>: what the predicted tokens lose when a unit's edges at an offset "
            "from the earlier copy are cut; dotted: as many random edges, not subtracted here (the units' "
            "table has the difference, as effect)."
        )
        parts.append(figure(name, run, text))
    return f'<h2>Position and offset</h2><div class="grid wide">{"".join(parts)}</div>' if parts else ""


def head_table(report: DetectionReport) -> str:
    """All units of the last checkpoint, highest prefix matching first; long tables fold."""
    heads = by_prefix_matching(report.checkpoints[-1].heads)
    if not heads:
        return ""
    with_reading = several_readings(heads)
    head = [
        "unit",
        "prefix matching",
        "chance",
        "previous token",
        "offset",
        "effect: cut − random (nats)",
        "copying at offset",
        "copying at +1",
        "copying logit",
        "copying eigen&shy;value",
        "induction",
    ]
    rows = [_head_row(unit, with_reading) for unit in heads]
    shown = table(head, rows[:N_HEADS_SHOWN])
    step = report.checkpoints[-1].step
    at = f"Step {step:,}, highest prefix matching first; ± one standard error over sequences."
    if any(unit.decided_by == "causal" for unit in heads):
        at += " Effect and copying at the offset decide: of the mixer's own reading, whose edges were cut."
    rest = ""
    if len(rows) > N_HEADS_SHOWN:
        rest = (
            f"<details><summary>All {len(rows)} units</summary>{table(head, rows[N_HEADS_SHOWN:])}</details>"
        )
    return f'<div class="units"><h2>Units</h2><p class="lede">{at}</p>{shown}{rest}</div>'


def _head_row(unit: HeadScore, with_reading: bool) -> tuple[str, list[str]]:
    def with_error(value: float | None, error: float | None) -> str:
        return number(value) + (
            "" if value is None or error is None else f' <span class="se">± {error:.3f}</span>'
        )

    return "yes" if unit.is_induction else "", [
        escaped(unit_name(unit, with_reading=with_reading)),
        with_error(unit.prefix_matching, unit.prefix_matching_se),
        number(unit.prefix_matching_chance, 3),
        with_error(unit.previous_token, unit.previous_token_se),
        f"{unit.offset:+d}",
        with_error(unit.offset_effect_nats, unit.offset_effect_se_nats),
        number(unit.copying_offset),
        with_error(unit.copying_edge, unit.copying_edge_se),
        number(unit.copying),
        number(unit.copying_eigenvalue),
        "yes" if unit.is_induction else "–",
    ]


def notes(report: DetectionReport) -> str:
    """What the report itself remarks."""
    if not report.notes:
        return ""
    items = "".join(f"<li>{escaped(note)}</li>" for note in report.notes)
    return f'<h2>Notes</h2><ul class="notes">{items}</ul>'


def methods() -> str:
    """Definitions and chance levels."""
    terms = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in TERMS.items())
    return f'<h2>Definitions</h2><dl class="terms">{terms}</dl>'


def body(figures: FigureSet, report: DetectionReport, run: str) -> str:
    """All sections of one report below its header, `run` being the prefix of its figure ids."""
    sections = [phase_section, matrix_section, map_section, curve_section]
    return "".join(section(figures, report, run) for section in sections) + head_table(report) + notes(report)
