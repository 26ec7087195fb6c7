"""Training: it learns, it resumes bit for bit after SIGKILL, it refuses what it must, it fails cleanly."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_runs import small_run

from experiments.config import with_settings
from experiments.data.config import RecallConfig, TextConfig
from experiments.errors import TrainingError
from experiments.train import train
from models.checkpoint import list_checkpoints, load_model
from models.errors import CheckpointError, ConfigError

TIMES = ("wall_s", "tokens_per_s")
ROOT = Path(__file__).resolve().parents[2]


def metrics(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def same_tensors(a, b):
    a, b = safetensors.torch.load_file(a), safetensors.torch.load_file(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 400 steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("straight") / "run"
    result = train(small_run(steps=400, every=20), out, name="tiny")
    assert result.path == out and result.record["step"] == 400
    return out


def test_files_of_a_run(straight):
    run = json.loads((straight / "run.json").read_text())
    assert run["format"] == 1 and run["name"] == "tiny" and run["seeds"] == {"init": 0, "data": 0, "eval": 0}
    assert run["config"] == small_run(steps=400, every=20).to_dict()
    assert run["versions"]["torch"] == torch.__version__
    assert [step for step, _ in list_checkpoints(straight)] == list(range(0, 401, 20))
    records = metrics(straight)
    assert [r["step"] for r in records] == list(range(0, 401, 5))
    assert {"loss_nats", "lr", "grad_norm", "tokens"} <= records[1].keys()
    assert records[4]["tokens"] == 20 * 8 * 16 and "held_out_repeat_loss_nats" in records[4]
    windows = safetensors.torch.load_file(straight / "eval.safetensors")["tokens"]
    assert windows.shape == (8, 16) and windows.dtype == torch.int32
    folder = straight / "step_00000400"
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "training.json",
        "training.safetensors",
    }


def test_the_loss_falls_and_the_record_is_of_the_saved_weights(straight):
    records = metrics(straight)
    assert records[0]["held_out_loss_nats"] == pytest.approx(torch.log(torch.tensor(16.0)).item(), abs=0.05)
    assert records[-1]["held_out_repeat_loss_nats"] < 0.8 * records[0]["held_out_repeat_loss_nats"]
    tokens = safetensors.torch.load_file(straight / "eval.safetensors")["tokens"].long()
    with torch.no_grad():
        loss = load_model(straight / "step_00000400")(tokens, return_type="loss").item()
    assert loss == pytest.approx(records[-1]["held_out_loss_nats"], abs=1e-5)


def test_killed_and_resumed_is_bit_identical(straight, tmp_path):
    out = tmp_path / "run"
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(small_run(steps=400, every=20).to_dict()))
    command = [sys.executable, "-m", "experiments.cli", str(config), "--out", str(out), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 120
    while not (out / "step_00000040").exists() and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.005)
    with pytest.raises(CheckpointError, match=f"being written by another training .process {child.pid} on"):
        train(small_run(steps=400, every=20), out, resume=True)
    child.send_signal(signal.SIGKILL)
    child.wait()
    # The file of its lock is still there, and locks nobody out.
    assert (out / ".lock").exists()
    steps = [step for step, _ in list_checkpoints(out)]
    assert 40 <= steps[-1] < 400
    # What else a kill can leave: a half-written checkpoint, a record past the checkpoint, a broken last line.
    half = out / f".step_{steps[-1] + 20:08d}.tmp-0badc0de"
    half.mkdir(exist_ok=True)
    (half / "model.safetensors").write_bytes(b"\x10half")
    (out / ".tmp-eval.safetensors").write_bytes(b"half")
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": steps[-1] + 5, "loss_nats": 99.0}) + '\n{"step": 9')
    train(small_run(steps=400, every=20), out, resume=True)
    assert metrics(out) == metrics(straight)
    for name in ("model.safetensors", "training.safetensors"):
        for step in (20, 400):
            folder = f"step_{step:08d}"
            assert same_tensors(out / folder / name, straight / folder / name)
    assert not [p.name for p in out.iterdir() if "tmp" in p.name]


def test_resume_of_a_finished_run_changes_nothing(straight):
    before = (straight / "metrics.jsonl").read_bytes()
    train(small_run(steps=400, every=20), straight, resume=True)
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_resume_refuses_a_log_or_a_checkpoint_that_was_changed(tmp_path):
    config = small_run(steps=40, every=20)
    train(config, tmp_path)
    log = tmp_path / "metrics.jsonl"
    kept = log.read_text()
    for text in (None, kept[: len(kept) // 2]):
        log.unlink() if text is None else log.write_text(text)
        with pytest.raises(CheckpointError, match="metrics.jsonl has no record of step 40"):
            train(config, tmp_path, resume=True)
    assert log.read_text() == kept[: len(kept) // 2]
    log.write_text(kept)
    (tmp_path / "step_00000040").rename(tmp_path / "step_00000050")
    with pytest.raises(CheckpointError, match="step_00000050 holds the state of step 40"):
        train(config, tmp_path, resume=True)


def test_another_seed_gives_other_weights(straight, tmp_path):
    config = with_settings(small_run(steps=20, every=20), ["seeds.data=1"])
    train(config, tmp_path / "data")
    name = "step_00000020/model.safetensors"
    assert not same_tensors(tmp_path / "data" / name, straight / name)
    assert same_tensors(
        tmp_path / "data/step_00000000/model.safetensors", straight / "step_00000000/model.safetensors"
    )
    train(with_settings(small_run(steps=1, every=1), ["seeds.init=1"]), tmp_path / "init")
    assert not same_tensors(
        tmp_path / "init/step_00000000/model.safetensors", straight / "step_00000000/model.safetensors"
    )


def test_refusals(straight, tmp_path):
    config = small_run(steps=400, every=20)
    with pytest.raises(CheckpointError, match=r"is not empty \(it holds eval.safetensors\).*--resume"):
        train(config, straight)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train(config, tmp_path / "none", resume=True)
    with pytest.raises(ConfigError, match="another configuration: optimiser.lr: 0.003 -> 0.1"):
        train(with_settings(config, ["optimiser.lr=0.1"]), straight, resume=True)
    with pytest.raises(ConfigError, match="cuda_graph"):
        train(with_settings(config, ["training.cuda_graph=true"]), tmp_path / "graph", device="cpu")
    assert not (tmp_path / "graph").exists() and not (tmp_path / "none").exists()


def test_accumulation_gives_the_same_update(tmp_path):
    data = RecallConfig(seq=32, d_vocab=32, n_pairs=4)
    train(small_run(data, steps=10), tmp_path / "whole")
    train(small_run(data, steps=10, accumulation=4), tmp_path / "parts")
    whole, parts = metrics(tmp_path / "whole")[-1], metrics(tmp_path / "parts")[-1]
    assert parts["loss_nats"] == pytest.approx(whole["loss_nats"], abs=1e-5)
    assert parts["held_out_loss_nats"] == pytest.approx(whole["held_out_loss_nats"], abs=1e-5)


def test_text_runs_carry_their_tokenizer(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for n in range(6):
        (source / f"{n}.txt").write_text(f"the {n} cat sat on the mat\n" * 20)
    data = TextConfig(seq=16, path=str(source), d_vocab=280)
    train(small_run(data, steps=4, every=2), tmp_path / "run")
    model = load_model(tmp_path / "run/step_00000004")
    assert model.tokenizer.decode(model.tokenizer.encode("the cat sat").ids) == "the cat sat"


def test_a_loss_that_is_not_finite_stops(tmp_path):
    config = with_settings(small_run(steps=200, every=5), ["optimiser.lr=1e30", "optimiser.warmup_steps=0"])
    with pytest.raises(TrainingError, match=r"lower optimiser.lr \(now 1e\+30\).*checkpoints up to step 0"):
        train(config, tmp_path / "run")
    for _, path in list_checkpoints(tmp_path / "run"):
        load_model(path)


def test_a_full_disk_leaves_earlier_checkpoints_intact(tmp_path, capsys):
    from experiments.cli import main

    out = tmp_path / "run"
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(small_run(steps=10, every=5).to_dict()))
    # No file may grow beyond this: step 0 fits, optimiser state (twice the weights) does not.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        status = main([str(config), "--out", str(out), "--quiet", "--device", "cpu"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    lines = capsys.readouterr().err.strip().splitlines()
    assert status == 1 and len(lines) == 1 and "step_00000005 could not be written" in lines[0]
    assert [step for step, _ in list_checkpoints(out)] == [0]
    load_model(out / "step_00000000")
    assert not [p.name for p in out.iterdir() if "tmp" in p.name]
    # With room again, the run goes on from there.
    assert main([str(config), "--out", str(out), "--quiet", "--resume", "--device", "cpu"]) == 0
    assert [step for step, _ in list_checkpoints(out)] == [0, 5, 10]


def test_only_the_last_training_state_is_kept_where_asked(tmp_path):
    config = with_settings(small_run(steps=20), ["checkpoints.training_state=last"])
    train(config, tmp_path / "run")
    kept = [p.parent.name for p in (tmp_path / "run").glob("step_*/training.safetensors")]
    assert kept == ["step_00000020"]
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [0, 10, 20]
