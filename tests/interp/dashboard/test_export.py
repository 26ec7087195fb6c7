"""The exported page as a file: its numbers, its choices, its size, and how it is written."""

import base64
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from interp import detect
from interp.dashboard import export
from interp.dashboard.app import make_app
from interp.dashboard.cli import main
from interp.dashboard.desk import Desk
from interp.dashboard.export import export_page, inert
from interp.dashboard.export_choice import choose
from interp.dashboard.export_numbers import LEVELS, n_maps, packed
from interp.dashboard.export_numbers import places as every_place
from interp.dashboard.prompt import PromptSpec
from interp.dashboard.selection import Selection
from interp.errors import DetectionError

NASTY = "</script><script>alert(1)</script>\"'&<!--\n\u2028\u202eשלום🙂"


def script(text, name):
    """The JSON of one of the page's data elements."""
    return json.loads(
        re.search(rf'<script id="{name}" type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    )


def unpacked(entry, n):
    whole = np.frombuffer(base64.b64decode(entry["bytes"]), "<i2").astype(float)
    weights = np.zeros((n, n))
    weights[np.tril_indices(n)] = whole / LEVELS * entry["limit"]
    return weights


@pytest.fixture(scope="module")
def wired(wired_run, tmp_path_factory):
    """The page of the hand-wired run, and its text."""
    file = tmp_path_factory.mktemp("export") / "page.html"
    size = export_page(str(wired_run), file)
    text = file.read_text("utf-8")
    assert size == file.stat().st_size
    return text


def test_the_page_holds_the_weights_that_the_dashboard_shows(wired, wired_run):
    data = script(wired, "data")["models"][0]
    assert data["steps"] == [0, 5, 10, 20, 40] and data["first"] == [1, 2]
    desk = Desk([str(wired_run)])
    spec = choose(desk)[0].specs[0]
    for step, layer, unit in ((4, 1, 2), (0, 1, 2), (4, 0, 3)):
        sheet = desk.sheet(Selection(step=step, layer=layer, reading="pattern"), spec)
        entry = data["maps"][f"0.{step}.{layer}.pattern"]["units"][str(unit)]
        exact = sheet.of(unit)
        np.testing.assert_allclose(unpacked(entry, len(exact)), exact, atol=np.abs(exact).max() / LEVELS)
    # The circuit is there at the end, and not at the start.
    induction = [unpacked(data["maps"][f"0.{s}.1.pattern"]["units"]["2"], 100)[60, 36] for s in (0, 4)]
    assert induction[0] < 0.1 and induction[1] == pytest.approx(0.5, abs=0.01)


def test_costs_norms_bars_and_curves_are_those_of_the_views(wired, wired_run):
    data, figures = script(wired, "data")["models"][0], script(wired, "figures")
    desk = Desk([str(wired_run)])
    spec, place = choose(desk)[0].specs[0], Selection(step=4, layer=1, reading="pattern", head=2)
    profile = desk.cuts(place, spec, "probe")
    cut = data["cuts"]["4.1.pattern.2"]
    np.testing.assert_allclose(cut["values"], list(profile.cut.values()), rtol=1e-4)
    assert f"Strongest at offset {profile.best:+d}" in cut["caption"] and profile.best == 1
    norms = desk.states(place, spec)
    np.testing.assert_allclose(data["states"]["0.4.1"]["values"], norms.norms, rtol=1e-4)
    bars = data["weights"]["0.4.1.pattern"]["2"]["values"]
    # Offsets from -2: the fourth is +1.
    assert max(bars) == bars[3] > 0.2
    assert figures["phase-0"]["role"] == "phase" and set(figures["phase-0"]["places"]) == {
        "0",
        "5",
        "10",
        "20",
        "40",
    }
    assert [score for score, _ in data["training"]["matrices"]["pattern"]] == [
        "previous_token",
        "prefix_matching",
    ]


def test_one_file_one_plotly_nothing_from_elsewhere(wired):
    assert wired.count("plotly.js v") == 1
    assert "Content-Security-Policy" in wired and "default-src 'none'" in wired
    # Outside plotly's own source no address is named at all.
    own = re.sub(r"<script>\s*/\*\*?\s*\n?\* plotly\.js.*?</script>", "", wired, flags=re.DOTALL)
    assert len(own) < len(wired) / 3
    assert (
        not re.findall(r'(?:src|href)="(?!data:)[^"]*"', own)
        and "http://" not in own
        and "https://" not in own
    )
    assert len(wired) < 6_000_000


def test_both_readings_of_mamba_and_the_signed_form_are_there(mamba_run, tmp_path):
    file = tmp_path / "mamba.html"
    export_page(str(mamba_run), file, prompts=["1 2 3 1 2 3 1 2"])
    data = script(file.read_text("utf-8"), "data")["models"][0]
    names = {key.split(".", 3)[3] for key in data["maps"] if key.startswith("0.0.1.")}
    assert names == {"ssm", "ssm, signed", "block"}
    assert data["maps"]["0.0.1.ssm, signed"]["signed"] and not data["maps"]["0.0.1.ssm"]["signed"]
    sheet = Desk([str(mamba_run)]).sheet(
        Selection(layer=1, reading="ssm", units="layer", values="signed"),
        PromptSpec(kind="typed", text="1 2 3 1 2 3 1 2"),
    )
    entry = data["maps"]["0.0.1.ssm, signed"]["units"]["0"]
    np.testing.assert_allclose(unpacked(entry, 8), sheet.of(0), atol=np.abs(sheet.of(0)).max() / LEVELS)
    assert [layer["names"] for layer in data["layers"]] == [["L0H0", "L0H1"], ["L1"]]
    assert data["training"] is None


def test_packing_keeps_one_part_in_32767(monkeypatch):
    rng = np.random.default_rng(0)
    weights = np.tril(rng.standard_normal((33, 33))).astype(np.float32)
    entry = packed(weights)
    assert len(base64.b64decode(entry["bytes"])) == 33 * 34 // 2 * 2
    np.testing.assert_allclose(unpacked(entry, 33), weights, atol=np.abs(weights).max() / LEVELS)
    assert np.abs(unpacked(entry, 33) - weights).max() > 0
    assert (unpacked(packed(np.zeros((4, 4))), 4) == 0).all()


def test_chosen_prompts_heads_and_steps_alone_are_there(wired_run, tmp_path):
    file = tmp_path / "page.html"
    export_page(str(wired_run), file, prompts=["3 1 4 1", "5 5"], heads="L1H2,L0", steps="10:20")
    data = script(file.read_text("utf-8"), "data")["models"][0]
    assert [prompt["ids"] for prompt in data["prompts"]] == [[3, 1, 4, 1], [5, 5]]
    assert data["steps"] == [10, 20] and data["first"] == [1, 2]
    assert {layer["layer"]: layer["units"] for layer in data["layers"]} == {0: [0, 1, 2, 3], 1: [2]}
    assert set(data["maps"]) == {
        f"{p}.{s}.{layer}.pattern" for p in (0, 1) for s in (0, 1) for layer in (0, 1)
    }
    # Training has all checkpoints all the same.
    places = script(file.read_text("utf-8"), "figures")["phase-0"]["places"]
    assert set(places) == {"0", "5", "10", "20", "40"}


@pytest.mark.parametrize("length, shape", [(48, (12, 4)), (64, (16, 4)), (128, (25, 4))])
def test_the_default_probe_is_that_of_detect_induction(wired_run, tmp_path, length, shape):
    run = shutil.copytree(wired_run, tmp_path / "run")
    windows = torch.arange(32).repeat(2, 4)[:, :length].contiguous()
    save_file({"tokens": windows}, run / "eval.safetensors")
    (choice,) = choose(Desk([str(run)]))
    probe = detect(str(run), steps="last", scores=["prefix_matching"], n_maps=0).probe
    assert (choice.specs[0].period, choice.specs[0].repeats) == (probe.period, probe.repeats) == shape
    assert len(choice.prompts[0]) == shape[0] * shape[1] <= length
    layout = make_app(Desk([str(run)])).server.test_client().get("/_dash-layout").text
    begins = f"Begins with {shape[0]} \\u00d7 {shape[1]}, as detect-induction does"
    assert f"{begins}: run was trained on sequences of {length} tokens." in layout.replace("×", "\\u00d7")


def test_a_page_opens_on_the_strongest_of_its_heads_or_the_first_named(wired_run):
    desk = Desk([str(wired_run)])
    assert choose(desk, heads="L0,L1")[0].first == (1, 2)
    assert choose(desk, heads="L1H3,L0H1")[0].first == (1, 3)


def test_of_many_heads_the_strongest_are_taken(wired_run, monkeypatch):
    monkeypatch.setattr("interp.dashboard.export_choice.MOST_UNITS", 4)
    monkeypatch.setattr("interp.dashboard.export_choice.N_STRONGEST", 1)
    (choice,) = choose(Desk([str(wired_run)]))
    assert choice.units == {1: (2,)} and choice.first == (1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": "L9H0"}, "head L9H0: the model has layers 0 to 1"),
        ({"heads": "L1H7"}, "head L1H7: layer 1 has heads 0 to 3"),
        ({"heads": "1.2"}, r"head '1.2'; accepted: L<layer>H<head> or L<layer>, with commas"),
        ({"heads": "L1H2,"}, "head ''; accepted"),
        ({"steps": "7"}, "no checkpoint at steps 7; there are: 0, 5, 10, 20, 40"),
        ({"prompts": [""]}, "The prompt is empty"),
        ({"prompts": ["1 abc"]}, "type token ids from 0 to"),
        (
            {"prompts": ["1 " * 129]},
            "The prompt has 129 tokens; the positions that the model has learned: 128",
        ),
    ],
)
def test_what_is_not_there_is_named_and_nothing_is_written(wired_run, tmp_path, options, message):
    with pytest.raises(DetectionError, match=message):
        export_page(str(wired_run), tmp_path / "page.html", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_map_is_drawn_cell_by_cell(mamba_run, tmp_path):
    with pytest.raises(DetectionError, match="a prompt has 513 tokens; an exported page takes 512"):
        export_page(str(mamba_run), tmp_path / "page.html", prompts=["1 " * 513])


def test_too_large_a_choice_is_refused_before_anything_is_computed(mamba_run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_maps", lambda *_: pytest.fail("computed all the same"))
    # Five maps of 512 x 513 / 2 weights for each prompt, 8/3 bytes a weight, and 5.5 MB for the rest.
    prompts = ["1 2 " * 256] * 8
    with pytest.raises(
        DetectionError, match=r"the page would have about 19\.5 MB; accepted: 15 MB; choose fewer"
    ):
        export_page(str(mamba_run), tmp_path / "page.html", prompts=prompts)
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_counts_the_maps_that_are_made(mamba_run, wired_run):
    for run, prompts in ((mamba_run, ["1 2 1 2"]), (wired_run, ["1 2", "3 3"])):
        desk = Desk([str(run)])
        (choice,) = choose(desk, prompts=prompts)
        made = sum(len(choice.units[place.layer]) for place, _ in every_place(desk, choice))
        assert made == n_maps(desk, choice) * len(prompts)


def test_a_finished_page_that_is_too_large_is_not_written(wired_run, tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("before")
    monkeypatch.setattr(export, "_check_size", lambda *_: None)
    monkeypatch.setattr(export, "MOST_BYTES", 1_000_000)
    with pytest.raises(DetectionError, match="accepted: 1 MB"):
        export_page(str(wired_run), tmp_path / "page.html", heads="L1H2", steps="last")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page.html", "before")]


def test_an_interrupted_export_leaves_what_was_there(wired_run, tmp_path, monkeypatch, capsys):
    file = tmp_path / "page.html"
    file.write_text("before")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_states", interrupted)
    assert main([str(wired_run), "--export", str(file), "--steps", "last", "--heads", "L1H2"]) == 130
    assert "interrupted; no page was written" in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page.html", "before")]


def test_the_command_writes_says_and_replaces(wired_run, tmp_path, capsys):
    file = tmp_path / "page.html"
    file.write_text("before")
    options = [
        "--export",
        str(file),
        "--prompt",
        "1 2 1 2",
        "--prompt",
        "3 3",
        "--heads",
        "L1H2",
        "--steps",
        "last",
    ]
    assert main([str(wired_run), *options]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(
        rf"attention-dashboard: {re.escape(str(file))}  \(\d\.\d MB, opens from the file\)\n", said.out
    )
    assert [len(p["ids"]) for p in script(file.read_text("utf-8"), "data")["models"][0]["prompts"]] == [4, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["RUN", "--export", "x.html", "--heads", "L9"], 1, "error: head L9: the model has layers 0 to 1"),
        (["RUN", "--export", "no/such/x.html"], 1, "no such folder"),
        (["nowhere", "--export", "x.html"], 1, "nowhere"),
        (["RUN", "--export", ""], 2, "--export ''; accepted: the name of a file to write"),
        (["RUN", "--export", "-"], 2, "--export '-'; accepted: the name of a file to write"),
        (["RUN", "--export", "."], 1, "'.' is a folder; give the name of a file to write"),
        (["RUN", "--prompt", "1"], 2, "--prompt belongs to --export"),
        (["RUN", "--heads", "L0"], 2, "--heads belongs to --export"),
        (["RUN", "--steps", "last"], 2, "--steps belongs to --export"),
    ],
)
def test_wrong_commands_end_in_one_line(wired_run, tmp_path, monkeypatch, capsys, argv, status, message):
    monkeypatch.chdir(tmp_path)
    argv = [str(wired_run) if word == "RUN" else word for word in argv]
    try:
        found = main(argv)
    except SystemExit as error:
        found = error.code
    said = capsys.readouterr().err.strip()
    assert found == status and message in said.splitlines()[-1]
    assert "Traceback" not in said and list(tmp_path.iterdir()) == []


def test_two_models_are_on_one_page(wired_run, mamba_run, tmp_path, capsys):
    file = tmp_path / "two.html"
    options = ["--export", str(file), "--steps", "last", "--prompt", "1 2 3 1 2 3 1 2", "--heads", "L1"]
    assert main([str(wired_run), str(mamba_run), *options]) == 0
    text = file.read_text("utf-8")
    wired, mamba = script(text, "data")["models"]
    assert wired["name"] == wired_run.name and mamba["name"] == "mixed" and wired["steps"] == [40]
    assert wired["prompts"][0]["tokens"] == mamba["prompts"][0]["tokens"]
    assert set(mamba["maps"]) == {"0.0.1.ssm", "0.0.1.ssm, signed", "0.0.1.block"}
    desk = Desk([str(wired_run), str(mamba_run)])
    spec = PromptSpec(kind="typed", text="1 2 3 1 2 3 1 2")
    for run, model, chosen in (
        (0, wired, Selection(step=4, layer=1, reading="pattern", head=2)),
        (1, mamba, Selection(run=1, layer=1, reading="block", units="layer")),
    ):
        exact = desk.sheet(chosen, spec).of(chosen.head)
        entry = model["maps"][f"0.0.1.{chosen.reading}"]["units"][str(chosen.head)]
        np.testing.assert_allclose(unpacked(entry, 8), exact, atol=np.abs(exact).max() / LEVELS)
        assert {f"map-{run}-0-plain", f"cut-{run}-1", f"state-{run}-0-1"} <= set(script(text, "figures"))
    assert text.count("plotly.js v") == 1 and mamba["training"] is None and wired["training"] is not None


def test_checkpoints_that_are_not_named_are_fewer_where_there_is_no_room(wired_run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FEWER_STEPS", (5, 3, 2))
    # Two heads' maps of a checkpoint: 2 * 5050 weights of 8/3 bytes; room for four checkpoints.
    monkeypatch.setattr(export, "_REST", export.MOST_BYTES - 4 * 2 * 5050 * 8 // 3)
    export_page(str(wired_run), tmp_path / "page.html", heads="L0H1,L1H2")
    model = script((tmp_path / "page.html").read_text("utf-8"), "data")["models"][0]
    assert model["steps"] == [0, 10, 40] and set(model["maps"]) == {
        f"0.{step}.{layer}.pattern" for step in range(3) for layer in (0, 1)
    }


def test_the_model_that_lacks_a_head_is_named(wired_run, mamba_run, tmp_path):
    with pytest.raises(DetectionError, match="head L1H3: layer 1 has heads 0 to 0 in mixed"):
        export_page([str(wired_run), str(mamba_run)], tmp_path / "page.html", heads="L1H3")
    assert list(tmp_path.iterdir()) == []


def test_no_text_ends_the_script_that_holds_it():
    text = inert({"a": NASTY})
    assert "<" not in text and "\u2028" not in text and json.loads(text) == {"a": NASTY}


def test_a_name_that_looks_like_a_placeholder_stays_a_name(wired_run, tmp_path):
    run = tmp_path / "@@DATA@@<b>"
    run.symlink_to(wired_run)
    export_page(str(run), tmp_path / "page.html", heads="L1H2", steps="last", prompts=["1 2"])
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<title>Attention of @@DATA@@&lt;b&gt;</title>" in text and text.count('"levels":32767') == 1
