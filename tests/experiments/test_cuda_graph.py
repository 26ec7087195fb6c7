"""A step captured as a CUDA graph gives the losses of the eager step."""

import json
import shutil

import pytest
import torch
from small_runs import small_run

from experiments.config import with_settings
from experiments.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r[key] for r in records for key in ("loss_nats", "held_out_loss_nats", "grad_norm") if key in r]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_give_the_losses_of_eager_ones(tmp_path, precision):
    config = with_settings(small_run(steps=60, every=20), [f"training.precision={precision}"])
    graphed = with_settings(config, ["training.cuda_graph=true"])
    train(config, tmp_path / "eager", device="cuda")
    train(graphed, tmp_path / "graph", device="cuda")
    eager, graph = losses(tmp_path / "eager"), losses(tmp_path / "graph")
    assert graph == pytest.approx(eager, abs=1e-4 if precision == "fp32" else 2e-2)
    assert eager[-2] < eager[0] - 0.05


def test_a_captured_run_resumes(tmp_path):
    config = with_settings(
        small_run(steps=40, every=20), ["training.cuda_graph=true", "training.precision=fp32"]
    )
    train(config, tmp_path / "run", device="cuda")
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/step_00000040")
    train(config, tmp_path / "run", resume=True, device="cuda")
    assert losses(tmp_path / "run") == pytest.approx(whole, abs=1e-4)
