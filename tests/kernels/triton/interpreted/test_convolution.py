"""The convolution's walk over segments and blocks of channels, in Triton's interpreter, against float64.

Run by ../test_interpreter.py, as test_operators.py is.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels import causal_conv as conv
from kernels.triton import causal_conv as fused


def results(function, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor) -> list:
    """Outputs and gradients of everything; the upstream gradient of y is one number for all positions."""
    given = [t.detach().requires_grad_() for t in (x, weight, bias, state)]
    y, last = function(*given[:3], state=given[3], silu=True)
    upstream = torch.linspace(-1, 1, y.shape[2], dtype=y.dtype).expand(y.shape)
    return [y, last, *torch.autograd.grad((y, last), given, (upstream, torch.ones_like(last)))]


@pytest.mark.parametrize("channels", [128, 130])
@pytest.mark.parametrize(("width", "seq"), [(4, 16), (4, 35), (3, 33), (2, 48), (1, 20)])
def test_segments_and_blocks_of_channels(width, seq, channels, monkeypatch):
    monkeypatch.setattr(fused, "processors", lambda device: 132)
    torch.manual_seed(0)
    assert fused._segment(torch.empty(2, seq, channels)) == 16
    # Every third position of wider rows.
    x = torch.randn(2, 3 * seq, channels + 5)[:, ::3, 5:]
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    state = torch.randn(2, width - 1, channels)
    found = results(fused.causal_conv, x, weight, bias, state)
    expected = results(conv.parallel, *(t.double() for t in (x, weight, bias, state)))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        gap = (ours.double() - theirs).norm() / theirs.norm().clamp(min=1)
        assert gap < 3e-6, number


@pytest.mark.parametrize(
    ("shape", "segment"),
    [((8, 2048, 1024), 64), ((1, 32768, 1024), 128), ((64, 512, 256), 64), ((1, 512, 1024), 16)],
)
def test_segments_fill_a_gpu(shape, segment, monkeypatch):
    monkeypatch.setattr(fused, "processors", lambda device: 132)
    assert fused._segment(torch.empty(shape, device="meta")) == segment
