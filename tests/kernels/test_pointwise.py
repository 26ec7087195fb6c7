"""Norm, gated SiLU and rotation: numbers by hand, kernels that compile, the kernels on a GPU."""

import math

import pytest
import torch

from kernels import KernelError, rotation
from kernels.feature_maps import elu_plus_one
from kernels.gated_silu import gated_silu, packed_gated_silu
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.step_size import step_size as step_sizes


def test_numbers_by_hand():
    x, w = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    root = math.sqrt(12.5)
    torch.testing.assert_close(rms_norm(x, w, eps=0.0), torch.tensor([[3 / root, 8 / root]]))
    silu = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(gated_silu(torch.ones(1, 2), x), silu * x)
    torch.testing.assert_close(packed_gated_silu(torch.tensor([[1.0, 1.0, 3.0, 4.0]])), silu * x)
    total, normed = add_rms_norm(x - 1, torch.ones(1, 2), w, eps=0.0)
    torch.testing.assert_close(total, x)
    torch.testing.assert_close(normed, torch.tensor([[3 / root, 8 / root]]))
    # A gate that is the same everywhere changes nothing.
    gated = rms_norm(x, w, eps=0.0, gate=torch.ones(1, 2))
    torch.testing.assert_close(gated, torch.tensor([[3 / root, 8 / root]]))
    quarter = torch.zeros(1, 1), torch.ones(1, 1)
    turned = rotation.rotate(torch.tensor([[[[3.0, 4.0, 5.0]]]]), *quarter, "half")
    assert turned.flatten().tolist() == [-4, 3, 5]


def test_refusals():
    with pytest.raises(KernelError, match=r"gate has shape \(3, 2\)"):
        rms_norm(torch.ones(3, 4), torch.ones(4), eps=0.0, gate=torch.ones(3, 2))
    with pytest.raises(KernelError, match=r"delta has shape \(4,\)"):
        add_rms_norm(torch.ones(3, 4), torch.ones(4), torch.ones(4), eps=0.0)
    with pytest.raises(KernelError, match=r"x has shape \(3, 5\)"):
        gated_silu(torch.ones(3, 4), torch.ones(3, 5))
    with pytest.raises(KernelError, match=r"h has shape \(3, 5\), accepted is an even number"):
        packed_gated_silu(torch.ones(3, 5))
    for operator in (
        lambda x: rms_norm(x, torch.ones(4), eps=0.0, backend="triton"),
        lambda x: gated_silu(x, x, backend="triton"),
        lambda x: packed_gated_silu(x, backend="triton"),
        lambda x: rotation.rotate(x[None, None], x[:, :2], x[:, :2], "half", backend="triton"),
    ):
        with pytest.raises(KernelError, match="needs CUDA tensors"):
            operator(torch.ones(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spills(capability):
    pytest.importorskip("triton")
    from kernels_compile_only import compile_only

    from kernels.triton import feature_maps, packed_gated_silu, step_decay, step_size
    from kernels.triton import gated_silu as silu
    from kernels.triton import rms_norm as norm
    from kernels.triton import rotation as turn

    with compile_only(capability) as found:
        for width in (64, 256, 1536):
            x, w = torch.empty(4096, width), torch.empty(width)
            for gate in (None, x.bfloat16()):
                y, scale = norm._forward(x, gate, w, 1e-5, torch.bfloat16)
                norm._backward(y, x, gate, w, scale)
            for delta in (x, x.bfloat16()):
                total, y, scale = norm._add_forward(x, delta, w, 1e-5, torch.bfloat16)
                for upstream in (total, None):
                    norm._add_backward(y, upstream, total, w, scale, x.dtype, delta.dtype)
        x = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16)
        silu._backward(silu._forward(x, x), x, x)
        for adjacent in (False, True):
            turn._forward(x, x[0, :, 0, :24], x[0, :, 0, :24], adjacent, 1.0)
        x = torch.empty(256, 512, dtype=torch.bfloat16)
        feature_maps._backward(x, feature_maps._forward(x))
        bias = torch.empty(512)
        packed_gated_silu._backward(packed_gated_silu._forward(x), x)
        step_size._backward(step_size._forward(x, bias), x, bias)
        for width in (8, 512):
            x, bias = torch.empty(256, width, dtype=torch.bfloat16), torch.empty(width)
            dt, g = step_decay._forward(x, bias, bias)
            step_decay._backward(dt, g, x, bias, bias, g, torch.empty_like(x))
    assert len({u.kernel for u in found}) == 14
    assert [u for u in found if u.stack] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_on_a_gpu(dtype, bound):
    """Outputs and gradients against float64, relative to their norm; the gain is summed over 3,000 rows."""
    torch.manual_seed(0)
    x, gate = (torch.randn(3, 1000, 1, 200, device="cuda").to(dtype) for _ in range(2))
    w, angle = torch.randn(200, device="cuda"), torch.randn(1000, 100, device="cuda")
    table = angle.cos(), angle.sin()
    calls = {
        "norm": lambda x, gate, w: rms_norm(x, w, eps=1e-5),
        "gated norm": lambda x, gate, w: rms_norm(x, w, eps=1e-5, gate=gate),
        "sum's norm": lambda x, gate, w: torch.cat(add_rms_norm(x, gate, w, eps=1e-5), -1)[..., 100:300],
        "gated silu": lambda x, gate, w: gated_silu(gate, x),
        "packed gated silu": lambda x, gate, w: packed_gated_silu(torch.cat((gate, x), -1)),
        "step size": lambda x, gate, w: step_sizes(x, w),
        "elu + 1": lambda x, gate, w: elu_plus_one(x),
        "rotation": lambda x, gate, w: rotation.rotate(x, *(t.to(x.dtype) for t in table), "half"),
    }
    upstream = torch.randn_like(x)
    for name, call in calls.items():
        found = []
        for kind in (dtype, torch.float64):
            inputs = [t.detach().to(kind).requires_grad_() for t in (x, gate)]
            gain_dtype = torch.float64 if kind is torch.float64 else torch.float32
            inputs.append(w.clone().to(gain_dtype).requires_grad_())
            y = call(*inputs)
            y.backward(upstream.to(y.dtype))
            found.append([y.detach(), *(t.grad for t in inputs if t.grad is not None)])
        for fused, wide in zip(*found, strict=True):
            error = float((fused.double() - wide).norm() / wide.norm())
            assert error < bound, (name, error)


def test_a_single_row_has_one_axis():
    x, w = torch.tensor([3.0, 4.0]), torch.ones(2)
    expected = x / math.sqrt(12.5)
    torch.testing.assert_close(rms_norm(x, w, eps=0.0), expected)
    total, normed = add_rms_norm(x - 1, torch.ones(2), w, eps=0.0)
    torch.testing.assert_close(total, x)
    torch.testing.assert_close(normed, expected)
