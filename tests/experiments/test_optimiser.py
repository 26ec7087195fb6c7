"""Which parameters decay, and the optimiser's state as tensors."""

import pytest
import torch

from experiments.config import OptimiserConfig
from experiments.optimiser import (
    build_optimiser,
    is_decayed,
    load_state_tensors,
    set_learning_rate,
    state_tensors,
)
from models import LanguageModel, LanguageModelConfig, Mamba1Config, Mamba2Config, SoftmaxAttentionConfig
from models.errors import CheckpointError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    mixers = (
        SoftmaxAttentionConfig(n_heads=2, qkv_bias=True, out_bias=True),
        Mamba1Config(d_state=4),
        Mamba2Config(n_heads=2, d_state=4),
    )
    config = LanguageModelConfig(
        d_model=16, n_layers=3, d_vocab=11, n_ctx=16, mixers=mixers, norm="layer", norm_bias=True
    )
    return LanguageModel(config)


def test_only_matrices_decay(model):
    decayed = {n for n, p in model.named_parameters() if is_decayed(n, p)}
    free = {n for n, _ in model.named_parameters()} - decayed
    lasts = {n.rsplit(".", 1)[-1] for n in free}
    assert {"A_log", "D"} <= lasts
    assert not {n for n in decayed if "norm" in n or ".ln" in n or "A_log" in n or ".b_" in n or "bias" in n}
    assert any("dt" in n for n in free) and not any(".dt" in n or "dt_" in n for n in decayed)
    assert "embed.W_E" in decayed and any(n.startswith("unembed") for n in decayed)
    optimiser = build_optimiser(model, OptimiserConfig(weight_decay=0.3), CPU)
    decays = {id(p): g["weight_decay"] for g in optimiser.param_groups for p in g["params"]}
    assert all(decays[id(p)] == (0.3 if n in decayed else 0.0) for n, p in model.named_parameters())


def test_state_round_trip_is_exact(model):
    def run(optimiser, seed):
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        set_learning_rate(optimiser, 0.01)
        optimiser.step()

    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    first = build_optimiser(model, OptimiserConfig(), CPU)
    run(first, 0)
    kept, weights = state_tensors(model, first), {n: p.detach().clone() for n, p in model.named_parameters()}
    run(first, 1)
    straight = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(weights[n])
    second = build_optimiser(model, OptimiserConfig(), CPU)
    load_state_tensors(model, second, kept)
    run(second, 1)
    assert all(torch.equal(p, straight[n]) for n, p in model.named_parameters())
    # The control: without the state the second step differs.
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(weights[n])
    run(build_optimiser(model, OptimiserConfig(), CPU), 1)
    assert not all(torch.equal(p, straight[n]) for n, p in model.named_parameters())
    with pytest.raises(CheckpointError, match="exp_avg"):
        load_state_tensors(model, second, {k: v for k, v in kept.items() if k != "exp_avg.embed.W_E"})
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(start[n])
