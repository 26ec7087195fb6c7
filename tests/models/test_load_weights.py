"""Weights of another checkpoint into a model that is there."""

import pytest
import torch
from language_models import build, tokens

from models.checkpoint import load_weights, save_model
from models.errors import CheckpointError


def test_the_model_becomes_the_other_one(tmp_path):
    model, other = build("softmax"), build("softmax")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 1.5
    save_model(tmp_path / "other", other)
    load_weights(tmp_path / "other", model)
    assert torch.equal(model(tokens()), other(tokens()))


def test_another_model_and_damaged_weights_change_nothing(tmp_path):
    model = build("softmax")
    before = model(tokens())
    save_model(tmp_path / "linear", build("linear"))
    with pytest.raises(CheckpointError, match="another configuration"):
        load_weights(tmp_path / "linear", model)
    save_model(tmp_path / "cut", build("softmax"))
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        load_weights(tmp_path / "cut", model)
    assert torch.equal(model(tokens()), before)
