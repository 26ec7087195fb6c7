"""The commands and the example of README.md are there and run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli import main as train_lm
from experiments.config import with_settings
from experiments.runs import load_run, run_names
from experiments.train import train
from experiments.typed_command import typed_command

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """`demo-out` with the run of the example, cut to two steps."""
    folder = tmp_path_factory.mktemp("readme") / "demo-out"
    settings = ["training.steps=2", "checkpoints.log_spaced=0", "checkpoints.windows=[]"]
    config = with_settings(load_run("demo-mamba1"), settings)
    train(config, folder / "demo-mamba1", name="demo-mamba1")
    return folder


def test_the_example_runs(demo, capsys):
    code = _blocks("python")[0]
    step = re.search(r"step_(\d{8})", code)[1]
    assert int(step) == load_run("demo-mamba1").training.steps
    assert len(code.strip().splitlines()) <= 15
    code = code.replace("demo-out", str(demo)).replace(step, "00000002")
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    # Two layers, or one, each in two readings.
    assert lines and all(line.split()[2] in ("ssm", "block") for line in lines)
    cut = _blocks("python")[2].strip().splitlines()
    assert len(cut) == 2
    exec(cut[0], names)
    profile = eval(cut[1], names)
    assert [layer.reading for layer in profile.layers] == ["block"] * len(profile.layers)


def test_the_file_with_a_configuration_is_trained(tmp_path):
    code = _blocks("python")[1]
    assert len(code.strip().splitlines()) <= 8 and "train-lm my_run.py --out my-run" in TEXT
    (tmp_path / "my_run.py").write_text(code)
    words = [str(tmp_path / "my_run.py"), "--out", str(tmp_path / "my-run"), "--steps", "2", "--quiet"]
    assert train_lm([*words, "--set", "training.batch=4", "--device", "cpu"]) == 0
    assert (tmp_path / "my-run/step_00000002").is_dir()


def test_a_foreign_model_is_read_in_place_of_ours(tmp_path):
    from hf_models import gpt2

    from models.language_model import LanguageModel
    from models.pretrained import from_pretrained

    assert 'from_pretrained("openai-community/gpt2")' in TEXT
    gpt2().save_pretrained(tmp_path)
    assert isinstance(from_pretrained(tmp_path), LanguageModel)


def test_the_demo_prints_commands_that_are_there(monkeypatch, tmp_path):
    name = re.search(r"One run alone: (\S+) ", TEXT)[1]
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    assert typed_command("detect-induction", "interp.cli") == f"{python} -m interp.cli"
    script = python.with_name("detect-induction")
    script.touch(mode=0o755)
    assert typed_command("detect-induction", "interp.cli") == name
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    assert typed_command("detect-induction", "interp.cli") == "detect-induction"


def test_it_is_short():
    assert len(TEXT.splitlines()) < 160


@pytest.mark.parametrize("module", ["interp.cli", "experiments.cli", "experiments.cases", "experiments.demo"])
def test_commands_have_help(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("usage:")


def test_make_targets_are_there():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = set(re.findall(r"`make ([a-z]+)", TEXT))
    assert named >= {"demo", "test", "cases", "bench", "lint"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_that_are_linked_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_the_demos_time_is_said_beside_the_installations():
    took = re.search(r"^Took (\d+) s\.", TEXT, re.MULTILINE)[1]
    assert f"in {took} s, after the installation" in TEXT and re.search(r"once, in about \d+ s", TEXT)


def test_demo_output_names_the_runs():
    shown = set(re.findall(r"demo-[a-z0-9]+", TEXT))
    assert {name for name in run_names() if name.startswith("demo-")} <= shown
