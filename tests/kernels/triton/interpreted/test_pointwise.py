"""Norm, gated SiLU and rotation in Triton's interpreter against their readable forms in float64.

Run by ../test_interpreter.py in a process of its own: the interpreter is chosen when a kernel is defined.
"""

import os

import pytest
import torch
from torch.nn import functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels import KernelError, rotation
from kernels.feature_maps import elu_plus_one
from kernels.gated_silu import gated_silu
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.step_size import step_size


def compare(call, **inputs: torch.Tensor | None) -> None:
    """Output and gradients of `call(backend, **inputs)`: Triton in float32, torch in float64."""
    found = {}
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        given = {n: None if x is None else x.to(dtype).requires_grad_() for n, x in inputs.items()}
        y = call(backend, **given)
        torch.manual_seed(1)
        cotangent = torch.randn(*y.shape[:-1], 2 * y.shape[-1])[..., ::2].to(dtype)
        gradients = torch.autograd.grad((y * cotangent).sum(), [x for x in given.values() if x is not None])
        found[backend] = [y, *gradients]
    for fused, wide in zip(found["triton"], found["torch"], strict=True):
        assert wide.abs().max() > 0.1
        torch.testing.assert_close(fused.double(), wide, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [1, 17, 64, 100])
def test_rms_norm(width, gated):
    torch.manual_seed(0)
    # A slice of something wider, as a projection's part is; more rows than the backward has programs at once.
    x = torch.randn(2, 37, 2 * width)[..., :width]
    gate = torch.randn(2, 37, 3 * width)[..., width : 2 * width] if gated else None
    compare(
        lambda backend, x, w, gate: rms_norm(x, w, eps=1e-3, gate=gate, backend=backend),
        x=x,
        w=1 + 0.3 * torch.randn(width),
        gate=gate,
    )


def test_rms_norm_adds_up_the_gain_over_several_tiles(monkeypatch):
    from kernels.triton import rms_norm as fused

    monkeypatch.setattr(fused, "PROGRAMS", 2)
    test_rms_norm(100, True)


@pytest.mark.parametrize("width", [17, 100])
def test_add_rms_norm(width, monkeypatch):
    """The sum and its norm, with gradients of both; of the norm alone, and of the sum alone."""
    from kernels.triton import rms_norm as fused

    monkeypatch.setattr(fused, "PROGRAMS", 2)
    torch.manual_seed(0)
    x, delta = (torch.randn(2, 37, 2 * width)[..., :width] for _ in range(2))
    w = 1 + 0.3 * torch.randn(width)
    for used in (slice(0, 2), slice(1, 2), slice(0, 1)):

        def call(backend, x, delta, w, used=used):
            parts = add_rms_norm(x, delta, w, eps=1e-3, backend=backend)[used]
            # Without the norm the gain has no gradient but zero.
            return torch.cat(parts, -1) + 0 * w.sum() if used.stop == 2 else parts[0] + w.sum()

        compare(call, x=x, delta=delta, w=w)


def test_add_rms_norm_of_two_dtypes():
    """The stream keeps its float32, what is added its own: so do the gradients."""
    torch.manual_seed(0)
    x, delta, w = torch.randn(5, 16), torch.randn(5, 16).half(), torch.ones(16)
    found = {}
    for backend in ("triton", "torch"):
        given = [t.detach().requires_grad_() for t in (x, delta, w)]
        total, y = add_rms_norm(*given, eps=1e-5, dtype=torch.float16, backend=backend)
        assert (total.dtype, y.dtype) == (torch.float32, torch.float16)
        gradients = torch.autograd.grad(total.square().sum() + y.float().sum(), given)
        assert [g.dtype for g in gradients] == [t.dtype for t in given]
        found[backend] = [total, y, *gradients]
    for fused, wide in zip(found["triton"], found["torch"], strict=True):
        torch.testing.assert_close(fused.float(), wide.float(), atol=4e-3, rtol=4e-3)


def test_rms_norm_in_another_dtype():
    x, w = torch.randn(5, 16), torch.ones(16)
    low = rms_norm(x, w, eps=1e-5, dtype=torch.float16, backend="triton")
    assert low.dtype == torch.float16
    torch.testing.assert_close(low.float(), F.rms_norm(x, (16,), w, 1e-5), atol=2e-3, rtol=2e-3)


def test_gated_silu(monkeypatch):
    from kernels.triton import gated_silu as fused

    monkeypatch.setattr(fused, "BLOCK", 64)
    torch.manual_seed(0)
    gate, x = (3 * torch.randn(3, 7, 20)[..., ::2] for _ in range(2))
    compare(lambda backend, gate, x: gated_silu(gate, x, backend=backend), gate=gate, x=x)


@pytest.mark.parametrize("layout", rotation.LAYOUTS)
@pytest.mark.parametrize(("width", "n_pairs"), [(8, 4), (10, 3), (2, 1)])
def test_rotation(layout, width, n_pairs):
    torch.manual_seed(0)
    angle = torch.randn(9, n_pairs)
    # Of queries, keys and values side by side.
    x = torch.randn(2, 9, 3, 3, width)[:, :, 1]

    def turn(backend, x):
        tables = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        return rotation.rotate(x, *tables, layout, backend=backend)

    compare(turn, x=x)


@pytest.mark.parametrize("width", [3, 40, 300])
def test_step_size(width, monkeypatch):
    from kernels.triton import step_size as fused

    monkeypatch.setattr(fused, "PROGRAMS", 2)
    torch.manual_seed(0)
    raw = 4 * torch.randn(2, 9, 2 * width)[..., width:]
    bias = torch.randn(width)
    compare(lambda backend, raw, bias: step_size(raw, bias, backend=backend), raw=raw, bias=bias)


def test_small_steps_keep_their_digits():
    raw = torch.linspace(-30, 30, 301)[None].requires_grad_()
    wide = raw.detach().double().requires_grad_()
    dt, expected = step_size(raw, torch.zeros(301), backend="triton"), F.softplus(wide, threshold=100)
    torch.testing.assert_close(dt.double(), expected, atol=0, rtol=1e-6)
    dt.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(raw.grad.double(), wide.grad, atol=0, rtol=1e-6)


def test_elu_plus_one():
    torch.manual_seed(0)
    x = 3 * torch.randn(2, 9, 3, 4, 5)[:, :, 1]
    compare(lambda backend, x: elu_plus_one(x, backend=backend), x=x)
    tiny = elu_plus_one(torch.full((1, 1), -40.0), backend="triton")
    torch.testing.assert_close(tiny.double(), torch.full((1, 1), -40.0).double().exp(), atol=0, rtol=1e-5)


def test_refusals():
    x = torch.ones(1, 3, 1, 4)
    with pytest.raises(KernelError, match="3 pairs for d_head 4"):
        rotation.rotate(x, torch.ones(3, 3), torch.ones(3, 3), "half", backend="triton")
    with pytest.raises(KernelError, match="layout is 'whole'"):
        rotation.rotate(x, torch.ones(3, 2), torch.ones(3, 2), "whole")
    with pytest.raises(KernelError, match="does not take dtype torch.float64"):
        gated_silu(x.double(), x.double(), backend="triton")
