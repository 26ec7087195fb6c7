"""The fused cross entropy in Triton's interpreter against the readable form in float64.

Run by ../test_interpreter.py in a process of its own: the interpreter is chosen when a kernel is defined.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels.cross_entropy import cross_entropy, reference
from kernels.triton import cross_entropy as fused


@pytest.mark.parametrize("n_class", [2, 37, 64, 130])
@pytest.mark.parametrize("held", [False, True])
def test_losses_and_gradients(n_class, held, monkeypatch):
    # Rows that a program holds, and blocks smaller than a row, so that the running maximum is carried.
    monkeypatch.setattr(fused, "LARGEST_HELD", 1000 * held)
    monkeypatch.setattr(fused, "LARGEST_BLOCK", 64)
    torch.manual_seed(0)
    logits = 5 * torch.randn(9, 2 * n_class)[:, ::2]
    logits[2] += 100
    target = torch.randint(0, n_class, (9,))
    target[4] = -1
    weight = torch.rand(9)
    found = {}
    for name, x in (("fused", logits.clone().requires_grad_()), ("wide", logits.double().requires_grad_())):
        loss = cross_entropy(x, target, backend="triton") if name == "fused" else reference(x, target)
        (gradient,) = torch.autograd.grad((loss * weight).sum(), x)
        found[name] = loss.detach().double(), gradient.double()
    torch.testing.assert_close(found["fused"][0], found["wide"][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["fused"][1], found["wide"][1], atol=1e-6, rtol=1e-5)
    assert found["fused"][0][4] == 0 and not found["fused"][1][4].any()
    assert found["fused"][0].max() > 5


def test_the_gradient_of_strided_rows():
    """Logits that are a slice of something wider, and a cotangent that is one number expanded."""
    wide = torch.randn(6, 3, 50, requires_grad=True)
    target = torch.randint(0, 50, (6,))
    fused_loss = cross_entropy(wide[:, 1], target, backend="triton").sum()
    (gradient,) = torch.autograd.grad(fused_loss, wide)
    (expected,) = torch.autograd.grad(reference(wide[:, 1], target).sum(), wide)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
