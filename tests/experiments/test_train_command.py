"""The command `train-lm`: help, list, exit statuses, one line for each error."""

import builtins
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import small_run

from experiments.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(small_run(steps=4, every=2).to_dict()))
    return str(path)


def test_help_needs_no_torch():
    code = "import sys, experiments.cli as c\ntry: c.main(['--help'])\nfinally: print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        seconds.append(time.perf_counter() - began)
        assert "--resume" in done.stdout and done.stdout.strip().endswith("False")
    assert min(seconds) < 0.5


def test_list(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("copy-softmax ") and len(line) > 30 for line in lines)


def test_a_run_prints_one_line(tiny, tmp_path, capsys):
    assert main([tiny, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and "step 4" in captured.out and "nats" in captured.out
    assert "loss" in captured.err
    assert main([tiny, "--out", str(tmp_path / "quiet"), "--device", "cpu", "--quiet", "--steps", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert json.loads((tmp_path / "quiet/run.json").read_text())["config"]["training"]["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--set", "optimiser.rl=1"], 2, "no setting 'optimiser.rl'; did you mean optimiser.lr"),
        (["--set", "optimiser.lr=-1"], 2, "lr is -1"),
        (["--set", "training.cuda_graph=true"], 1, "cuda_graph"),
        (["--resume"], 1, "nothing to resume"),
    ],
)
def test_errors_are_one_line(tiny, tmp_path, capsys, arguments, status, message):
    assert main([tiny, "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet", *arguments]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_unknown_run_and_used_folder(tiny, tmp_path, capsys):
    assert main(["copy-softmix", "--out", str(tmp_path / "run")]) == 2
    assert "did you mean copy-softmax" in capsys.readouterr().err
    (tmp_path / "used").mkdir()
    (tmp_path / "used/thesis.tex").write_text("years of work")
    assert main([tiny, "--out", str(tmp_path / "used"), "--quiet"]) == 1
    assert "is not empty (it holds thesis.tex)" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["thesis.tex"]
    with pytest.raises(SystemExit) as error:
        main([tiny])
    assert error.value.code == 2


def test_tensorboard_missing_is_said(tiny, tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("torch.utils.tensorboard", "tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main([tiny, "--out", str(tmp_path / "run"), "--tensorboard", "--quiet", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tensorboard, which is not installed" in error
    assert not (tmp_path / "run").exists()
