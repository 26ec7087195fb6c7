"""Detection on a GPU gives it all of a checkpoint's work before it waits for any of it."""

import pytest
import torch

from experiments.recipes import attention_only
from interp import detect, detection
from models import LanguageModel
from models.checkpoint import save_model
from models.config import LinearAttentionConfig, Mamba1Config, Mamba2Config, SoftmaxAttentionConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIXERS = {
    "softmax": SoftmaxAttentionConfig(n_heads=4),
    "linear": LinearAttentionConfig(n_heads=4, d_conv=4),
    "mamba1": Mamba1Config(),
    "mamba2": Mamba2Config(n_heads=8, d_state=16),
}


@pytest.mark.parametrize("name", MIXERS)
def test_no_checkpoint_after_the_first_is_waited_for_while_it_is_measured(name, tmp_path, monkeypatch):
    model = LanguageModel(
        attention_only((MIXERS[name],) * 2, d_model=64, d_vocab=64, n_ctx=64, init_std=0.1)
    )
    for step in range(4):
        model.reset_parameters(torch.Generator().manual_seed(step))
        save_model(tmp_path / f"step_{step:08d}", model)
    measure, steps = detection.begin_measuring, []

    def watched(subject, plan, checkpoint, *args):
        steps.append(checkpoint.step)
        # What follows from the probe alone is computed with the first.
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 1 else "default")
        try:
            return measure(subject, plan, checkpoint, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    expected = detect(tmp_path)
    monkeypatch.setattr(detection, "begin_measuring", watched)
    found = detect(tmp_path, device="cuda")
    assert steps == [0, 1, 2, 3]
    for one, two in zip(found.checkpoints, expected.checkpoints, strict=True):
        assert one.order_gain_nats == pytest.approx(two.order_gain_nats, abs=1e-4)
        for head, other in zip(one.heads, two.heads, strict=True):
            assert head.prefix_matching == pytest.approx(other.prefix_matching, abs=1e-5)
            assert head.copying == pytest.approx(other.copying, abs=1e-3)
            assert head.copying_eigenvalue == pytest.approx(other.copying_eigenvalue, abs=1e-5)
            assert head.cut_by_offset_nats == pytest.approx(other.cut_by_offset_nats, abs=1e-5)
