"""Series of other projects: streamed, equal weights and missing steps named, resumable, shared out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hf_models
import pytest
import torch

import interp.foreign
from interp import detect
from interp.errors import DetectionError
from models.errors import CheckpointError

QUICK = {"n_sequences": 2, "period": 6, "repeats": 2, "scores": ["prefix_matching"], "n_maps": 1}
STEPS = (0, 1, 2, 8, 64)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A Pythia-like series; step 2 serves the weights of step 1, as some public series do."""
    folder = tmp_path_factory.mktemp("series") / "pythia"
    model = hf_models.gpt_neox()
    for step in STEPS:
        if step != 2:
            with torch.no_grad():
                model.gpt_neox.layers[0].attention.query_key_value.weight.mul_(0.9)
        model.save_pretrained(folder / f"step{step}")
    return folder


@pytest.fixture
def series(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "pythia"))


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The names of the revisions that are loaded."""
    names: list[str] = []
    load = interp.foreign.open_foreign

    def counted(path, **options):
        names.append(Path(path).name)
        return load(path, **options)

    monkeypatch.setattr(interp.foreign, "open_foreign", counted)
    return names


def _plain(report) -> list:
    return [(c.step, c.weight_sha256, c.same_weights_as_step, c.heads) for c in report.checkpoints]


def test_equal_weights_are_loaded_once_and_named(series, opened):
    report = detect(series, **QUICK)
    assert [c.step for c in report.checkpoints] == list(STEPS)
    assert opened == ["step0", "step1", "step8", "step64"]
    assert [c.same_weights_as_step for c in report.checkpoints] == [None, None, 1, None, None]
    assert len({c.weight_sha256 for c in report.checkpoints}) == 4
    assert report.checkpoints[2].heads == report.checkpoints[1].heads != report.checkpoints[3].heads
    assert "step 2 has the same weights as step 1" in report.notes
    assert report.model["reader"] == "own" and report.model["architecture"] == "gpt_neox"
    assert (report.model["dtype"], report.model["norm_folding"], report.model["tied"]) == (
        "float32",
        "none",
        False,
    )


def test_missing_and_unreadable_steps_are_named(series):
    (series / "step8" / "model.safetensors").unlink()
    (series / "step8" / "pytorch_model.bin").write_bytes(b"pickled")
    (series / "notes").mkdir()
    shutil.copytree(series / "step1", series / "main")
    report = detect(series, steps="1,2,4,8,16,64", **QUICK)
    assert [c.step for c in report.checkpoints] == [1, 2, 64]
    assert report.missing_steps == (4, 16)
    assert "missing steps: 4, 16" in report.notes
    assert any(note.startswith("left out: step 8: ") and "pickled" in note for note in report.notes)
    assert "left out of the series: main: no step in the name" in report.notes
    with pytest.raises(DetectionError, match="no checkpoint at steps 5; there are: 0, 1, 2, 8, 64"):
        detect(series, steps="5", **QUICK)


def test_nothing_readable_is_an_error(series):
    for folder in series.iterdir():
        (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        CheckpointError, match="no checkpoint can be read; step 0: .*not a readable safetensors"
    ) as error:
        detect(series, **QUICK)
    assert "\n" not in str(error.value)


def test_resumed_run_computes_only_what_is_left(series, opened, tmp_path, monkeypatch):
    whole = detect(series, **QUICK)
    opened.clear()
    load = interp.foreign.open_foreign

    def stopped(path, **options):
        if Path(path).name == "step8":
            raise KeyboardInterrupt
        return load(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(interp.foreign, "open_foreign", stopped)
        with pytest.raises(KeyboardInterrupt):
            detect(series, resume=tmp_path / "kept", **QUICK)
    assert opened == ["step0", "step1"]
    opened.clear()
    resumed = detect(series, resume=tmp_path / "kept", **QUICK)
    assert opened == ["step8", "step64"]
    assert _plain(resumed) == _plain(whole)
    opened.clear()
    again = detect(series, resume=tmp_path / "kept", **QUICK)
    assert opened == []
    assert _plain(again) == _plain(whole)
    assert again.attention_maps == whole.attention_maps and again.probe == whole.probe


def test_kept_scores_are_those_of_the_weights_and_settings(series, opened, tmp_path):
    detect(series, resume=tmp_path / "kept", **QUICK)
    opened.clear()
    detect(series, resume=tmp_path / "kept", **{**QUICK, "seed": 1})
    assert opened == ["step0", "step1", "step8", "step64"]
    opened.clear()
    shutil.rmtree(series / "step8")
    shutil.copytree(series / "step0", series / "step8")
    report = detect(series, resume=tmp_path / "kept", **QUICK)
    # Other weights stand under step 8 now: they are those of step 0.
    assert opened == [] and report.checkpoints[3].same_weights_as_step == 0
    for kept in (tmp_path / "kept").glob("step_00000000.*"):
        kept.write_text("{}")
    with pytest.raises(DetectionError, match="cannot be used .*remove it to compute the step again"):
        detect(series, resume=tmp_path / "kept", **QUICK)


SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from interp import detect
from interp.ranks import current_ranks
ranks = current_ranks()
report = detect(sys.argv[1], resume=sys.argv[2], **json.loads(sys.argv[3]))
if ranks.is_main:
    print("REPORT" + json.dumps(report.to_dict()))
print(f"RANK {ranks.rank} of {ranks.world}", flush=True)
"""


def test_two_processes_give_the_report_of_one(series, tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    # --multi_gpu is accelerate's way to start several processes; without GPUs too.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(tmp_path / "run.py"), str(series), str(tmp_path / "kept"), json.dumps(QUICK)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "RANK 0 of 2" in done.stdout and "RANK 1 of 2" in done.stdout
    line = next(line for line in done.stdout.splitlines() if "REPORT" in line)
    shared = json.loads(line.split("REPORT", 1)[1].split("RANK")[0])
    alone = json.loads(json.dumps(detect(series, **QUICK).to_dict()))
    for key in ("checkpoints", "mixers", "probe", "phase_transition", "notes"):
        assert shared[key] == alone[key]
    # Each rank kept its own part.
    assert len(list((tmp_path / "kept").glob("step_*.json"))) == len(STEPS)


def test_other_architectures_go_through_the_bridge_and_it_is_said(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=20,
        max_position_embeddings=48,
        bos_token_id=0,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    report = detect(tmp_path, **QUICK)
    assert report.model["reader"] == "TransformerBridge"
    assert "model_type 'qwen2'; read here: gpt2, gpt_neox, llama, mamba, mamba2" in report.model["reason"]
    assert report.mixers == ("softmax",)
