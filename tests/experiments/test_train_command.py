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

from experiments import progress
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


def test_a_terminal_gets_a_bar(tiny, tmp_path, capsys, monkeypatch):
    with progress.Bar("tiny", 10) as bar:
        bar.update({"step": 10, "loss_nats": 2.0, "tokens_per_s": 1234.5})
        bar.update({"step": 10, "held_out_loss_nats": 1.0})
    assert "10/10 loss 2.000 nats 1,234 tokens/s" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([tiny, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert "━" in capsys.readouterr().err


def test_a_log_gets_a_line_at_each_tenth_and_each_minute(capsys, monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    clock = [0.0]
    lines = progress.Lines("tiny", 1000, start=200)
    for step, seconds in ((210, 1), (299, 2), (301, 3), (320, 4), (330, 65), (1000, 66)):
        clock[0] = seconds
        lines.update({"step": step, "loss_nats": 2.0, "tokens_per_s": 1234.5})
    lines.update({"step": 1000, "held_out_loss_nats": 1.0})
    said = [line.split(":")[2] for line in capsys.readouterr().err.splitlines()]
    assert [words.split()[1] for words in said] == ["301", "330", "1,000"]
    assert said[0] == " step 301 of 1,000, loss 2.000 nats, 1,234 tokens/s"


def test_a_finished_run_resumed_prints_its_line(tiny, tmp_path, capsys):
    arguments = [tiny, "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main([*arguments, "--resume"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--set", "optimiser.rl=1"], 2, "no setting 'optimiser.rl'; did you mean optimiser.lr"),
        (["--set", "optimiser.lr=-1"], 2, "lr is -1"),
        (["--set", 'data={"kind": ["x"]}'], 2, "data.kind is ['x']; accepted: periodic, "),
        (["--set", "training.cuda_graph=true"], 1, "cuda_graph"),
        (["--resume"], 1, "nothing to resume"),
    ],
)
def test_errors_are_one_line(tiny, tmp_path, capsys, arguments, status, message):
    assert main([tiny, "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet", *arguments]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--set", f"optimiser.lr={'[' * 5000}"], "lr is '["),
        (["x" * 5000 + ".json"], "File name too long"),
        (["--resume", "--out", "x" * 5000], "File name too long"),
    ],
)
def test_words_that_are_too_long_are_one_line(tiny, tmp_path, capsys, words, message):
    words = [tiny if word == "RUN" else word for word in words]
    assert main(["--out", str(tmp_path / "run"), *words]) == 2
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


def test_a_run_that_cannot_begin_leaves_nothing(tiny, tmp_path, capsys):
    values = json.loads(Path(tiny).read_text())
    values["model"]["d_vocab"] = 256
    values["data"] = {
        "kind": "text",
        "seq": 16,
        "d_vocab": 256,
        "tokens": "bytes",
        "path": str(tmp_path / "no"),
    }
    Path(tiny).write_text(json.dumps(values))
    command = [tiny, "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet", "--steps", "2"]
    assert main(command) == 1
    assert "no text at" in capsys.readouterr().err and not (tmp_path / "run").exists()
    (tmp_path / "no").write_text("hello world\n\n" * 9000)
    assert main(command) == 0


@pytest.mark.parametrize("setting", ["optimiser.eps=-1", "optimiser.eps=0", f"seeds.init={10**23}"])
def test_numbers_that_cannot_be_used(tiny, tmp_path, capsys, setting):
    assert main([tiny, "--out", str(tmp_path / "run"), "--set", setting]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_out_of_memory_is_one_line(tiny, tmp_path, capsys):
    for setting in ("model.d_vocab=9999999999999", "training.batch=99999999999"):
        words = [tiny, "--out", str(tmp_path / setting), "--device", "cpu", "--quiet", "--set", setting]
        assert main(words) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "out of memory" in error


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 7, "step": 4, "wall_s": 1.0}', None])
def test_damaged_training_state(tiny, tmp_path, capsys, text):
    words = [tiny, "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet"]
    assert main(words) == 0
    (tmp_path / "run/step_old").mkdir()
    (tmp_path / "run/step_old/training.json").write_text("{}")
    log = tmp_path / "run/metrics.jsonl"
    kept = log.read_text()
    log.write_text("3\n")
    assert main([*words, "--resume"]) == 1
    assert "has no record of step 4" in capsys.readouterr().err
    # A broken line after the checkpoint's record is what a kill leaves.
    log.write_text(kept + "{")
    assert main([*words, "--resume"]) == 0
    last = tmp_path / "run/step_00000004"
    if text is None:
        (last / "training.safetensors").unlink()
    else:
        (last / "training.json").write_text(text)
    assert main([*words, "--resume"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(last) in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no CONFIG; accepted: CONFIG = ExperimentConfig"),
        ("CONFIG = {}", "holds a CONFIG that is a dict; accepted: CONFIG = ExperimentConfig"),
        ("CONFIG = ExperimentConfig()", "does not run: NameError"),
    ],
)
def test_a_file_without_a_configuration_says_where_it_comes_from(tmp_path, capsys, text, message):
    path = tmp_path / "own.py"
    path.write_text(text)
    assert main([str(path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert "from experiments.config import ExperimentConfig" in error
