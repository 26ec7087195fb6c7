"""The table that `detect-induction` prints."""

import io
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from interp.records import (
    CheckpointScores,
    DetectionReport,
    HeadScore,
    begins_below_chance,
    by_prefix_matching,
    strongest_unit,
)
from interp.unit_name import several_readings, unit_name

WIDTH = 100
# Rows of the two tables unless more are asked for: with what stands around them, a screen of 40 lines.
N_CHECKPOINTS = 8
N_UNITS = 8
# As in interp.head_scores, which would bring torch with it.
MIN_PREFIX_MATCHING = 0.3


class _Console(Console):
    """A console whose caller is told that the reader went away; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise


def print_report(
    report: DetectionReport,
    *,
    top: int | None = N_UNITS,
    n_checkpoints: int | None = N_CHECKPOINTS,
    file: TextIO | None = None,
) -> None:
    """Print the series, its transition, the heads of the last checkpoint and the notes, 100 columns wide.

    Args:
        top: At most this many units, highest prefix matching first; None prints all.
        n_checkpoints: At most this many checkpoints, evenly, the first and last among them; None prints all.
    """
    file = file or sys.stdout
    width = min(shutil.get_terminal_size((WIDTH, 40)).columns, 120) if file.isatty() else WIDTH
    console = _Console(file=file, width=width, highlight=False)
    # A narrow terminal wraps lines of a table; cut to its width they would lose numbers.
    tables = _Console(file=file, width=max(width, WIDTH), highlight=False)
    console.print(_heading(report), markup=False)
    if not report.checkpoints:
        console.print("No checkpoint.")
        return
    if len(report.checkpoints) > 1:
        tables.print(_series(report, n_checkpoints))
        if (places := report.checkpoints[-1].icl_positions) is not None:
            console.print(ICL_NOTE.format(*places), markup=False, style="dim")
        for line in _transition(report.phase_transition):
            console.print(line, markup=False)
    if report.checkpoints[-1].heads:
        if len(report.checkpoints) > 1:
            console.print()
        tables.print(_heads(report.checkpoints[-1], top))
    for line in _cut_note(report.checkpoints[-1]):
        console.print(line, markup=False, style="dim")
    console.print(_verdict(report), markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, style="dim")
    if (more := _left_out(report, top, n_checkpoints)) is not None:
        console.print(more, markup=False, style="dim")


def printed_report(report: DetectionReport) -> str:
    """What `print_report` prints, as text."""
    text = io.StringIO()
    print_report(report, file=text)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _left_out(report: DetectionReport, top: int | None, n_checkpoints: int | None) -> str | None:
    """How many rows are not shown, and where they are; None where all are."""
    parts = []
    for shown, there, name in (
        (n_checkpoints, len(report.checkpoints), "checkpoints"),
        (top, len(report.checkpoints[-1].heads), "units' rows"),
    ):
        if shown is not None and shown < there:
            parts.append(f"{shown} of {there} {name}")
    if not parts:
        return None
    return f"Shown: {', '.join(parts)}; all: --csv, --json, --html or report.to_pandas()."


def _heading(report: DetectionReport) -> str:
    probe = report.probe
    bos = "no BOS" if probe.bos is None else f"BOS {probe.bos}"
    mixers = ", ".join(dict.fromkeys(report.mixers))
    # Mamba-1 has no heads: what the model counts as such are the channels of its scan.
    units = f"{report.n_heads} {'channels' if set(report.mixers) == {'mamba1'} else 'heads'} each"
    if len(set(report.mixers)) > 1 and report.checkpoints:
        units = f"{len(_units(report.checkpoints[-1].heads))} scored units"
    return (
        f"{report.path}\n{report.n_layers} layers ({mixers}), {units}. Probe: "
        f"{probe.n_sequences} "
        f"sequences of {probe.period} tokens x {probe.repeats}, {bos}, seed {probe.seed}."
    )


def _series(report: DetectionReport, n_checkpoints: int | None) -> Table:
    shown = _spread(report.checkpoints, n_checkpoints)
    some = "" if len(shown) == len(report.checkpoints) else f" ({len(shown)} of {len(report.checkpoints)})"
    table = Table(
        box=SIMPLE_HEAD,
        title=f"Checkpoints{some}",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("step", justify="right")
    for name in ("loss", "ICL", "repeat loss", "order gain", "hit loss"):
        table.add_column(name, justify="right")
    table.add_column("best prefix matching", justify="left")
    table.add_column("induction", justify="right")
    for checkpoint in shown:
        best = next(iter(by_prefix_matching(checkpoint.heads)), None)
        name = "" if best is None else unit_name(best, with_reading=several_readings(checkpoint.heads))
        table.add_row(
            str(checkpoint.step),
            _number(checkpoint.loss_nats, 3),
            _number(checkpoint.in_context_learning_nats, 3),
            _number(checkpoint.repeat_loss_nats, 3),
            _number(checkpoint.order_gain_nats, 3),
            _number(checkpoint.hit_loss_nats, 3),
            "-" if best is None else f"{best.prefix_matching:.3f} ({name})",
            str(len(_units(head for head in checkpoint.heads if head.is_induction))),
        )
    return table


def _spread(checkpoints: tuple[CheckpointScores, ...], n: int | None) -> list[CheckpointScores]:
    """At most n of the checkpoints (None: all), evenly, the first and last among them; of one, the last."""
    if n is None or len(checkpoints) <= n:
        return list(checkpoints)
    if n < 2:
        return list(checkpoints[-1:])
    return [checkpoints[round(k * (len(checkpoints) - 1) / (n - 1))] for k in range(n)]


# "top at +1": share of edges at +1 that raise the token they read most. "cut nats": what cutting the edges at
# the offset costs above random ones; "copy there": how much those raise the token after the earlier copy.
_COLUMNS = (
    "prefix\nmatching",
    "previous\ntoken",
    "copy\nat +1",
    "top\nat +1",
    "copy\nlogit",
    "copy\neigen",
    "\noffset",
    "cut\nnats",
    "copy\nthere",
)
ICL_NOTE = (
    "ICL is the loss at token {} of a window minus that at token {}; loss by position (--html) tells more."
)


def _heads(checkpoint: CheckpointScores, top: int | None) -> Table:
    chance = checkpoint.heads[0].prefix_matching_chance
    title = (
        f"Step {checkpoint.step}: highest prefix matching of {len(checkpoint.heads)} "
        f"(uniform attention: {chance:.3f})"
    )
    table = Table(
        box=SIMPLE_HEAD,
        title=title,
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("\nhead", no_wrap=True)
    table.add_column("\nreading", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for head in by_prefix_matching(checkpoint.heads)[:top]:
        table.add_row(
            unit_name(head),
            head.reading,
            f"{head.prefix_matching:.3f} ±{head.prefix_matching_se:.3f}",
            f"{head.previous_token:.3f}",
            _number(head.copying_edge, 2),
            _number(head.copying_edge_argmax, 2),
            _number(head.copying, 2),
            _number(head.copying_eigenvalue, 2),
            f"+{head.offset}",
            _number(head.offset_effect_nats, 2),
            _number(head.copying_offset, 2),
            "induction" if head.is_induction else "",
            style="bold" if head.is_induction else None,
        )
    return table


def _cut_note(checkpoint: CheckpointScores) -> list[str]:
    """What the causal columns are of, and what the block reading adds."""
    cut = {head.reading for head in checkpoint.heads if head.offset_effect_nats is not None}
    if not cut:
        return []
    lines = [
        "Cut nats and copy there decide: of the edges at the offset, of the mixer's own reading "
        f"({', '.join(sorted(cut))})."
    ]
    if any(head.reading == "block" for head in checkpoint.heads):
        lines.append(
            "In block rows (convolution counted in, mostly matching at +1) the offset is by weight; their "
            "cuts: interp.offset_profile with reading='block', or the dashboard's tab Offsets and cuts."
        )
    return lines


def _transition(transition: Mapping[str, Any] | None) -> list[str]:
    if transition is None:
        return ["Phase transition: none"]
    lines = []
    for key in ("prefix_matching", "order_gain", "in_context_learning"):
        found = transition.get(key)
        name = key.replace("_", " ")
        if found is None:
            lines.append(f"Phase transition of {name}: none")
            continue
        low, high = found["onset_step"]
        lines.append(
            f"Phase transition of {name}: onset in steps {low:g} to {high:g}, midpoint "
            f"{found['midpoint_step']:.0f}, "
            f"10-90 width {found['width_10_90_steps']:.0f}"
        )
        if begins_below_chance(found):
            above = found["above_chance_from_step"]
            until = "stays below" if above is None else f"above it from step {above}"
            lines.append(f"  (the rise begins below chance, {until}: no onset of matching, and no lead)")
    lead = transition.get("lead_steps")
    below = begins_below_chance(transition.get("prefix_matching"))
    if lead is not None and not (below and "prefix_matching" in (transition.get("lead_of") or ())):
        first, second = transition.get("lead_of") or ("the first", "the second")
        names = f"{first.replace('_', ' ')} over {second.replace('_', ' ')}"
        lines.append(f"Lead of {names}: {lead[0]:.0f} to {lead[1]:.0f} steps")
    return lines


def _verdict(report: DetectionReport) -> str:
    found = _units(report.induction_heads())
    if found:
        return f"{len(found)} induction {'head' if len(found) == 1 else 'heads'}: {_listed(found)}"
    heads = report.checkpoints[-1].heads
    matching = _units(head for head in heads if head.prefix_matching >= MIN_PREFIX_MATCHING)
    if matching:
        return (
            f"No induction head: {_listed(matching)} match prefixes (at least {MIN_PREFIX_MATCHING}), but "
            "fail what is asked for beside it (copying; the causal test where it was made)."
        )
    best = strongest_unit(heads)
    if best is None:
        return "No induction head."
    name, cost = unit_name(best, with_reading=several_readings(heads)), best.offset_effect_nats
    why = f"prefix matching {best.prefix_matching:.2f}"
    if cost is not None:
        why = f"cut {cost:.2f} nats at {best.offset:+d}"
    return f"No induction head. The strongest unit is {name} ({why})."


def _units(heads: Iterable[HeadScore]) -> list[str]:
    """Names of the units, each once: a unit may have several readings."""
    return list(dict.fromkeys(unit_name(head) for head in heads))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
