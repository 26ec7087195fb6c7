"""Softmax attention and its matching sums over several tiles, whole and ragged, in Triton's interpreter.

Run by ../test_interpreter.py in a process of its own.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels import softmax_attention as softmax
from kernels.triton import config_table, softmax_attention_tiles
from kernels.triton import softmax_attention as fused
from kernels.triton.softmax_matches import softmax_matches

BOUND = 5e-6


def gradients(function, inputs: dict, wide: bool) -> dict:
    """Output and gradients by name, for the same cotangent in both precisions."""
    torch.manual_seed(1)
    mine = {n: x.detach().to(torch.float64 if wide else torch.float32).requires_grad_() for n, x in
            inputs.items()}  # fmt: skip
    out = function(**mine)
    cotangent = torch.randn(out.shape).to(out.dtype)
    found = torch.autograd.grad(out, list(mine.values()), cotangent)
    return {"o": out} | {f"d{n}": g for n, g in zip(mine, found, strict=True)}


@pytest.fixture(params=[(16, 16), (32, 16), (16, 32), (64, 32)], ids=str)
def tiles(request):
    """Rows and columns of the tiles of every kernel."""
    block_m, block_n = request.param
    config = config_table.Config(block_m=block_m, block_n=block_n, warps=4, stages=1)
    for part in ("attention_fwd", "attention_bwd_query", "attention_bwd_key", "attention_match"):
        config_table.overrides[part, 16, 4] = config
    yield request.param
    config_table.overrides.clear()


@pytest.mark.parametrize(
    ("n_dest", "n_src", "window"), [(128, 128, None), (64, 128, None), (128, 128, 50), (77, 100, 64)]
)
def test_attention_of_several_tiles(n_dest, n_src, window, tiles):
    torch.manual_seed(0)
    inputs = {"q": torch.randn(1, n_dest, 2, 16), "k": torch.randn(1, n_src, 1, 16),
              "v": torch.randn(1, n_src, 1, 16)}  # fmt: skip
    found = gradients(lambda q, k, v: fused.softmax_attention(q, k, v, window=window)[0], inputs, False)
    expected = gradients(lambda q, k, v: softmax.parallel(q, k, v, window=window), inputs, True)
    for name, x in found.items():
        gap = (x.double() - expected[name]).norm() / expected[name].norm()
        assert gap < BOUND, f"{name}: {gap:.1e}"


def test_more_tiles_than_an_axis_of_a_grid_holds(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 150, 4, 16), torch.randn(2, 150, 2, 16)
    expected = softmax.parallel(q.double(), k.double(), k.double())
    weights = softmax.pattern(q.double(), k.double())
    dest = torch.zeros(2, 150, dtype=torch.int64)
    monkeypatch.setattr(softmax_attention_tiles, "AXIS", 2)
    assert softmax_attention_tiles.grid(3, 4, 2) == (24,)
    torch.testing.assert_close(fused.softmax_attention(q, k, k)[0].double(), expected, atol=1e-5, rtol=1e-5)
    found = softmax_matches(q, k, dest, dest)
    torch.testing.assert_close(found.double(), weights.sum(-1), atol=1e-5, rtol=1e-5)


def labels(kind: str, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of destinations and sources [2, seq]; those of the second sequence differ from the first's."""
    j = torch.arange(seq)
    if kind == "equal":
        return torch.zeros(2, seq, dtype=torch.int64), torch.zeros(2, seq, dtype=torch.int64)
    if kind == "one pair":
        # Source 5 and destination 70 of the first sequence, source 40 and destination 41 of the second.
        dest, src = (10_000 + j).repeat(2, 1), (20_000 + j).repeat(2, 1)
        dest[0, 70] = src[0, 5]
        dest[1, 41] = src[1, 40]
        return dest, src
    # Every third source has no label.
    tokens = torch.randint(0, 40, (2, seq))
    return tokens, torch.where(j % 3 == 0, -1, tokens.flip(0))


@pytest.mark.parametrize("kind", ["equal", "one pair", "random"])
@pytest.mark.parametrize(("seq", "window"), [(128, None), (128, 50), (101, None), (101, 40)])
def test_matching_sums_of_several_tiles(seq, window, kind, tiles):
    torch.manual_seed(0)
    q, k = torch.randn(2, seq, 2, 16), torch.randn(2, seq, 1, 16)
    dest, src = labels(kind, seq)
    pattern = softmax.pattern(q.double(), k.double(), window=window)
    expected = (pattern * (dest[:, :, None] == src[:, None, :])[:, None]).sum(-1)
    assert expected.abs().max() > 1e-3
    found = softmax_matches(q, k, dest, src, window=window)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_of_any_sign_through_the_public_operator(scale):
    torch.manual_seed(0)
    inputs = {name: torch.randn(1, 20, 2, 16) for name in "qkv"}
    found, expected = (
        gradients(lambda q, k, v, b=backend: softmax.softmax_attention(q, k, v, scale=scale, backend=b),
                  inputs, wide=backend == "torch")
        for backend in ("triton", "torch")
    )  # fmt: skip
    for name, reference in expected.items():
        assert (found[name] - reference).abs().max() < BOUND, name
    state = softmax.KVState(k=inputs["k"], v=inputs["v"], length=20)
    new = [inputs[name][:, :1] for name in "qkv"]
    found, expected = (softmax.step(*new, state, scale=scale, backend=b)[0] for b in ("triton", "torch"))
    assert (found - expected).abs().max() < BOUND
