"""The gradient of rows that were looked up, in Triton's interpreter against float64.

Run by ../test_interpreter.py in a process of its own: the interpreter is chosen when a kernel is defined.
"""

import os

import pytest
import torch
from torch.nn import functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels import KernelError
from kernels.embedding import embedding
from kernels.triton import embedding as fused
from kernels.triton import ops

PIECE = fused.PIECE


def tokens_of(kind: str, n_row: int, n_token: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_row)
    tokens = torch.randint(0, n_token, (n_row,), generator=generator)
    if kind == "one":
        tokens[:] = n_token - 1
    if kind == "padded":
        tokens[: n_row // 2 + 1] = n_token // 2
    return tokens


@pytest.mark.parametrize("kind", ["any", "one", "padded"])
@pytest.mark.parametrize("n_row", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 9 * PIECE + 5])
@pytest.mark.parametrize("n_token", [5, 70])
def test_gradient(n_row, n_token, kind, monkeypatch):
    # A token that begins in a piece and fills more than are read at a time.
    monkeypatch.setattr(fused, "PIECES_AT_ONCE", 2)
    tokens = tokens_of(kind, n_row, n_token)
    # Rows that stand apart, wider than a block where there are few of them.
    width = 300 if n_row <= PIECE else 5
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(n_row, 2 * width, generator=generator)[:, :width]
    weight = torch.randn(n_token, width, generator=generator)
    found = []
    for dtype in (torch.float32, torch.float64):
        table = weight.to(dtype).requires_grad_()
        ours = dtype is torch.float32
        y = embedding(tokens, table, backend="triton") if ours else F.embedding(tokens, table)
        assert torch.equal(y.float(), weight[tokens])
        found.append(torch.autograd.grad(y, table, dy.to(dtype))[0])
    assert found[1].abs().max() > 0.1
    torch.testing.assert_close(found[0].double(), found[1], atol=2e-5, rtol=2e-6)


def test_rows_that_no_memory_was_cleared_for(monkeypatch):
    """What `torch.empty` holds never reaches a sum."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **own: empty(*size, **own).fill_(float("nan")))
    dy, tokens = torch.randn(3 * PIECE + 5, 3), tokens_of("padded", 3 * PIECE + 5, 4)
    expected = torch.zeros(4, 3).index_add_(0, tokens, dy)
    torch.testing.assert_close(fused._backward(dy, tokens, 4), expected)


def test_many_tokens_and_half_precision():
    tokens = torch.tensor([39_999, 0, 39_999, 32_768])
    dy = torch.randn(4, 3).half()
    expected = torch.zeros(40_000, 3).index_add_(0, tokens, dy.float()).half()
    assert torch.equal(fused._backward(dy, tokens, 40_000), expected)


def test_no_rows():
    table = torch.randn(4, 3).requires_grad_()
    y = embedding(torch.zeros(2, 0, dtype=torch.int64), table, backend="triton")
    assert y.shape == (2, 0, 3)
    assert torch.equal(torch.autograd.grad(y.sum(), table)[0], torch.zeros(4, 3))


@pytest.mark.parametrize("direct", [False, True])
def test_second_derivative(direct, monkeypatch):
    """Of a sum that its rows enter squared, so that there is one."""
    monkeypatch.setattr(ops, "DIRECT", direct)
    tokens, weight = torch.tensor([1, 1, 0]), torch.randn(3, 2)
    found = []
    for backend in ("triton", "torch"):
        table = weight.clone().requires_grad_()
        loss = embedding(tokens, table, backend=backend).pow(3).sum()
        (gradient,) = torch.autograd.grad(loss, table, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), table)[0])
    assert found[1].abs().max() > 0.1
    torch.testing.assert_close(*found)


def test_transforms_take_torchs_own_rows():
    """By themselves; asked for by name, ours are refused there. Many cotangents at once are added up."""
    tokens, table = torch.tensor([1, 1, 0]), torch.randn(3, 2)

    def loss(table, backend=None):
        return embedding(tokens, table, backend=backend).pow(2).sum()

    expected = 2 * table * torch.tensor([[1.0], [2.0], [0.0]])
    torch.testing.assert_close(torch.func.grad(loss)(table), expected)
    with pytest.raises(KernelError, match=r"embedding: .*a transform of torch.func"):
        torch.func.grad(loss)(table, backend="triton")
    leaf, many = table.clone().requires_grad_(), torch.randn(4, 3, 2)
    y = embedding(tokens, leaf, backend="triton")
    (found,) = torch.autograd.grad(y, leaf, many, is_grads_batched=True)
    torch.testing.assert_close(found, torch.stack([torch.zeros(3, 2).index_add(0, tokens, d) for d in many]))
