"""Going on with a run: nothing is trained over, one process writes at a time, changed files are refused."""

import json
import os
import shutil

import pytest
import safetensors.torch
import torch
from small_runs import small_run

from experiments.cli import main
from experiments.config import with_settings
from experiments.folder_lock import FolderLock
from experiments.train import train
from models.errors import CheckpointError

CONFIG = small_run(steps=40, every=20)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    train(CONFIG, out, name="tiny")
    return out


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize(
    ("lacking", "message"),
    [((0, 20, 40), "train in another folder"), ((40,), "remove the checkpoints after step 20")],
)
def test_checkpoints_without_training_state_are_not_trained_over(run, lacking, message):
    for step in lacking:
        (run / f"step_{step:08d}/training.json").unlink()
    before = contents(run)
    with pytest.raises(CheckpointError, match=f"step_00000040 has no training.json.*{message}"):
        train(CONFIG, run, resume=True)
    assert contents(run) == before


def test_a_run_killed_before_its_first_checkpoint_begins_anew(run, trained):
    for folder in run.glob("step_*"):
        shutil.rmtree(folder)
    train(CONFIG, run, resume=True)
    weights = "step_00000040/model.safetensors"
    assert contents(run)[weights] == contents(trained)[weights]


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_is_written_by_another_process_is_left_alone(run, resume):
    if not resume:
        shutil.rmtree(run)
        run.mkdir()
    (run / ".tmp-run.json").write_text("of the other process")
    before = contents(run)
    other = FolderLock(run)
    other.take()
    said = rf"being written by another training \(process {os.getpid()} on"
    with pytest.raises(CheckpointError, match=said):
        train(CONFIG, run, resume=resume)
    other.release()
    assert contents(run) == before
    train(CONFIG, run, resume=resume)
    assert not (run / ".lock").exists()


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("experiments.folder_lock.fcntl.flock", none)
    train(small_run(steps=2, every=2), tmp_path / "run")
    assert not (tmp_path / "run/.lock").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors"])
def test_files_of_another_step_are_refused(run, name):
    shutil.copy(run / "step_00000020" / name, run / "step_00000040" / name)
    with pytest.raises(CheckpointError, match=f"step_00000040/{name} is not the file that was saved"):
        train(CONFIG, run, resume=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step_00000040/config.json", "another model than the run trains: "),
        ("eval.safetensors", "other windows than the run's data gives now"),
    ],
)
def test_a_changed_model_or_other_windows_are_refused(run, name, message):
    path = run / name
    if path.suffix == ".safetensors":
        tokens = safetensors.torch.load_file(path)["tokens"]
        safetensors.torch.save_file({"tokens": tokens + 1}, path)
    else:
        values = json.loads(path.read_text())
        key = next(key for key in values if "eps" in key)
        path.write_text(json.dumps({**values, key: 0.5}))
    before = contents(run)
    with pytest.raises(CheckpointError, match=message):
        train(CONFIG, run, resume=True)
    assert contents(run) == before
    if path.suffix == ".safetensors":
        path.unlink()
        train(CONFIG, run, resume=True)
        assert path.is_file()


def test_runs_without_digests_are_resumed(run):
    record = run / "step_00000040/training.json"
    values = json.loads(record.read_text())
    assert values.pop("tensors_sha256").keys() == {"model.safetensors", "training.safetensors"}
    record.write_text(json.dumps(values))
    train(CONFIG, run, resume=True)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("exp_avg.embed.W_E", lambda t: t.half(), "has dtype torch.float16, the model's is torch.float32"),
        ("step.embed.W_E", lambda t: t.long(), "has dtype torch.int64, accepted is torch.float32"),
        ("exp_avg.embed.W_E", lambda t: t * torch.nan, "holds NaN or infinite values"),
        ("exp_avg_sq.embed.W_E", lambda t: t + torch.inf, "holds NaN or infinite values"),
        ("exp_avg_sq.embed.W_E", lambda t: 0 * t - 1, "holds -1; accepted: 0 or more"),
        ("exp_avg.embed.W_E", lambda t: t[:-1], "has shape"),
        ("step.embed.W_E", lambda t: t[None], r"has shape \(1,\), accepted is \(\)"),
    ],
)
def test_an_optimiser_state_that_does_not_fit_is_named(run, name, change, message):
    folder = run / "step_00000040"
    values = json.loads((folder / "training.json").read_text())
    del values["tensors_sha256"]
    (folder / "training.json").write_text(json.dumps(values))
    state = safetensors.torch.load_file(folder / "training.safetensors")
    state[name] = change(state[name])
    safetensors.torch.save_file(state, folder / "training.safetensors")
    with pytest.raises(CheckpointError, match=f"the optimiser's {name} {message}"):
        train(CONFIG, run, resume=True)


@pytest.mark.parametrize("place", ["experiments.train.LanguageModel", "experiments.train.evaluate"])
@pytest.mark.parametrize("error", [MemoryError("cannot allocate"), RuntimeError("odd"), KeyboardInterrupt()])
def test_a_start_that_fails_before_its_first_checkpoint_leaves_nothing(tmp_path, monkeypatch, place, error):
    def fail(*_, **__):
        raise error

    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new", tmp_path / "empty"):
        with monkeypatch.context() as patched:
            patched.setattr(place, fail)
            with pytest.raises(type(error)):
                train(CONFIG, out)
        assert out.exists() == (out.name == "empty") and not (out.exists() and any(out.iterdir()))
        train(small_run(steps=2, every=2), out)


def test_a_resumed_run_that_fails_keeps_its_files(run, monkeypatch):
    before = contents(run)

    def fail(*_, **__):
        raise RuntimeError("odd")

    monkeypatch.setattr("experiments.train.build_optimiser", fail)
    with pytest.raises(RuntimeError):
        train(CONFIG, run, resume=True)
    assert contents(run) == before


def test_the_command_goes_on_without_run(tmp_path, capsys):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(small_run(steps=4, every=2).to_dict()))
    out = ["--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main([str(path), *out, "--set", "optimiser.lr=0.01"]) == 0
    first = capsys.readouterr().out
    path.unlink()
    assert main([*out, "--resume"]) == 0
    assert capsys.readouterr().out == first
    assert main([*out, "--resume", "--set", "optimiser.lr=0.02"]) == 1
    assert "optimiser.lr: 0.01 -> 0.02" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "none holds no run.json, so there is nothing to resume" in capsys.readouterr().err


def test_a_stopped_run_prints_the_command_that_goes_on(tmp_path, capsys, monkeypatch):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(with_settings(CONFIG, ["training.threads=1"]).to_dict()))
    out = tmp_path / "a run"
    words = [str(path), "--out", str(out), "--device", "cpu", "--quiet"]

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("experiments.train.loss_weights", stopped)
        assert main(words) == 130
    said = capsys.readouterr().err.strip()
    assert said.startswith("train-lm: stopped; this goes on from the last checkpoint: ")
    assert said.endswith(f"--out '{out}' --resume --device cpu --quiet")
    assert main(["--out", str(out), "--resume", "--device", "cpu", "--quiet"]) == 0
    assert (out / "step_00000040").is_dir()
    with monkeypatch.context() as patched:
        patched.setattr("experiments.train.evaluate", stopped)
        assert main([str(path), "--out", str(tmp_path / "new"), "--quiet", "--device", "cpu"]) == 130
    assert "stopped before the first checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
