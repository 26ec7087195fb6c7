"""Cross entropy of rows: the reference's numbers, what is refused, the kernels on a GPU."""

import math

import pytest
import torch

from kernels import KernelError
from kernels.cross_entropy import cross_entropy


def test_numbers_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [9.0, 9.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 1, -1]))
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4), 0])
    loss.sum().backward()
    expected = torch.tensor([[-0.5, 0.5], [0.75, -0.75], [0.0, 0.0]])
    torch.testing.assert_close(logits.grad, expected)


def test_losses_of_half_precision_logits_are_float32():
    logits = torch.randn(4, 10, dtype=torch.bfloat16)
    assert cross_entropy(logits, torch.arange(4)).dtype == torch.float32
    assert cross_entropy(logits.double(), torch.arange(4)).dtype == torch.float64


def test_refusals():
    logits = torch.zeros(3, 5)
    for target in (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(KernelError, match=r"accepted is \[3\] of torch.int64"):
            cross_entropy(logits, target)
    with pytest.raises(KernelError, match="needs CUDA tensors"):
        cross_entropy(logits, torch.zeros(3, dtype=torch.int64), backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spills(capability):
    pytest.importorskip("triton")
    from kernels_compile_only import compile_only

    from kernels.triton import cross_entropy as fused

    with compile_only(capability) as found:
        for dtype in (torch.bfloat16, torch.float32):
            for n_class in (64, 8191, 8192, fused.LARGEST_HELD, fused.LARGEST_HELD + 1):
                logits, target = torch.empty(4, n_class, dtype=dtype), torch.empty(4, dtype=torch.int64)
                loss, lse = fused._forward(logits, target)
                fused._backward(loss, logits, target, lse)
    assert {u.kernel for u in found} == {"_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel"}
    assert [u for u in found if u.stack] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_on_a_gpu(dtype, bound):
    generator = torch.Generator("cuda").manual_seed(0)
    for n_class in (64, 8192, 50257):
        logits = (3 * torch.randn(257, n_class, device="cuda", generator=generator)).to(dtype)
        target = torch.randint(0, n_class, (257,), device="cuda", generator=generator)
        target[::16] = -1
        pair = [logits.clone().requires_grad_(), logits.double().requires_grad_()]
        losses = [cross_entropy(x, target) for x in pair]
        for loss in losses:
            loss.sum().backward()
        torch.testing.assert_close(losses[0].double(), losses[1], atol=1e-5, rtol=1e-5)
        error = (pair[0].grad.double() - pair[1].grad).norm() / pair[1].grad.norm()
        assert error < bound, (n_class, float(error))
