"""The printed table, the page's table and the demo's say the same of a unit, and what decides about it."""

import html
import io
import re
from dataclasses import replace

import pytest
from interp_reports import report
from IPython.lib.pretty import pretty

from experiments.demo import COLUMNS, _cells
from interp.records import by_prefix_matching, strongest_unit
from interp.report import html_report, summary_report
from interp.report_text import finding
from interp.table import print_report

CUT = {"decided_by": "causal", "is_induction": True, "offset": 3, "offset_effect_nats": 1.81}
CUT |= {"copying_edge": -0.88, "copying_offset": 0.28, "cut_first_offset": 2}
CUT |= {"cut_by_offset_nats": (0.0, 1.9)}
CUT |= {"offset_effect_se_nats": 0.1, "offset_control_nats": 0.09}


@pytest.fixture(scope="module")
def cut():
    """One checkpoint of Mamba-2 whose L1H2 copies at the offset that decides, and not at +1."""
    found = report(mixer="mamba2", steps=(500,))
    heads = [
        replace(head, **CUT) if (head.layer, head.head, head.reading) == (1, 2, "ssm") else head
        for head in found.checkpoints[0].heads
    ]
    return replace(found, checkpoints=(replace(found.checkpoints[0], heads=tuple(heads)),))


def _printed(found):
    file = io.StringIO()
    print_report(found, file=file, top=50)
    return file.getvalue()


def _row(lines, name):
    return next(line for line in lines if line.split()[:2] == name.split())


def test_the_copying_that_decides_stands_beside_the_verdict(cut):
    row = _row(_printed(cut).splitlines(), "L1H2 ssm")
    assert row.split()[-4:] == ["+3", "1.81", "0.28", "induction"]
    page = re.search(r'<div class="units">.*?</div></div>', html_report(cut), flags=re.S).group(0)
    cells = [html.unescape(re.sub("<[^>]+>", "", cell)) for cell in re.findall(r"<t[hd]>.*?</t[hd]>", page)]
    names = cells[: cells.index("induction") + 1]
    at = cells.index("L1H2 ssm")
    found = dict(zip(names, cells[at : at + len(names)], strict=True))
    assert found["copying at offset"] == "0.28" and found["copying at +1"].startswith("−0.88")
    assert found["effect: cut − random (nats)"] == "1.81 ± 0.100" and found["offset"] == "+3"
    of_the_demo = dict(zip(COLUMNS[2:], _cells(cut), strict=True))
    assert (of_the_demo["strongest cut"], of_the_demo["copying"]) == ("L1H2 ssm", "0.28")
    assert cut.checkpoints[0].to_pandas().copying_offset.max() == 0.28


def test_what_was_cut_and_what_was_not_is_said(cut):
    said = " ".join(_printed(cut).split())
    assert "of the mixer's own reading (ssm)" in said and "interp.offset_profile with reading='block'" in said
    softmax = report(steps=(500,))
    assert "own reading" not in _printed(softmax)
    terms = html_report(softmax)
    for name in ("Offset", "Effect", "Induction head", "Onset", "Lead", "Copying at the offset"):
        assert f"<dt>{name}</dt>" in terms


def test_a_series_says_which_positions_the_score_compares():
    said = " ".join(_printed(report(steps=(0, 10, 100, 1000))).split())
    assert "ICL is the loss at token 120 of a window minus that at token 20" in said


def test_channels_are_not_called_heads():
    assert "2 layers (mamba1), 4 channels each." in _printed(report(mixer="mamba1", steps=(500,)))
    mixed = replace(report(mixer="mamba2", steps=(500,)), mixers=("mamba1", "softmax"))
    assert "2 layers (mamba1, softmax), 8 scored units." in _printed(mixed)
    assert "2 layers (mamba2), 4 heads each." in _printed(report(mixer="mamba2", steps=(500,)))


def test_a_unit_that_copies_too_weakly_at_its_offset_says_so(cut):
    last = cut.checkpoints[0]
    weak = [
        replace(head, is_induction=False, decided_by="causal", prefix_matching=0.5 + head.head)
        for head in last.heads
        if (head.layer, head.head) == (1, 2)
    ]
    weak = tuple(replace(head, copying_offset=-0.4) if head.copying_offset else head for head in weak)
    changed = replace(cut, checkpoints=(replace(last, heads=weak),))
    assert "copying −0.40, 0 is asked at offset +3" in finding(changed)[0]


def test_cuts_by_offset_are_lists_in_a_table(cut):
    table = cut.to_pandas()
    assert list(table.cut_by_offset_nats.dropna()) == [[0.0, 1.9]]


def _words(page):
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def test_every_overview_names_the_same_strongest_unit(cut):
    """Also where another reading, in which nothing was cut, matches prefixes best."""
    last = cut.checkpoints[0]
    none, score = {"is_induction": False, "decided_by": "causal"}, {"ssm": 0.2, "block": 0.25}
    heads = [replace(h, **none, prefix_matching=score[h.reading]) for h in last.heads]
    heads = [replace(h, offset_effect_nats=0.05, offset=2) if h.head == 1 else h for h in heads]
    heads = tuple(replace(h, offset_effect_nats=0.09) if h.offset_effect_nats == 1.81 else h for h in heads)
    assert by_prefix_matching(heads)[0].reading == "block"
    found = replace(cut, checkpoints=(replace(last, heads=heads),))
    best = strongest_unit(heads)
    assert (best.layer, best.head, best.reading) == (1, 2, "ssm")
    page = summary_report({"run": found})
    overview = re.search(r'<div class="runs">.*?</table>', page, flags=re.S).group(0)
    assert "L1H2 ssm prefix matching 0.20 0.09 at +3" in " ".join(_words(overview).split())
    assert "the strongest unit, L1H2 ssm, has prefix matching 0.20" in finding(found)[0]
    assert "The strongest unit is L1H2 ssm (cut 0.09 nats at +3)." in " ".join(_printed(found).split())
    assert _cells(found)[0] == "L1H2 ssm"


def test_without_cuts_the_strongest_unit_matches_prefixes_best():
    heads = report(steps=(500,)).checkpoints[0].heads
    assert strongest_unit(heads) == max(heads, key=lambda head: head.prefix_matching)
    assert strongest_unit(()) is None
    cell = dict(zip(COLUMNS[2:], _cells(report(steps=(500,))), strict=True))
    assert (cell["strongest cut"], cell["nats"]) == ("L1H0 pattern", "-")


def test_a_printed_report_fits_a_screen_and_says_what_it_leaves_out():
    """50 checkpoints of a model with two layers of four heads in two readings."""
    long = report(mixer="mamba2", steps=tuple(range(0, 2500, 50)))
    lines = repr(long).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert lines[0] == f"DetectionReport of {long.path}" and str(long) == repr(long)
    assert lines[-1] == (
        "Shown: 8 of 50 checkpoints, 8 of 16 units' rows; all: --csv, --json, --html or report.to_pandas()."
    )
    everything = io.StringIO()
    print_report(long, top=None, n_checkpoints=None, file=everything)
    assert "Shown:" not in everything.getvalue() and "(50 of" not in everything.getvalue()
    assert len(everything.getvalue().splitlines()) == len(lines) - 1 + 42 + 8


def test_reports_without_checkpoints_or_heads_print_too():
    found = report(steps=(500,))
    assert repr(replace(found, checkpoints=())).endswith("No checkpoint.")
    bare = replace(found, checkpoints=(replace(found.checkpoints[0], heads=()),))
    assert "No induction head." in repr(bare)
    series = report(steps=(0, 10, 100, 1000))
    none = tuple(replace(checkpoint, heads=()) for checkpoint in series.checkpoints)
    assert "Checkpoints\n" in repr(replace(series, checkpoints=none))
    one = io.StringIO()
    print_report(series, n_checkpoints=1, file=one)
    assert "Checkpoints (1 of 4)" in one.getvalue() and "Shown: 1 of 4 checkpoints;" in one.getvalue()


def test_parts_of_a_report_print_without_their_lists():
    found = report(steps=(500,))
    for part in (*found.checkpoints, *found.attention_maps, *found.checkpoints[0].heads):
        assert len(repr(part)) < 1500
    assert pretty([found]).startswith("[DetectionReport: runs/segment-copy-softmax: 2 layers (softmax)")
    assert pretty(list(found.checkpoints[0].heads)).count("HeadScore: L") == 8
