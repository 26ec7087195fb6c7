"""Which steps are captured as a CUDA graph, and that a captured step gives the losses of the eager one."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from small_runs import small_run

from experiments.config import ExperimentConfig, differing_keys, with_settings
from experiments.data.config import PeriodicConfig
from experiments.train import train
from models.config import LinearAttentionConfig, Mamba1Config, Mamba2Config, SoftmaxAttentionConfig
from models.errors import ConfigError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIXERS = {
    "softmax": SoftmaxAttentionConfig(n_heads=2),
    "linear": LinearAttentionConfig(n_heads=2, d_conv=4),
    "mamba1": Mamba1Config(d_state=8),
    "mamba2": Mamba2Config(n_heads=2, d_state=16),
}


def test_left_open_a_step_is_captured_where_it_can_be():
    config = small_run()
    assert config.training.cuda_graph is None
    assert config.captures_step("cuda", 1)
    assert not config.captures_step("cpu", 1) and not config.captures_step("cuda", 2)
    for setting in ("training.compile=true", "training.accumulation=2", "clamp=copy"):
        assert not with_settings(config, [setting]).captures_step("cuda", 1), setting


def test_an_explicit_request_is_met_or_refused():
    asked = with_settings(small_run(), ["training.cuda_graph=true"])
    assert asked.captures_step("cuda", 1)
    for place in (("cpu", 1), ("cuda", 2)):
        with pytest.raises(ConfigError, match="cuda_graph is true; accepted: only on one CUDA device"):
            asked.captures_step(*place)
    assert not with_settings(small_run(), ["training.cuda_graph=false"]).captures_step("cuda", 1)
    for setting in ("training.compile=true", "training.accumulation=2", "clamp=copy"):
        with pytest.raises(ConfigError, match="cuda_graph"):
            with_settings(asked, [setting])


def test_run_json_of_before_and_after(tmp_path):
    """A run begun when false was the default, or without the key, is resumed by a configuration of today."""
    config = small_run(steps=10, every=5)
    assert ExperimentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    train(config, tmp_path / "run", device="cpu")
    path = tmp_path / "run/run.json"
    record = json.loads(path.read_text())
    assert record["config"]["training"]["cuda_graph"] is None and record["cuda_graph"] is False
    lines = (tmp_path / "run/metrics.jsonl").read_text()
    for old in (False, "absent"):
        record["config"]["training"]["cuda_graph"] = old
        if old == "absent":
            del record["config"]["training"]["cuda_graph"]
        path.write_text(json.dumps(record))
        assert ExperimentConfig.from_dict(record["config"]).training.cuda_graph in (None, False)
        train(config, tmp_path / "run", resume=True, device="cpu")
        assert (tmp_path / "run/metrics.jsonl").read_text() == lines
    one, other = (with_settings(config, [f"training.cuda_graph={x}"]) for x in ("true", "false"))
    assert differing_keys(one.to_dict(), other.to_dict()) == ["training.cuda_graph: True -> False"]


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r[key] for r in records for key in ("loss_nats", "held_out_loss_nats", "grad_norm") if key in r]


def weights(folder, step):
    return safetensors.torch.load_file(folder / f"step_{step:08d}/model.safetensors")


def captured(folder) -> bool:
    return json.loads((folder / "run.json").read_text())["cuda_graph"]


def two_layers(mixer: str, precision: str) -> ExperimentConfig:
    """20 steps of a two-layer model, every loss recorded."""
    data = PeriodicConfig(seq=64, d_vocab=32, period_min=8, period_max=16)
    config = small_run(data, steps=20, every=10, log_every=1, precision=precision)
    config = with_settings(config, ["optimiser.lr=0.01", "optimiser.warmup_steps=2"])
    mixers = (MIXERS[mixer],) * 2
    return config.replace(model=config.model.replace(mixers=mixers, n_layers=2, d_model=32))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("mixer", "precision"), [*((mixer, "bf16") for mixer in MIXERS), ("softmax", "fp32"), ("mamba1", "fp32")]
)
def test_captured_steps_give_the_losses_of_eager_ones_also_resumed(tmp_path, mixer, precision):
    """The same kernels run in the same order: all losses and gradient norms are equal, bit for bit."""
    config = two_layers(mixer, precision)
    train(with_settings(config, ["training.cuda_graph=false"]), tmp_path / "eager", device="cuda")
    train(config, tmp_path / "graph", device="cuda")
    assert captured(tmp_path / "graph") and not captured(tmp_path / "eager")
    eager, graph = losses(tmp_path / "eager"), losses(tmp_path / "graph")
    assert len(eager) == 2 * 20 + 3 and len(set(eager)) > 40
    assert graph == eager
    start, end = (weights(tmp_path / "graph", step) for step in (0, 20))
    assert all(torch.equal(end[name], x) for name, x in weights(tmp_path / "eager", 20).items())
    assert all((end[name] - x).abs().max() > 1e-3 for name, x in start.items())
    shutil.rmtree(tmp_path / "graph/step_00000020")
    train(config, tmp_path / "graph", resume=True, device="cuda")
    assert losses(tmp_path / "graph") == eager
