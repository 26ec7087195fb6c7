"""Clamps: a broken part of a hand-wired circuit, held at its ideal, gives the circuit's loss back."""

import json

import pytest
import torch
from small_runs import small_run

from experiments.clamping import clamped
from experiments.config import ClampConfig, ExperimentConfig, with_settings
from experiments.runs import load_run
from experiments.train import train
from interp.ideal_patterns import induction_pattern, previous_token_pattern
from interp.sequences import candidates, repeated_tokens
from models.constructed import constructed_model
from models.errors import ConfigError
from models.language_model import next_token_loss

KINDS = ["softmax", "linear", "mamba1", "mamba2"]


def _tokens():
    return repeated_tokens(4, 20, 2, ids=candidates(32)).tokens


def _repeat_loss(forward, tokens) -> float:
    with torch.no_grad():
        return float(next_token_loss(forward(tokens)[:, :-1], tokens, per_token=True)[:, 20:].mean())


def _broken(kind, part, offset):
    """A constructed model without one part of its circuit, and the clamp that stands for it."""
    model, circuit = constructed_model(kind, offset=offset)
    mixer = model.blocks[circuit.layer].attn
    # Mamba-1: the channels that hold values.
    heads = tuple(range(32)) if kind == "mamba1" else (circuit.unit,)
    with torch.no_grad():
        if part == "match" and kind in ("softmax", "linear"):
            mixer.W_Q[circuit.unit].zero_()
        elif part == "match" and kind == "mamba2":
            mixer.in_proj.weight[3 * 128 + circuit.unit * 32 :][:32] = 0
        elif part == "match":
            mixer.x_proj.weight[1 + mixer.d_state :] = 0
        elif part == "copy":
            mixer.W_O[slice(0, 32) if kind == "mamba1" else circuit.unit].zero_()
        elif kind == "softmax":
            model.blocks[0].attn.W_Q[1].zero_()
            return model, ClampConfig(part=part, heads=(1,))
        else:
            width = mixer.conv1d.weight.shape[-1]
            channels = circuit.channels.get("k")
            if channels is None:
                start = 4 * 32 + circuit.unit * 32
                channels = range(start, start + 32)
            mixer.conv1d.weight[channels.start : channels.stop, 0, width - 1 - offset] = 0
            return model, ClampConfig(part=part, offset=offset)
    return model, ClampConfig(part=part, heads=heads, offset=offset, gain=16.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["carry", "match", "copy"])
def test_a_clamp_stands_in_for_the_broken_part(kind, part):
    offset = 1 if kind == "softmax" else 2
    model, clamp = _broken(kind, part, offset)
    tokens = _tokens()
    assert _repeat_loss(model, tokens) > 2
    held = clamped(model, clamp)
    if (kind, part) == ("mamba2", "match"):
        # The hand-wired Mamba-2's weights at a match are large numbers; a pattern of ones writes less.
        assert (held(tokens).argmax(-1)[:, 20:-1] == tokens[:, 21:]).all()
    else:
        assert _repeat_loss(held, tokens) < 0.05
    assert not any(p._forward_hooks for p in model.modules())


def test_patterns():
    tokens = torch.tensor([[3, 5, 3, 5, 9, 3]])
    assert induction_pattern(tokens)[0].argmax(-1).tolist() == [0, 0, 1, 2, 0, 3]
    assert induction_pattern(tokens)[0].sum(-1).tolist() == [0, 0, 1, 1, 0, 1]
    assert induction_pattern(tokens, 2)[0].argmax(-1).tolist() == [0, 0, 2, 3, 0, 4]
    assert previous_token_pattern(6).argmax(-1).tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("part", ["carry", "match", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_what_is_not_clamped(kind, part):
    model, circuit = constructed_model(kind)
    model.train()
    held = clamped(model, ClampConfig(part=part))
    held(_tokens()).square().sum().backward()
    grads = {name: float(p.grad.abs().sum()) for name, p in model.named_parameters() if p.grad is not None}
    assert grads["unembed.weight"] > 0
    assert all(v == v for v in grads.values())


def test_a_clamped_run_trains_and_says_so(tmp_path):
    config = with_settings(small_run(steps=20), ["clamp=match"])
    assert config.clamp == ClampConfig(part="match")
    assert ExperimentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    result = train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["clamp"]["part"] == "match"
    plain = train(small_run(steps=20), tmp_path / "plain")
    assert result.record["held_out_loss_nats"] != plain.record["held_out_loss_nats"]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"part": "match", "layer": 5}, r"clamp.layer is 5; accepted: 0..1"),
        ({"part": "match", "heads": [9]}, r"clamp.heads has 9; accepted: 0..3"),
    ],
)
def test_errors_name_the_value(values, said):
    model, _ = constructed_model("softmax")
    with pytest.raises(ConfigError, match=said):
        clamped(model, ClampConfig.from_dict(values))


def test_more_errors():
    model, _ = constructed_model("linear")
    with pytest.raises(ConfigError, match=r"clamp.offset is 4; accepted: 1..3"):
        clamped(model, ClampConfig(part="carry", offset=4))
    with pytest.raises(ConfigError, match="'previous'"):
        with_settings(small_run(), ["clamp=previous"])
    with pytest.raises(ConfigError, match="cuda_graph"):
        with_settings(small_run(), ["clamp=match", "training.cuda_graph=true"])


def test_named_run():
    assert load_run("copy-softmax-match-clamped").clamp.part == "match"
