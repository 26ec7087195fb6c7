"""On a GPU: the benchmark's comparisons with float64, torch.compile, CUDA graphs and the dispatch rule."""

import pytest
import torch

from kernels import gated_linear_attention as linear
from kernels import softmax_attention as softmax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.slow
def test_all_comparisons_with_float64():
    from experiments.benchmarks.kernel_jobs import OPERATORS, run_checks

    found = list(run_checks(OPERATORS))
    assert len(found) > 1000
    assert [check for check in found if not check.passed] == []


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(2, 300, 4, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def test_a_cuda_tensor_takes_the_kernel_and_float64_the_torch_form():
    q, k, v = inputs()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile:
        softmax.softmax_attention(q, k, v)
    assert any("beyond_softmax" in event.key for event in profile.key_averages())
    wide = [x.double() for x in (q, k, v)]
    assert softmax.softmax_attention(*wide).dtype == torch.float64
    with pytest.raises(ValueError, match="does not take dtype torch.float64"):
        softmax.softmax_attention(*wide, backend="triton")


def test_compiles_without_graph_breaks():
    q, k, v = inputs()

    def both(q, k, v):
        return softmax.softmax_attention(q, k, v) + linear.gated_linear_attention(q, k, v)[0]

    expected = torch.autograd.grad(both(q, k, v).float().square().sum(), (q, k, v))
    compiled = torch.compile(both, fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v).float().square().sum(), (q, k, v))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=5e-2 * y.abs().max().item(), rtol=2e-2)


def test_a_captured_graph_repeats_the_eager_result():
    q, k, v = inputs()

    def gradients():
        o, _ = linear.gated_linear_attention(q, k, v)
        return torch.autograd.grad(o.float().square().sum(), (q, k, v))

    expected = gradients()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    for _ in range(2):
        graph.replay()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
