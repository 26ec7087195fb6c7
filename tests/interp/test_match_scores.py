"""Fused sums over matching sources: their labels, the kernels' numbers, and where detection uses them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from language_models import build

from interp import detect, edge_scores, match_scores, prefix_matching
from interp.cli import main
from interp.sequences import RepeatedTokens, repeated_tokens
from interp.subject import LanguageModelSubject
from models import LanguageModel, LanguageModelConfig
from models.config import LinearAttentionConfig, Mamba2Config, RopeConfig, SoftmaxAttentionConfig

OFFSETS = (1, 2, 3)


def by_labels(pattern, dest, src):
    """Sum of the pattern over label matches at or before the row."""
    match = (dest[:, :, None] == src[:, None, :]).tril()
    return (pattern * match[:, None]).sum(-1)


def probes():
    tokens = torch.tensor([[1, 2, 1, 1, 3, 2, 2, 4, 1, 2], [5, 5, 5, 1, 2, 1, 2, 3, 4, 5]])
    yield RepeatedTokens(tokens=tokens, period=5, repeats=2)
    yield repeated_tokens(2, 5, 3, ids=torch.arange(1, 11), bos=0, seed=3)


@torch.no_grad()
@pytest.mark.parametrize("probe", list(probes()), ids=["any tokens", "tiled after BOS"])
def test_labels_select_the_targets_of_the_dense_score(probe):
    found = []
    LanguageModelSubject(build("softmax")).visit(probe.tokens, lambda view: found.extend(view.readings))
    pattern = found[0].weights()
    for offset in OFFSETS:
        weights = prefix_matching.target_weights(pattern, probe, offset=offset)
        labels = match_scores.follower_labels(probe, offset)
        torch.testing.assert_close(by_labels(pattern, *labels), weights.sum(-1))
        filled = prefix_matching.filled_targets(probe, offset)
        assert match_scores._rows_with_target(probe, offset).tolist() == filled.any(-1).sum(-1).tolist()
    nearest = prefix_matching.target_weights(pattern, probe)[..., 0]
    torch.testing.assert_close(by_labels(pattern, *match_scores.latest_labels(probe)), nearest)
    all_of_them = by_labels(pattern, *match_scores.follower_labels(probe, 1))
    assert (nearest - all_of_them).abs().max() > 1e-3


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    folder = Path(__file__).parent / "interpreted"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-x", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout


def test_help_names_the_length(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"longer than {edge_scores.LINEAR_MEMORY_ABOVE:,} tokens" in said
    assert "fused Triton kernels" in said


MIXERS = {
    "softmax": SoftmaxAttentionConfig(n_heads=4),
    "linear": LinearAttentionConfig(n_heads=4, d_conv=4),
    "mamba2": Mamba2Config(n_heads=4, d_state=16),
}


FIELDS = (
    "prefix_matching",
    "prefix_matching_latest",
    "prefix_matching_pairs",
    "weight_by_offset",
    "previous_token",
    "first_position",
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MIXERS)
def test_detection_around_the_limit_gives_the_readable_numbers(name, monkeypatch):
    """Probes of 1,000, 1,024 and 1,028 tokens; the last is above the limit and takes the fused sums."""
    rope = {"positions": "rope", "rope": RopeConfig()} if name == "softmax" else {}
    config = LanguageModelConfig(
        d_model=64, n_layers=2, d_vocab=300, n_ctx=2048, mixers=(MIXERS[name],) * 2, init_std=0.3, **rope
    )
    model = LanguageModel(config).to("cuda")
    calls = []
    fused = match_scores.match_scores

    def spy(*args, **options):
        calls.append(fused(*args, **options))
        return calls[-1]

    monkeypatch.setattr(edge_scores, "match_scores", spy)
    options = {"scores": ["prefix_matching"], "n_sequences": 2, "n_maps": 0, "device": "cuda"}
    for period, repeats in ((250, 4), (256, 4), (257, 4)):
        calls.clear()
        shape = {"period": period, "repeats": repeats}
        chosen = detect(model, **options, **shape).checkpoints[0].heads
        above = period * repeats > edge_scores.LINEAR_MEMORY_ABOVE
        assert any(call is not None for call in calls) == (above and name != "mamba2")
        readable = detect(model, **options, **shape, linear_memory=False).checkpoints[0].heads
        for mine, wanted in zip(chosen, readable, strict=True):
            for field in FIELDS:
                expected = pytest.approx(getattr(wanted, field), rel=2e-5, abs=1e-7)
                assert getattr(mine, field) == expected, field
