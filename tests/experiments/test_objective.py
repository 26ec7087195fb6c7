"""Losses of training: those of the logits, on a CPU bit for bit, on a GPU by the fused operator."""

import pytest
import torch
from language_models import CONFIGS, build, tokens
from small_runs import small_run

from experiments.clamping import clamped
from experiments.config import ClampConfig, with_settings
from experiments.objective import autocast, model_losses, token_losses
from experiments.train import train


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_cpu_losses_are_those_of_the_logits_bit_for_bit(precision):
    model, ids = build("softmax", dtype=torch.float32), tokens(3, 9)
    with torch.no_grad(), autocast(torch.device("cpu"), precision):
        logits = model(ids)
        found = model_losses(model, ids)
    assert found.dtype == torch.float32 and found.shape == (3, 8) and found.min() > 0
    assert torch.equal(found, token_losses(logits, ids))
    narrow = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    assert float(found.mean()) == pytest.approx(float(narrow), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "smeared"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_on_a_gpu_losses_are_near_those_of_the_logits(name, precision, bound):
    model, ids = build(name, dtype=torch.float32).cuda(), tokens(3, 9).cuda()
    results = []
    for call in (model_losses, lambda model, ids: token_losses(model(ids), ids)):
        model.zero_grad()
        with autocast(torch.device("cuda"), precision):
            losses = call(model, ids)
        losses.mean().backward()
        results.append((losses.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() < bound * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_clamped_model_is_trained_and_measured(tmp_path):
    pytest.importorskip("transformer_lens")
    config = with_settings(small_run(steps=4, every=2), ["clamp=copy"])
    train(config, tmp_path / "run", device="cuda")
    assert '"held_out_loss_nats"' in (tmp_path / "run/metrics.jsonl").read_text()
    model, ids = build("softmax", dtype=torch.float32).cuda(), tokens(3, 9).cuda()
    clamp = clamped(model, ClampConfig(part="copy", gain=4.0))
    assert torch.equal(model_losses(clamp, ids), token_losses(clamp(ids), ids))
    assert not torch.allclose(model_losses(clamp, ids), model_losses(model, ids), rtol=1e-2)
