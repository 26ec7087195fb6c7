"""Cross entropy of a linear map: the reference's numbers, what is refused, kernels that compile, the kernels
on a GPU."""

import math

import pytest
import torch
from torch.nn import functional as F

from kernels import KernelError
from kernels.linear_cross_entropy import linear_cross_entropy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_numbers_by_hand():
    x = torch.tensor([[1.0], [math.log(3.0)], [9.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-1.0]], requires_grad=True)
    bias = torch.tensor([0.0, 1.0], requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([0, 1, -1]), bias=bias)
    # Logits 0, 0 · 0, 1 - log 3.
    second = math.e / (3 + math.e)
    assert loss.tolist() == pytest.approx([math.log(2), -math.log(second), 0])
    loss.sum().backward()
    pull = torch.tensor([[-0.5, 0.5], [1 - second, second - 1], [0.0, 0.0]])
    torch.testing.assert_close(x.grad, -pull[:, 1:])
    torch.testing.assert_close(weight.grad, (pull * x.detach()).sum(0)[:, None])
    torch.testing.assert_close(bias.grad, pull.sum(0))


def test_dtypes_and_autocast_are_those_of_a_linear_map_and_its_cross_entropy():
    x, weight, target = torch.randn(4, 3), torch.randn(10, 3), torch.arange(4)
    assert linear_cross_entropy(x.bfloat16(), weight.bfloat16(), target).dtype == torch.float32
    assert linear_cross_entropy(x.double(), weight.double(), target).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        low = linear_cross_entropy(x, weight, target)
        expected = F.cross_entropy(F.linear(x, weight).float(), target, reduction="none")
        assert F.linear(x, weight).dtype == torch.bfloat16
    assert torch.equal(low, expected)
    assert not torch.equal(low, linear_cross_entropy(x, weight, target))


def test_refusals():
    x, weight, target = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    for call, message in (
        (lambda: linear_cross_entropy(x, weight[:, :3], target), r"weight has shape \(5, 3\)"),
        (lambda: linear_cross_entropy(x, weight, target, bias=x[0]), r"bias has shape \(4,\)"),
        (lambda: linear_cross_entropy(x, weight, target[:2]), r"accepted is \[3\] of torch.int64"),
        (lambda: linear_cross_entropy(x, weight.bfloat16(), target), "weight has dtype torch.bfloat16"),
        (lambda: linear_cross_entropy(x, weight, target, backend="triton"), "needs CUDA tensors"),
    ):
        with pytest.raises(KernelError, match=f"linear_cross_entropy: .*{message}"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spills(capability):
    """Rows that a program holds, up to the longest, and longer ones; with a gradient and without."""
    pytest.importorskip("triton")
    from kernels_compile_only import compile_only

    from kernels.triton import cross_entropy as rows_of_logits
    from kernels.triton import linear_cross_entropy as fused
    from kernels.triton import scaled_rows

    longest = rows_of_logits.LARGEST_HELD
    with compile_only(capability) as found:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for n_class in (61, 8192, longest - 1, longest, 50257, 200_000):
                x, weight = torch.empty(4, 1, dtype=dtype), torch.empty(n_class, 1)
                for asks in (False, True):
                    fused._forward(x, weight, None, torch.empty(4, dtype=torch.int64), asks)
            for width in (64, 768):
                scaled_rows.scaled_rows(torch.empty(4096, width), torch.empty(4096), dtype)
    assert len(found) > 24
    assert {u.kernel for u in found} == {"_cross_entropy_fwd_kernel", "_scaled_rows_kernel"}
    assert [u for u in found if u.stack] == []


def inputs(n_class: int, dtype: torch.dtype, n_row: int = 257, d_model: int = 96) -> list[torch.Tensor]:
    """x, weight, bias and targets of which every sixteenth is absent."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((n_row, d_model), (n_class, d_model), (n_class,))
    x, weight, bias = (
        torch.randn(shape, device="cuda", generator=generator).to(dtype).float() for shape in shapes
    )
    target = torch.randint(0, n_class, (n_row,), device="cuda", generator=generator)
    target[::16] = -1
    return [x, weight / 4, bias, target]


def results(call, learned, target, cotangent, dtype=None) -> list[torch.Tensor]:
    """Losses and gradients of x, weight and bias."""
    learned = [t.to(dtype or t.dtype).detach().requires_grad_() for t in learned]
    loss = call(*learned[:2], target, bias=learned[2])
    return [loss.detach(), *torch.autograd.grad(loss, learned, cotangent.to(loss.dtype))]


def two_operators(x, weight, target, *, bias):
    return F.cross_entropy(F.linear(x, weight, bias).float(), target, reduction="none", ignore_index=-1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("n_class", [1, 61, 8192, 16_383, 50_257, 200_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1 / 65536])
def test_on_a_gpu(n_class, dtype, size):
    """Against float64, and under autocast at least as near to it as F.linear and F.cross_entropy are."""
    *learned, target = inputs(n_class, dtype)
    cotangent = size * torch.rand(257, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    exact = results(linear_cross_entropy, learned, target, cotangent, torch.float64)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = results(linear_cross_entropy, learned, target, cotangent)
        other = results(two_operators, learned, target, cotangent)
    for mine, theirs, wide in zip(found, other, exact, strict=True):
        assert mine.dtype == torch.float32
        errors = [float((t.double() - wide).norm()) for t in (mine, theirs)]
        assert errors[0] <= 1e-5 * float(wide.norm()) or errors[0] < 1.1 * errors[1], errors
        assert errors[0] <= 2e-2 * float(wide.norm())
    assert not found[0][::16].any() and not found[1][::16].any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_without_a_gradient_and_with_cotangents_of_zero(dtype):
    x, weight, bias, target = (t if t.dtype == torch.int64 else t.to(dtype) for t in inputs(8191, dtype))
    loss, *gradients = results(linear_cross_entropy, (x, weight, bias), target, torch.zeros(257).cuda())
    assert not any(t.any() or t.isnan().any() for t in gradients)
    assert torch.equal(linear_cross_entropy(x, weight, target, bias=bias), loss) and loss.any()
    none = torch.full_like(target, -1)
    loss, *gradients = results(linear_cross_entropy, (x, weight, bias), none, torch.ones(257).cuda())
    assert not loss.any() and not any(t.any() for t in gradients)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_class", [8192, 50_257])
def test_a_captured_graph_and_a_repeated_run_give_the_same_bits(dtype, n_class):
    *learned, target = inputs(n_class, dtype)
    cotangent = torch.rand(257, device="cuda") / 257

    def run() -> list[torch.Tensor]:
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return results(linear_cross_entropy, learned, target, cotangent)

    expected = run()
    assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(2):
        graph.replay()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@needs_gpu
def test_one_buffer_of_logits_is_held():
    """Logits, loss and gradient of 16,384 rows take the memory of one [row d_vocab], and of two otherwise."""
    *learned, target = inputs(8192, torch.bfloat16, 16_384)
    buffer, peaks = 2 * 16_384 * 8192, []
    for call in (linear_cross_entropy, two_operators):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            results(call, learned, target, torch.ones(16_384, device="cuda"))
        peaks.append((torch.cuda.max_memory_allocated() - held) / buffer)
    assert 1 <= peaks[0] < 1.5 and peaks[1] > 2
