"""The fused cross entropy of a linear map in Triton's interpreter against the readable form in float64.

Run by ../test_interpreter.py in a process of its own: the interpreter is chosen when a kernel is defined.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

import interpreter_bfloat16  # noqa: F401

from kernels.linear_cross_entropy import linear_cross_entropy, reference
from kernels.triton import cross_entropy as rows_of_logits
from kernels.triton import linear_cross_entropy as fused
from kernels.triton import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(n_class: int, n_row: int = 9, d_model: int = 7) -> list[torch.Tensor]:
    """x, weight, bias and targets of which the fifth is absent; logits of the third row are large."""
    generator = torch.Generator().manual_seed(n_class)
    shapes = ((n_row, d_model), (n_class, d_model), (n_class,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    x[2:3] *= 30
    target = torch.randint(0, n_class, (n_row,), generator=generator)
    target[4:5] = -1
    return [x, weight, bias, target]


def found(call, x, weight, bias, target, cotangent, dtype=None) -> list[torch.Tensor]:
    """Losses and gradients of everything that is learned."""
    learned = [t if dtype is None else t.to(dtype) for t in (x, weight, bias) if t is not None]
    learned = [t.detach().requires_grad_() for t in learned]
    loss = call(learned[0], learned[1], target, bias=None if bias is None else learned[2])
    return [loss.detach(), *torch.autograd.grad((loss * cotangent).sum(), learned)]


def triton(x, weight, target, **options):
    return linear_cross_entropy(x, weight, target, backend="triton", **options)


@pytest.mark.parametrize("n_class", [1, 2, 37, 64, 131])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_losses_and_gradients(n_class, held, biased, direct, monkeypatch):
    monkeypatch.setattr(ops, "DIRECT", direct)
    monkeypatch.setattr(rows_of_logits, "LARGEST_HELD", 1000 * held)
    # Blocks smaller than a row, so that the running maximum is carried.
    monkeypatch.setattr(rows_of_logits, "LARGEST_BLOCK", 64)
    x, weight, bias, target = inputs(n_class)
    bias = bias if biased else None
    cotangent = torch.rand(9, generator=torch.Generator().manual_seed(0))
    results = [
        found(triton, x, weight, bias, target, cotangent),
        found(reference, x, weight, bias, target, cotangent, torch.float64),
    ]
    for mine, exact in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, atol=2e-6 * float(exact.abs().max()), rtol=1e-5)
    assert results[0][0][4] == 0 and not results[0][1][4].any()
    with torch.no_grad():
        assert torch.equal(triton(x, weight, target, bias=bias), results[0][0])


@pytest.mark.parametrize("n_row", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_without_and_with_a_target(n_row, dtype):
    x, weight, bias, target = inputs(37, n_row)
    for given in (target, torch.full_like(target, -1)):
        loss, *gradients = found(triton, x, weight, bias, given, 1.0, dtype)
        assert loss.shape == (n_row,) and all(torch.isfinite(t).all() for t in gradients)
        expected = float(n_row and given[0] >= 0)
        assert [float(t.any()) for t in (loss, *gradients)] == [expected] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1 / 65536])
def test_half_precision_is_as_good_as_two_operators(dtype, size):
    """Beside what torch makes of logits in this dtype, with cotangents as large as those of a mean."""
    x, weight, _, target = inputs(131, 400, 32)
    x[2] /= 30
    x, weight = x.to(dtype).float(), weight.to(dtype).float()
    cotangent = size * torch.rand(400, generator=torch.Generator().manual_seed(0))

    def of_autocast(call):
        with torch.autocast("cpu", dtype):
            return found(call, x, weight, None, target, cotangent)

    exact = found(reference, x, weight, None, target, cotangent.double(), torch.float64)
    for mine, other, wide in zip(of_autocast(triton), of_autocast(reference), exact, strict=True):
        assert mine.dtype == torch.float32
        errors = [float((t.double() - wide).norm() / wide.norm()) for t in (mine, other)]
        assert errors[0] < 6e-3 and errors[0] < 1.02 * errors[1], errors


def test_cotangents_of_zero():
    for dtype in DTYPES:
        x, weight, bias, target = inputs(37)
        _, *gradients = found(triton, x, weight, bias, target, torch.zeros(9), dtype)
        assert not any(t.any() or t.isnan().any() for t in gradients)


def test_only_what_is_asked_for_is_computed():
    """A gradient for one of the inputs is that of all; without one the logits stay what they are."""
    x, weight, bias, target = inputs(37)
    whole = found(triton, x, weight, bias, target, 1.0)[1:]
    for n, expected in enumerate(whole):
        learned = [t.clone().requires_grad_(m == n) for m, t in enumerate((x, weight, bias))]
        loss = triton(learned[0], learned[1], target, bias=learned[2]).sum()
        (gradient,) = torch.autograd.grad(loss, learned[n])
        assert torch.equal(gradient, expected)
    assert fused._forward(x, weight, bias, target, False)[1].numel() == 0
    logits = x @ weight.T
    kept = logits.clone()
    rows_of_logits.losses_of_rows(logits, target)
    assert torch.equal(logits, kept)


def test_rows_with_gaps_and_weights_used_twice():
    """x is a slice of something wider, and the weight also embeds."""
    generator = torch.Generator().manual_seed(0)
    wide, table = (torch.randn(*shape, generator=generator) for shape in ((9, 2, 7), (37, 7)))
    target = torch.randint(0, 37, (9,), generator=generator)
    gradients = []
    for call in (triton, reference):
        w = table.clone().requires_grad_()
        loss = call(wide[:, 1] + w[target], w, target).mean()
        loss.backward()
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("direct", [True, False])
def test_a_second_backward_is_refused_by_name(direct, monkeypatch):
    monkeypatch.setattr(ops, "DIRECT", direct)
    x, weight, _, target = inputs(37)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(triton(x, weight, target).sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="linear_cross_entropy_backward: second derivatives are not"):
        gradient.sum().backward()


def test_a_first_backward_can_be_repeated():
    x, weight, _, target = inputs(37)
    x.requires_grad_()
    loss = triton(x, weight, target).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.any()


@pytest.mark.parametrize("n_class", [16_385, 20_000])
def test_classes_that_are_ruled_out_first(n_class):
    """A whole block of logits of -inf at the start of a row that is read in blocks."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4), torch.randn(n_class, 4), torch.zeros(n_class)
    bias[:4096] = -float("inf")
    target = torch.tensor([n_class - 1, n_class - 2])
    found = []
    for backend in ("torch", "triton"):
        own = [t.clone().requires_grad_() for t in (x, weight)]
        loss = linear_cross_entropy(*own, target, bias=bias, backend=backend)
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), own)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("held", [False, True])
def test_a_row_without_a_target_counts_for_nothing_whatever_its_logits_are(held, monkeypatch):
    """Logits of 60,000 and infinity: float16's largest number is 65,504."""
    monkeypatch.setattr(rows_of_logits, "LARGEST_HELD", 1000 * held)
    x = torch.tensor([[1.0, 2.0], [300.0, 300.0]]).half().requires_grad_()
    weight = torch.full((3, 2), 200.0).half()
    weight[0] = 1
    weight.requires_grad_()
    loss = triton(x, weight, torch.tensor([0, -1]))
    dx, dweight = torch.autograd.grad(loss.sum(), (x, weight))
    assert loss[1] == 0 and dx[1].tolist() == [0, 0]
    assert dweight.tolist() == [[-1, -2], [0.5, 1], [0.5, 1]]
