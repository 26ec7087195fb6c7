"""What lies between Mamba-2's projections as one operator, in Triton's interpreter, against float64.

Run by ../test_interpreter.py in a process of its own: the interpreter is chosen when a kernel is defined.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels import KernelError
from kernels.ssd_block import ssd_block
from kernels.triton import linear_attention_launch, step_decay
from models.config import Mamba2Config
from models.form import Form
from models.mixers import MIXERS

NAMES = ("packed", "conv_weight", "conv_bias", "dt_bias", "A_log", "D", "gain")


def inputs(
    batch: int, seq: int, heads: int, d_head: int, groups: int, d_state: int, *, width: int = 4,
    bias: bool = True,
) -> dict[str, torch.Tensor | None]:  # fmt: skip
    inner = heads * d_head
    channels = inner + 2 * groups * d_state
    # A slice of something wider: rows with a gap, of batches that are evenly spaced.
    wide = torch.randn(batch, seq, inner + channels + heads + 8)
    values = (
        wide[..., : inner + channels + heads], 0.5 * torch.randn(channels, width),
        0.1 * torch.randn(channels) if bias else None, torch.randn(heads) - 2, 0.5 * torch.randn(heads),
        torch.randn(heads), 1 + 0.3 * torch.randn(inner),
    )  # fmt: skip
    return dict(zip(NAMES, values, strict=True))


def results(given: dict, groups: int, backend: str, dtype: torch.dtype, used: slice = slice(0, 3)) -> dict:
    """Outputs, and gradients of all inputs from random ones of the outputs that are used."""
    own = {n: None if x is None else x.detach().to(dtype).requires_grad_() for n, x in given.items()}
    outputs = ssd_block(**own, n_groups=groups, eps=1e-3, backend=backend)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for x in outputs[used]:
        # Upstream gradients with gaps.
        upstream = torch.randn(*x.shape[:-1], 2 * x.shape[-1], generator=generator)[..., ::2]
        loss = loss + (x * upstream.to(dtype)).sum()
    present = {n: x for n, x in own.items() if x is not None}
    gradients = torch.autograd.grad(loss, list(present.values()), allow_unused=True)
    named = {f"d{n}": g for n, g in zip(present, gradients, strict=True) if g is not None}
    return {n: x.detach() for n, x in zip(("y", "state", "conv"), outputs, strict=True)} | named


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By norm, relative but for what is 0 (one step has no decay)."""
    return float((found.double() - expected).norm() / max(expected.norm(), 1e-3))


@pytest.mark.parametrize("processors", [1, 40], ids=["whole", "segments"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 37, 4, 8, 2, 5), {}),
        ((1, 130, 2, 16, 1, 20), {}),
        ((2, 3, 2, 8, 1, 4), {"width": 3, "bias": False}),
        ((1, 1, 1, 5, 1, 3), {"width": 1}),
        ((3, 1, 2, 8, 1, 4), {}),
        ((1, 70, 2, 8, 2, 8), {"width": 2}),
    ],
    ids=str,
)
def test_against_float64(sizes, options, processors, monkeypatch):
    monkeypatch.setattr(linear_attention_launch, "processors", lambda device: processors)
    monkeypatch.setattr(step_decay, "PROGRAMS", 1)
    torch.manual_seed(0)
    given = inputs(*sizes, **options)
    fused = results(given, sizes[4], "triton", torch.float32)
    wide = results(given, sizes[4], "torch", torch.float64)
    assert fused.keys() == wide.keys() and len(fused) == 10 - (not options.get("bias", True))
    for name, expected in wide.items():
        if expected.numel():
            # Sums over all steps cancel: their error is that of their largest terms.
            bound = 5e-5 if name in ("ddt_bias", "dA_log") else 2e-6
            assert error(fused[name], expected) < bound, name


def test_each_output_alone_has_its_gradients():
    torch.manual_seed(0)
    given = inputs(1, 21, 2, 8, 1, 4)
    for used in (slice(0, 1), slice(1, 2), slice(2, 3)):
        fused = results(given, 1, "triton", torch.float32, used)
        wide = results(given, 1, "torch", torch.float64, used)
        for name, expected in wide.items():
            assert error(fused[name], expected) < 5e-5, name


def test_steps_of_many_heads_and_tiles():
    """More heads than a program has, more tiles than programs."""
    torch.manual_seed(0)
    raw, bias, a_log = torch.randn(300, 150)[:, 50:120], torch.randn(70), torch.randn(70)
    dt, g = step_decay._forward(raw, bias, a_log)
    wide = [t.double().requires_grad_() for t in (raw, bias, a_log)]
    expected_dt = torch.nn.functional.softplus(wide[0] + wide[1], threshold=100)
    expected_g = -torch.exp(wide[2]) * expected_dt
    torch.testing.assert_close(dt.double(), expected_dt, atol=0, rtol=1e-6)
    torch.testing.assert_close(g.double(), expected_g, atol=0, rtol=1e-6)
    ddt, dg = torch.randn(300, 70), torch.randn(300, 70)
    expected = torch.autograd.grad((expected_dt * ddt + expected_g * dg).sum(), wide)
    draw = torch.zeros(300, 100)[:, 20:90]
    found = draw, *step_decay._backward(ddt, dg, raw, bias, a_log, g, draw)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("norm_eps", [1e-5, 1e-1])
def test_the_mixer_as_one_operator_is_the_mixer(norm_eps, monkeypatch):
    """Outputs, states and gradients of the readable path."""
    torch.manual_seed(0)
    config = Mamba2Config(n_heads=4, d_state=8, norm_eps=norm_eps)
    mixer = MIXERS["mamba2"](config, 16)
    mixer.reset_parameters(std=0.1, out_std=0.1, generator=None)
    x = torch.randn(2, 33, 16, requires_grad=True)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(mixer, "_is_one_operator", lambda packed, fused=fused: fused)
        y, state = mixer.evaluate(x, Form.CHUNKED, None)
        gradients = torch.autograd.grad(y.square().sum() + state.ssm.sum(), [x, *mixer.parameters()])
        found.append([y, state.ssm, state.conv, *gradients])
        assert state.length == 33
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_refusals():
    given = inputs(1, 5, 2, 4, 1, 3)
    options = {"n_groups": 1, "eps": 0.0, "backend": "triton"}
    with pytest.raises(KernelError, match="last axis of 24"):
        ssd_block(**given | {"packed": given["packed"][..., 1:]}, **options)
    with pytest.raises(KernelError, match="n_groups 3"):
        ssd_block(**given, **options | {"n_groups": 3})
    with pytest.raises(KernelError, match="does not take width 5"):
        ssd_block(**given | {"conv_weight": torch.ones(14, 5)}, **options)
    with pytest.raises(KernelError, match="does not take dtype torch.float64"):
        ssd_block(**{n: x.double() for n, x in given.items()}, **options)


def test_a_batch_of_none():
    given = {n: x.requires_grad_() for n, x in inputs(2, 5, 2, 4, 1, 3).items()}
    given["packed"] = given["packed"][:0]
    y, state, conv = ssd_block(**given, n_groups=1, eps=1e-3, backend="triton")
    assert (y.shape, state.shape, conv.shape) == ((0, 5, 8), (0, 2, 4, 3), (0, 3, 14))
    for gradient in torch.autograd.grad(y.sum() + state.sum(), [given["gain"], given["A_log"]]):
        assert not gradient.any()
