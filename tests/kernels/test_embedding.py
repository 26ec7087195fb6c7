"""Rows of a table: numbers by hand, what is refused, kernels that compile, and the gradient on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from kernels import KernelError
from kernels.embedding import embedding


def test_numbers_by_hand():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    tokens = torch.tensor([[2, 0], [2, 2]])
    y = embedding(tokens, weight)
    assert y.tolist() == [[[5, 6], [1, 2]], [[5, 6], [5, 6]]]
    y.backward(torch.tensor([[[1.0, 10.0], [2.0, 20.0]], [[4.0, 40.0], [8.0, 80.0]]]))
    assert weight.grad.tolist() == [[2, 20], [0, 0], [13, 130]]


def test_refusals():
    weight, tokens = torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    assert torch.equal(embedding(tokens.int(), weight), weight[:3])
    for call, message in (
        (lambda: embedding(tokens.float(), weight), "tokens are torch.float32, accepted is"),
        (lambda: embedding([0, 1], weight), "tokens are list"),
        (lambda: embedding(None, weight), "tokens is None"),
        (lambda: embedding(tokens, None), "weight is None"),
        (lambda: embedding(tokens, weight[0]), r"weight has shape \(4,\)"),
        (lambda: embedding(tokens.to("meta"), weight), "tokens are on meta, but weight is on cpu"),
        (lambda: embedding(tokens, weight, backend="triton"), "backend 'triton' needs CUDA tensors"),
    ):
        with pytest.raises(KernelError, match=f"embedding: {message}"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spills(capability):
    pytest.importorskip("triton")
    from kernels_compile_only import compile_only

    from kernels.triton import embedding as fused

    with compile_only(capability) as found:
        # The widest block of columns; on one architecture a narrow one of half precision too.
        calls = (torch.float32, 768, 50_000), (torch.bfloat16, 64, 64)
        for dtype, width, n_token in calls[: 2 if capability == 90 else 1]:
            tokens = torch.zeros(100, dtype=torch.int64)
            fused._backward(torch.empty(100, width, dtype=dtype), tokens, n_token)
    assert {u.kernel for u in found} == {"_embedding_pieces_kernel", "_embedding_spans_kernel"}
    assert [u for u in found if u.stack] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("n_token", [1, 64, 50_257])
@pytest.mark.parametrize("n_row", [1, 65, 2049, 70_001])
def test_gradient_on_a_gpu(n_row, n_token, dtype, bound):
    """Rows against float64, half of them looked up under one number; the same numbers at a second run."""
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(0, n_token, (n_row,), device="cuda", generator=generator)
    tokens[::2] = n_token // 2
    dy = torch.randn(n_row, 400, device="cuda", generator=generator).to(dtype)[:, ::2]
    weight = torch.randn(n_token, 200, device="cuda", generator=generator).to(dtype)
    found = []
    for kind in (dtype, dtype, torch.float64):
        table = weight.to(kind).requires_grad_()
        y = embedding(tokens, table) if kind is dtype else F.embedding(tokens, table)
        assert torch.equal(y.to(dtype), weight[tokens])
        found.append(torch.autograd.grad(y, table, dy.to(kind))[0])
    first, again, wide = found
    assert torch.equal(first, again)
    assert float((first.double() - wide).norm() / wide.norm()) < bound
