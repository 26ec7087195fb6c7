"""Two processes over gloo give the losses of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import small_run

from experiments.data.config import RecallConfig
from experiments.placement import Placement
from experiments.train import train
from models.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_give_the_losses_of_one(tmp_path):
    config = small_run(RecallConfig(seq=32, d_vocab=32, n_pairs=4), steps=20, accumulation=2)
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config.to_dict()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "experiments.cli", str(path), "--out", str(tmp_path / "two")]
    command += ["--quiet", "--device", "cpu"]
    children = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "ACCELERATE_USE_CPU": "true",
        }
        children.append(
            subprocess.Popen(
                [*command, "--device", "cpu"], env=environment, stderr=subprocess.PIPE, text=True
            )
        )
    train(config, tmp_path / "one", device="cpu")
    errors = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert [r["step"] for r in one] == [r["step"] for r in two]
    for a, b in zip(one, two, strict=True):
        for key in ("loss_nats", "grad_norm", "held_out_loss_nats"):
            if key in a:
                assert b[key] == pytest.approx(a[key], abs=2e-5), (a["step"], key)
    assert one[-1]["loss_nats"] < one[1]["loss_nats"] - 0.01
    assert json.loads((tmp_path / "two/run.json").read_text())["processes"] == 2


def test_a_batch_that_does_not_divide_is_refused():
    import torch

    placement = Placement(device=torch.device("cpu"), rank=1, n_processes=3)
    assert placement.part(9) == (3, 6)
    with pytest.raises(ConfigError, match="training.batch is 8; accepted: a multiple of the 3 processes"):
        placement.part(8)
