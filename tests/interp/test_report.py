"""The page is whole, says what the report says, and cannot reach out or be reached into."""

import dataclasses
import html
import io
import json
import re
from dataclasses import replace

import pytest
from interp_reports import NASTY, STEPS, report

from interp.figures import phase_plot
from interp.report import html_report, summary_report, write_report
from interp.report_figures import difference
from interp.report_text import finding
from interp.table import print_report


@pytest.fixture(scope="module")
def series():
    return report()


@pytest.fixture(scope="module")
def page(series):
    return html_report(series)


def own_part(page):
    """The page without the plotting library's own text."""
    scripts = re.findall(r"<script>.*?</script>", page, flags=re.S)
    library = max(scripts, key=len)
    assert len(library) > 3_000_000
    return page.replace(library, "")


def figures_of(page):
    return json.loads(re.search(r'<script class="figures"[^>]*>(.*?)</script>', page, flags=re.S).group(1))


def text_of(page):
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)))


def test_the_page_is_self_contained(page):
    own = own_part(page)
    assert not re.search(r"""(src|href|action|data|poster)\s*=\s*["']?\s*(https?:)?//""", own)
    assert not re.search(r"url\(|@import|https?://|<link|<iframe|<img", own)
    assert "default-src 'none'" in own
    assert page.count("</script>") == 3
    assert len(page) < 8_000_000


def test_every_place_has_its_figure_and_the_matrices_a_frame_for_each_checkpoint(page):
    stored = figures_of(page)
    placed = re.findall(r'class="plot" id="([^"]+)"', page)
    assert sorted(placed) == sorted(stored)
    matrices = [entry for entry in stored.values() if entry.get("role") == "matrix"]
    assert len(matrices) == 3
    for entry in matrices:
        assert list(entry["frames"]) == [str(step) for step in STEPS]
    slider = re.search(r'<div class="steps" data-run="run" data-steps="([^"]+)"', page).group(1)
    assert json.loads(html.unescape(slider)) == list(STEPS)
    assert f'max="{len(STEPS) - 1}"' in page
    assert list(stored["run-phase"]["places"]) == [str(step) for step in STEPS]


def test_the_finding_is_what_the_report_holds(series, page):
    text = text_of(page)
    best = series.induction_heads()[0]
    assert (best.layer, best.head) == (1, 0)
    assert f"L1H0 ({best.prefix_matching:.2f})" in text
    low, high = series.phase_transition["prefix_matching"]["onset_step"]
    assert f"Prefix matching sets in between steps {low:,.0f} and {high:,.0f}" in text
    assert "The strongest previous-token unit is L0H1" in text
    for word in (
        "Definitions",
        "Chance",
        "rowsum, seed 0",
        "pattern: none",
        "torch 2.13.0",
        "standard library",
    ):
        assert word in text
    for note in series.notes:
        assert note in text


def test_a_series_without_transition_says_so():
    flat = report(transition=False)
    assert flat.phase_transition is None
    assert finding(flat)[0].startswith("No induction head at step 2,000: the strongest unit, L")
    assert finding(flat)[-1].startswith("No phase transition")


def test_a_unit_with_two_readings_counts_once(series):
    last = series.checkpoints[-1]
    head = series.induction_heads()[0]
    other = replace(head, reading="block", prefix_matching=head.prefix_matching - 0.1)
    twice = replace(series, checkpoints=(replace(last, heads=(*last.heads, other)),))
    assert finding(twice)[0] == (
        "2 induction heads among 8 scored units: L1H0 pattern (0.95), L1H2 pattern (0.44) "
        "(prefix matching; chance 0.04)."
    )


def test_a_head_that_matches_and_does_not_copy_says_so(series):
    last = series.checkpoints[-1]
    heads = tuple(replace(one, is_induction=False, copying_edge=-0.63) for one in last.heads)
    none = replace(series, checkpoints=(replace(last, heads=heads),))
    assert "but copies too weakly to be called one (copying −0.63, 0 is asked" in finding(none)[0]


@pytest.mark.parametrize(
    "effect, copying, said",
    [
        (0.02, 0.4, "and cutting its strongest offset, +3, costs 0.02 nats (0.1 is asked)"),
        (0.21, -0.56, "but copies too weakly to be called one (copying −0.56, 0 is asked at offset +3)"),
    ],
)
def test_where_cuts_decide_the_reason_is_theirs(series, effect, copying, said):
    """Prefix matching below its threshold is then no reason."""
    last = series.checkpoints[-1]
    found = {"is_induction": False, "prefix_matching": 0.05, "decided_by": "causal", "offset": 3}
    found |= {"offset_effect_nats": effect, "copying_offset": copying}
    none = replace(series, checkpoints=(replace(last, heads=tuple(replace(h, **found) for h in last.heads)),))
    assert said in finding(none)[0]


def test_a_lead_that_includes_zero_is_not_called_a_lead(series):
    found = dict(series.phase_transition)
    texts = {}
    for name, lead in {"unknown": [-10, 50], "first": [20, 80], "second": [-80, -20]}.items():
        changed = {**found, "lead_steps": lead}
        texts[name] = finding(_with(series, changed))[-1]
    assert "cannot be told" in texts["unknown"]
    assert texts["first"] == "Prefix matching leads the in-context-learning score by 20 to 80 steps (95%)."
    assert texts["second"] == "The in-context-learning score leads prefix matching by 20 to 80 steps (95%)."


def test_an_onset_below_chance_is_no_lead(series):
    found = dict(series.phase_transition) | {"lead_steps": [20, 80]}
    onset = found["prefix_matching"]["onset_step"]
    later = next(step for step in STEPS if step > onset[1])
    for above, until in ((later, f"it is above chance from step {later:,}"), (None, "it stays there")):
        below = found["prefix_matching"] | {"chance": 0.3, "above_chance_from_step": above}
        changed = _with(series, found | {"prefix_matching": below})
        said = finding(changed)
        assert any(text.startswith("Prefix matching begins to rise") and until in text for text in said)
        assert said[-1].startswith("No lead of prefix matching over the in-context-learning score is read")
        panel = phase_plot(changed.checkpoints, transition=changed.phase_transition)
        assert any(note.text.startswith("rise below chance") for note in panel.layout.annotations)
        assert not any("leads" in text or "Prefix matching sets in" in text for text in said)
        printed = io.StringIO()
        print_report(changed, file=printed)
        assert "the rise begins below chance" in printed.getvalue() and "Lead of" not in printed.getvalue()
    shown = text_of(summary_report({"run": changed}))
    assert "rise begins below chance" in shown and "below chance; above it never" in shown


def _with(series, transition):
    return dataclasses.replace(series, phase_transition=transition)


def test_a_single_checkpoint_has_no_series_parts():
    page = html_report(report(steps=(500,)))
    assert "Over training" not in page and 'class="steps"' not in page
    assert "run-phase" not in figures_of(page)
    assert len(re.findall(r'class="plot"', page)) == len(figures_of(page)) == 8


def test_text_from_outside_is_escaped():
    path = "/x/<img src=x onerror=alert(1)>\u202e\n"
    page = html_report(report(steps=(500,), nasty=True, path=path))
    own = own_part(page)
    assert "<img" not in own and "\u202e" not in own
    assert "⟨U+202E⟩" in text_of(page)
    stored = own[own.index('<script class="figures"') :]
    inner = stored[stored.index(">") + 1 : stored.index("</script>")]
    assert "<" not in inner
    page.encode("utf-8")
    labels = figures_of(page)["run-map-0"]["figure"]["layout"]["yaxis2"]["ticktext"]
    assert labels[0] == "&lt;script…"
    assert labels[7] == "↵" and len(labels) == 2 * len(NASTY)


def test_mamba_has_matrices_for_each_reading_and_a_signed_map():
    stored = figures_of(html_report(report(mixer="mamba2")))
    readings = {name.split("-")[2] for name in stored if name.startswith("run-matrix")}
    assert readings == {"ssm", "block"}
    signed = stored["run-map-1"]["figure"]["data"][0]
    assert signed["zmin"] == -signed["zmax"] < 0


def test_the_summary_puts_runs_side_by_side(tmp_path):
    few = STEPS[::4]
    runs = {"softmax <2 layers>": report(steps=few), "control": report(steps=few, transition=False)}
    runs["one"] = report(steps=(500,))
    write_report(tmp_path / "summary.html", runs)
    page = (tmp_path / "summary.html").read_text(encoding="utf-8")
    stored = figures_of(page)
    assert {"runs-prefix_matching", "runs-order_gain", "runs-in_context_learning"} <= set(stored)
    assert page.count('<details class="run">') == 3
    assert page.count('class="steps"') == 2
    text = text_of(page)
    assert "softmax <2 layers>" in text and "none" in text
    assert len(re.findall(r'class="plot" id="([^"]+)"', page)) == len(stored)


def test_nothing_to_report_is_refused(series):
    with pytest.raises(ValueError, match="at least one report"):
        summary_report({})
    with pytest.raises(ValueError, match="has no checkpoint"):
        html_report(dataclasses.replace(series, checkpoints=()))


def test_the_dark_form_is_the_light_one_with_the_difference_written_over_it():
    light, dark = {"a": [1, {"b": 2}], "c": "x", "d": [1]}, {"a": [1, {"b": 3}], "c": "y", "d": [1, 2]}

    def overlaid(old, new):
        if new is None:
            return old
        if "=" in new:
            return new["="]
        copy = list(old) if isinstance(old, list) else dict(old)
        for key, value in new.items():
            place = int(key) if isinstance(old, list) else key
            copy[place] = overlaid(copy[place], value)
        return copy

    assert overlaid(light, difference(light, dark)) == dark
    assert difference(light, light) is None
    stored = figures_of(html_report(report(steps=(500,))))
    for entry in stored.values():
        assert overlaid(entry["figure"], entry["dark"])["layout"]["paper_bgcolor"] == "#15191f"
