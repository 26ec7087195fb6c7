"""The commands and the example of README.md are there and run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import with_settings
from experiments.runs import load_run, run_names
from experiments.train import train

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def _block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[1]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """`demo-out` with the run of the example, cut to two steps."""
    folder = tmp_path_factory.mktemp("readme") / "demo-out"
    settings = ["training.steps=2", "checkpoints.log_spaced=0", "checkpoints.windows=[]"]
    config = with_settings(load_run("demo-mamba1"), settings)
    train(config, folder / "demo-mamba1", name="demo-mamba1")
    return folder


def test_the_example_runs(demo, capsys):
    code = _block("python")
    step = re.search(r"step_(\d{8})", code)[1]
    assert int(step) == load_run("demo-mamba1").training.steps
    assert len(code.strip().splitlines()) <= 15
    code = code.replace("demo-out", str(demo)).replace(step, "00000002")
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    # Two layers, or one, each in two readings.
    assert lines and all(line.split()[2] in ("ssm", "block") for line in lines)


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


def test_demo_output_names_the_runs():
    shown = set(re.findall(r"demo-[a-z0-9]+", TEXT))
    assert {name for name in run_names() if name.startswith("demo-")} <= shown
