"""The offset tables: jobs, what is kept, means over seeds, onsets minus control; one small run."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from experiments import calibrate_null, offset_table, offset_text_table, recall_interchange
from experiments.data.config import RecallConfig
from experiments.runs import load_run
from experiments.seed_interval import cell, over_seeds
from experiments.trained_runs import Job, trained
from models.errors import ConfigError


def test_every_run_of_the_tables_exists():
    for run in (*offset_table.RUNS, *offset_text_table.RUNS, *recall_interchange.RUNS):
        assert load_run(run).description


def test_a_job_sets_its_seeds_and_keeps_the_windows():
    config = Job(run="copy-softmax", seed=2, settings=("training.steps=7",)).config("cpu")
    assert (config.seeds.init, config.seeds.data, config.seeds.eval, config.training.steps) == (2, 2, 0, 7)
    assert config.checkpoints.windows == () and not config.training.cuda_graph
    on_gpu = Job(run="copy-softmax", seed=0, series=True).config("cuda")
    assert on_gpu.training.cuda_graph and on_gpu.training.precision == "fp32"
    assert on_gpu.checkpoints == load_run("copy-softmax").checkpoints


def test_intervals_over_seeds():
    found = over_seeds([1.0, 2.0, 3.0, None])
    assert found.mean == 2 and found.n == 3
    assert found.half_width == pytest.approx(4.30 / math.sqrt(3), rel=1e-3)
    assert cell([0.5]) == "0.50" and cell([None]) == "–"


def test_a_small_run_is_trained_measured_kept_and_not_trained_again(tmp_path, capsys):
    arguments = [
        "--out",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path),
        "--only",
        "periodic-linear-conv-1l",
    ]
    arguments += ["--seeds", "0", "--steps", "3", "--device", "cpu", "--set", "training.batch=4"]
    assert offset_table.main(arguments) == 0
    (line,) = (tmp_path / "offset_table.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (
        row["step"] == 3 and row["layers"][0]["offsets"] == list(range(-2, 6)) and len(row["taps_nats"]) == 4
    )
    assert row["n_induction"] == 0 and abs(row["effect_nats"]) < 0.1
    table = (tmp_path / "offset_table.md").read_text()
    assert "| periodic-linear-conv-1l | 1 | 3 |" in table
    capsys.readouterr()
    assert offset_table.main(arguments) == 0
    assert "training" not in capsys.readouterr().out
    assert len((tmp_path / "offset_table.jsonl").read_text().splitlines()) == 1
    job = Job(run=row["run"], seed=0, settings=tuple(row["settings"]))
    found = dict(trained([job], tmp_path / "runs", device="cpu"))
    assert found[job].name == "periodic-linear-conv-1l-s0"


def test_jobs_come_as_they_are_trained_and_an_error_is_raised(tmp_path):
    common = ("training.steps=2", "training.batch=4")
    jobs = [Job(run="periodic-softmax-1l", seed=seed, settings=common) for seed in (0, 1)]
    found = dict(trained(jobs, tmp_path, device="cpu", n_processes=2))
    assert set(found) == set(jobs) and all((folder / "run.json").is_file() for folder in found.values())
    bad = Job(run="periodic-softmax-1l", seed=2, settings=(*common, "training.cuda_graph=true"))
    with pytest.raises(ConfigError, match="cuda_graph is true"):
        list(trained([bad], tmp_path, device="cpu", n_processes=2))


def test_a_job_killed_before_its_first_checkpoint_is_trained(tmp_path):
    job = Job(run="periodic-softmax-1l", seed=0, settings=("training.steps=2", "training.batch=4"))
    (folder,) = dict(trained([job], tmp_path, device="cpu")).values()
    for step in folder.glob("step_*"):
        shutil.rmtree(step)
    assert dict(trained([job], tmp_path, device="cpu")) == {job: folder}
    assert (folder / "step_00000002/model.safetensors").is_file()


def test_unknown_runs_are_refused(tmp_path, capsys):
    assert offset_table.main(["--out", str(tmp_path), "--only", "copy-rnn"]) == 2
    assert "unknown runs copy-rnn; accepted: periodic-softmax" in capsys.readouterr().err


def _row(run, seed, gain, learned, steps):
    rng = np.random.default_rng(seed)
    noise = 0.01 * rng.standard_normal((2, len(steps), 8))
    return {
        "run": run,
        "seed": seed,
        "series": {
            "steps": list(steps),
            "order_gain": (np.asarray(gain)[: len(steps), None] + noise[0]).tolist(),
            "in_context_learning": (np.asarray(learned)[: len(steps), None] + noise[1]).tolist(),
        },
    }


def test_onsets_subtract_the_control():
    steps = np.array([0, *np.unique(np.geomspace(10, 4000, 24).astype(int))])
    rise = 1 / (1 + np.exp(-(np.log(steps.clip(1)) - np.log(500)) / 0.15))
    late = 1 / (1 + np.exp(-(np.log(steps.clip(1)) - np.log(1500)) / 0.15))
    drift = -0.1 * np.log1p(steps) / np.log(4000)
    rows = [_row("gpu-text-softmax-1l", seed, 0 * rise, drift, steps) for seed in (0, 1)]
    rows += [_row("gpu-text-softmax", seed, 3 * rise, drift - 0.4 * late, steps[:-1]) for seed in (0, 1)]
    found = offset_text_table.onsets(rows)
    null = found["gpu-text-softmax-1l"]
    assert null["raw"] is None and null["minus_control"] is None
    assert null["icl_minus_control_nats"] == pytest.approx([0, 0], abs=0.02)
    net = found["gpu-text-softmax"]["minus_control"]
    assert net["order_gain"]["midpoint_step"] == pytest.approx(500, rel=0.2)
    assert net["in_context_learning"]["midpoint_step"] == pytest.approx(1500, rel=0.2)
    low, high = net["lead_steps"]
    assert net["lead_of"] == ["order_gain", "in_context_learning"] and 0 < low < high
    assert found["gpu-text-softmax"]["icl_minus_control_nats"] == pytest.approx([-0.4, -0.4], abs=0.05)
    assert "none" in "\n".join(offset_text_table._onset_lines(found))


def test_a_small_difference_to_the_control_is_dated_and_none_is_not():
    steps = np.array([0, *np.unique(np.geomspace(10, 4000, 40).astype(int))])
    rise = 1 / (1 + np.exp(-(np.log(steps.clip(1)) - np.log(500)) / 0.15))
    flat = 0 * rise
    rows = [_row("gpu-text-softmax-1l", seed, flat, flat, steps) for seed in (0, 1)]
    rows += [_row("gpu-text-softmax", seed, 3 * rise, -0.08 * rise, steps) for seed in (2, 3)]
    rows += [_row("gpu-text-mamba2", seed, 3 * rise, flat, steps) for seed in (4, 5)]
    for row in rows:
        row["seed"] %= 2
    found = offset_text_table.onsets(rows)
    assert found["gpu-text-softmax"]["raw"]["in_context_learning"] is None
    net = found["gpu-text-softmax"]["minus_control"]["in_context_learning"]
    assert net["midpoint_step"] == pytest.approx(500, rel=0.3)
    assert found["gpu-text-mamba2"]["minus_control"]["in_context_learning"] is None


def test_recall_questions_are_sound():
    recall = recall_interchange.questions(RecallConfig(seq=64, d_vocab=64), seed=3, n=32)
    rows = torch.arange(32)
    assert bool((recall.tokens[rows, recall.key] < 32).all()) and bool(
        (recall.corrupted[rows, recall.key] < 32).all()
    )
    # The corrupted key is nowhere else, and nothing else changed.
    assert bool(((recall.corrupted == recall.corrupted[rows, recall.key][:, None]).sum(1) == 1).all())
    assert int((recall.tokens != recall.corrupted).sum()) == 32


def test_the_null_report_counts_what_passes():
    rows = [
        {"mixer": "linear", "depth": 1, "std": 0.02, "trained": False, "effect_nats": 0.001 * n,
         "effect_se_nats": 0.001, "copying": None if n else -0.5, "passes": n == 9}
        for n in range(10)
    ]  # fmt: skip
    text = calibrate_null.report(rows)
    assert "Passed by mistake: 1 of 10" in text and "below 0.3942 with 95%" in text
    assert "| untrained, std 0.02 | 10 |" in text


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (offset_table, ["--only", "copy-softmax", "--steps", "0"], "steps is 0"),
        (offset_table, ["--only", "copy-softmax", "--set", "training.stepz=1"], "no setting"),
        (offset_table, ["--report"], "holds no runs"),
        (offset_text_table, ["--report"], "holds no runs"),
        (recall_interchange, ["--only", "recal"], "no run named 'recal'"),
        (recall_interchange, ["--processes", "0"], "0 processes; accepted: 1 or more"),
    ],
)
def test_wrong_options_of_the_tables_are_one_line(tmp_path, capsys, module, arguments, message):
    common = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert module.main([*common, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err
    assert not list(tmp_path.glob("results/*.md"))
