"""Linear attention of packed projections: numbers by hand, its parts' own operators, the kernels on a GPU."""

import math

import pytest
import torch
from torch.nn import functional as F

from kernels import KernelError
from kernels import gated_linear_attention as linear
from kernels.packed_linear_attention import packed_linear_attention


def parts(qkv: torch.Tensor, n_heads: int) -> list[torch.Tensor]:
    """Queries and keys behind elu + 1, and values, [batch seq head d_head]."""
    q, k, v = qkv.unflatten(-1, (3, n_heads, -1)).unbind(2)
    return [F.elu(q) + 1, F.elu(k) + 1, v]


def test_numbers_by_hand():
    qkv = torch.tensor([[[1.0, 0.0, 5.0], [-1.0, 2.0, 7.0]]])
    o, state = packed_linear_attention(qkv, 1)
    torch.testing.assert_close(o.flatten(), torch.tensor([2 * 5.0, math.exp(-1) * (1 * 5.0 + 3 * 7.0)]))
    assert state.s.item() == 26 and state.z is None
    o, state = packed_linear_attention(qkv, 1, normalise=True)
    torch.testing.assert_close(o.flatten(), torch.tensor([5.0, 26 / 4]))
    assert state.z.item() == 4


@pytest.mark.parametrize("normalise", [False, True])
def test_against_the_pattern_of_its_parts(normalise):
    torch.manual_seed(0)
    qkv = torch.randn(2, 70, 3 * 2 * 5, dtype=torch.float64)
    options = {"normalise": normalise, "eps": 0.1 if normalise else 0.0}
    o, state = packed_linear_attention(qkv, 2, **options)
    expected, end = linear.parallel(*parts(qkv, 2), **options)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(state.s, end.s)
    assert (state.z is None) == (not normalise)


def test_the_kernels_are_refused_without_a_gpu():
    with pytest.raises(KernelError, match="packed_linear_attention: backend 'triton' needs CUDA tensors"):
        packed_linear_attention(torch.ones(1, 2, 6), 2, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize(("seq", "n_heads", "d_head"), [(1000, 3, 64), (65, 2, 21), (1, 1, 256)])
def test_on_a_gpu(seq, n_heads, d_head, dtype, bound, normalise):
    """Output, last state and gradient against float64, relative to their norm; columns of a wider tensor."""
    torch.manual_seed(0)
    width = 3 * n_heads * d_head
    x = torch.randn(2, seq, width + 5, device="cuda").to(dtype)[..., 5:]
    options = {"normalise": normalise, "eps": 0.1 if normalise else 0.0}
    found = []
    for kind in (dtype, torch.float64):
        leaf = x.detach().to(kind).requires_grad_()
        if kind == dtype:
            o, state = packed_linear_attention(leaf, n_heads, backend="triton", **options)
        else:
            o, state = linear.parallel(*parts(leaf, n_heads), **options)
        outputs = [o, state.s] + ([state.z] if normalise else [])
        torch.manual_seed(1)
        upstream = [torch.randn(t.shape, device="cuda").to(t.dtype) for t in outputs]
        found.append([*(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaf, upstream)])
    assert found[0][0].dtype == found[0][-1].dtype == dtype
    for n, (fused, wide) in enumerate(zip(*found, strict=True)):
        error = float((fused.double() - wide).norm() / wide.norm())
        assert error < bound, (n, error)
