"""Checkpoints that are missing, damaged or replaced: what can be read is shown, and the rest is named."""

import json
import re
import shutil
import time

import pytest
from safetensors.torch import load, save_file

from interp.dashboard import scoring as scoring_module
from interp.dashboard.app import make_app
from interp.dashboard.cli import main
from interp.dashboard.desk import Desk
from interp.dashboard.progress_line import ProgressLine
from interp.dashboard.prompt import PromptSpec
from interp.dashboard.run import Run
from interp.dashboard.scoring import Scoring
from interp.dashboard.selection import Selection
from interp.report_sections import escaped

BEST = {"layer": 1, "head": 2, "reading": "pattern"}


@pytest.fixture
def run_folder(wired_run, tmp_path):
    return shutil.copytree(wired_run, tmp_path / "run")


def weights(folder, step):
    return folder / f"step_{step:08d}" / "model.safetensors"


def cut_short(path):
    path.write_bytes(path.read_bytes()[:1000])


def finished(scoring, run, **options):
    """The progress of a scoring that has ended, within a minute."""
    progress = scoring.of(run, **options)
    end = time.monotonic() + 60
    while progress.report is None and progress.error is None:
        assert time.monotonic() < end, progress
        time.sleep(0.02)
        progress = scoring.of(run)
    return progress


def prefix_matching(progress, step):
    (found,) = (one for one in progress.report.checkpoints if one.step == step)
    (head,) = (one for one in found.heads if (one.layer, one.head) == (1, 2))
    return head.prefix_matching


def test_a_run_that_was_replaced_in_place_is_scored_anew(run_folder):
    scoring, run = Scoring(), Run(str(run_folder))
    before = finished(scoring, run)
    assert scoring.of(run) is before and prefix_matching(before, 40) > 0.8
    shutil.copy(weights(run_folder, 0), weights(run_folder, 40))
    after = finished(scoring, run)
    assert after is not before and prefix_matching(after, 40) < 0.2


def test_a_damaged_checkpoint_is_left_out_of_the_scores_and_named(run_folder):
    scoring, run = Scoring(), Run(str(run_folder))
    cut_short(weights(run_folder, 10))
    (run_folder / "step_00000005" / "config.json").write_text("{")
    found = finished(scoring, run)
    assert [one.step for one in found.report.checkpoints] == [0, 20, 40]
    assert found.report.path == str(run_folder)
    assert [said.split(":")[0] for said in found.left_out] == ["step 5", "step 10"]
    assert str(run_folder) in found.left_out[1]


def test_what_failed_is_tried_again_when_asked_for_again(run_folder, monkeypatch):
    scoring, run = Scoring(), Run(str(run_folder))

    def broken(run, told):
        raise ZeroDivisionError("by nothing")

    with monkeypatch.context() as patched:
        patched.setattr(scoring_module, "scored", broken)
        assert finished(scoring, run).error == "ZeroDivisionError: by nothing"
    assert scoring.of(run).error == "ZeroDivisionError: by nothing"
    assert finished(scoring, run, again=True).report is not None


def test_opens_on_the_newest_checkpoint_that_can_be_read(run_folder):
    cut_short(weights(run_folder, 40))
    desk = Desk([str(run_folder)])
    answer = make_app(desk).server.test_client().get("/_dash-layout")
    assert answer.status_code == 200
    assert "run: step 40 cannot be read: " in answer.text and "model.safetensors" in answer.text
    assert '"id":"a-step"' in answer.text and desk.runs[0].newest() == 3
    assert desk.opening(0) == BEST
    # Whole again: the next window opens on it and says nothing.
    shutil.copy(weights(run_folder, 20), weights(run_folder, 40))
    assert "cannot be read" not in make_app(desk).server.test_client().get("/_dash-layout").text
    assert desk.runs[0].newest() == 4


@pytest.mark.parametrize("harm", ["missing", "half", "folder", "config"])
def test_the_page_opens_while_the_newest_is_harmed(run_folder, harm):
    desk = Desk([str(run_folder)])
    client = make_app(desk).server.test_client()
    path = weights(run_folder, 40)
    if harm == "half":
        cut_short(path)
    elif harm == "config":
        (path.parent / "config.json").write_text("{")
    elif harm == "folder":
        shutil.rmtree(path.parent)
    else:
        path.unlink()
    answer = client.get("/_dash-layout")
    assert answer.status_code == 200 and '"id":"a-step"' in answer.text
    assert "run: step 40 cannot be read: " in answer.text
    assert desk.sheet(Selection(step=3, **BEST), PromptSpec(period=10, repeats=3)).of(2)[15, 6] > 0.9


def test_weights_that_come_later_are_taken_in(run_folder, tmp_path):
    shutil.move(weights(run_folder, 40), tmp_path / "later")
    desk = Desk([str(run_folder)])
    assert desk.runs[0].steps == (0, 5, 10, 20) and desk.unread()[0].startswith("run: step 40 cannot be")
    shutil.move(tmp_path / "later", weights(run_folder, 40))
    desk.look_again()
    assert desk.runs[0].newest() == 4 and desk.unread() == []


def test_what_is_no_checkpoint_does_not_keep_the_others_from_opening(run_folder):
    (run_folder / "step_00000020" / "config.json").write_text("{")
    run = Run(str(run_folder))
    assert run.steps == (0, 5, 10, 40) and list(run.refused) == [20]
    found = finished(Scoring(), run)
    assert [one.step for one in found.report.checkpoints] == [0, 5, 10, 40]
    assert found.left_out[0].startswith("step 20: ") and "config.json" in found.left_out[0]


def test_a_page_without_any_checkpoint_says_so(run_folder):
    client = make_app(Desk([str(run_folder)])).server.test_client()
    shutil.rmtree(run_folder)
    answer = client.get("/_dash-layout")
    assert answer.status_code == 200
    assert "No checkpoint can be read: run: the checkpoint of step 40 is gone" in answer.text


def test_an_exported_page_and_its_command_name_what_is_left_out(run_folder, tmp_path, capsys):
    cut_short(weights(run_folder, 10))
    weights(run_folder, 40).unlink()
    page = tmp_path / "page.html"
    words = ["--heads", "L1H2", "--prompt", "1 2 3 1 2 3"]
    assert main([str(run_folder), "--export", str(page), *words]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"attention-dashboard: opening {run_folder} ..."
    left_out = [line for line in said if "left out" in line]
    assert [line.split(":")[2].strip() for line in left_out] == ["left out, step 10", "left out, step 40"]
    text = page.read_text("utf-8")
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    assert data["models"][0]["steps"] == [0, 5, 20]
    for line in left_out:
        assert escaped(line.removeprefix("attention-dashboard: ")) in text


def test_a_page_of_outputs_that_are_not_finite_is_refused(run_folder, tmp_path, capsys):
    tensors = load(weights(run_folder, 20).read_bytes())
    tensors["embed.W_E"].mul_(0).add_(3e38)
    save_file(tensors, weights(run_folder, 20))
    assert main([str(run_folder), "--export", str(tmp_path / "page.html")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("attention-dashboard: error: run, step 20: the model's outputs are not finite")
    assert not (tmp_path / "page.html").exists()


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(capsys):
    with ProgressLine("name", every_s=60) as line:
        for words in ("one", "two", "three"):
            line(words)
        line.warn("that stays")
    assert capsys.readouterr().err == "name: one\nname: that stays\n"
    line = ProgressLine("name", every_s=0)
    line("one"), line("two")
    assert capsys.readouterr().err == "name: one\nname: two\n"
