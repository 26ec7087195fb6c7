"""On a GPU: the benchmark's comparisons with float64, and what training does with the operators: compiling,
graphs, autocast, checkpointing, a second backward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels import causal_conv as conv
from kernels import gated_linear_attention as linear
from kernels import selective_scan as scan
from kernels import softmax_attention as softmax
from kernels.gated_silu import packed_gated_silu
from kernels.packed_linear_attention import packed_linear_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPERATORS = {
    "softmax_attention": lambda q, k, v: softmax.softmax_attention(q, k, v),
    "linear_attention": lambda q, k, v: linear.gated_linear_attention(q, k, v)[0],
    "scalar_decay": lambda q, k, v: linear.gated_linear_attention(
        q, k, v, log_decay=-v[..., 0].float().abs(), k_weight=k[..., 0].float()
    )[0],
    "packed_linear_attention": lambda q, k, v: packed_linear_attention(
        torch.cat([x.flatten(2) for x in (q, k, v)], -1), 4, normalise=True, eps=0.1
    )[0],
    "packed_gated_silu": lambda q, k, v: v * packed_gated_silu(torch.cat((q, k), -1)),
    "selective_scan": lambda q, k, v: scan.selective_scan(
        q.flatten(2), k.flatten(2).abs(), k[0, 0].flatten()[:, None].float() * torch.ones(16, device="cuda"),
        v[:, :, 0, :16], q[:, :, 1, :16], z=v.flatten(2),
    )[0],
    "causal_conv": lambda q, k, v: conv.causal_conv(
        q.flatten(2), k[0, :4].flatten(1).T, v[0, 0].flatten(), silu=True
    )[0],
}  # fmt: skip
EACH = pytest.mark.parametrize("operator", list(OPERATORS))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_comparisons_with_float64():
    from experiments.benchmarks.kernels.jobs import OPERATORS as NAMES
    from experiments.benchmarks.kernels.jobs import run_checks

    found = list(run_checks(NAMES))
    assert len(found) > 1500
    assert [check for check in found if not check.passed] == []


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 300, 4, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def gradients(function, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(function(*tensors).float().square().mean(), tensors)


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


def test_a_step_takes_the_kernel_unless_a_gradient_is_asked_for():
    x, weight, state = torch.randn(2, 8, device="cuda"), torch.randn(8, 4, device="cuda"), None
    state = torch.zeros(2, 3, 8, device="cuda")
    for asks, expected in ((False, True), (True, False)):
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with profile:
            conv.step(x.detach().requires_grad_(asks), weight, state=state)
        assert any("conv_step" in event.key for event in profile.key_averages()) == expected


@EACH
def test_what_is_started_again_reads_the_tensors_of_its_call(operator):
    """Other addresses, and views that are not aligned, after the kernels have been started once."""
    function = OPERATORS[operator]
    gradients(function, inputs())
    torch.manual_seed(1)
    wide = [torch.randn(2, 300, 4, 65, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    views = [x[..., 1:].requires_grad_() for x in wide]
    whole = [x.detach().contiguous().requires_grad_() for x in views]
    for x, y in zip(gradients(function, views), gradients(function, whole), strict=True):
        torch.testing.assert_close(x, y, atol=2e-2 * y.abs().max().item(), rtol=2e-2)


def test_tensors_of_two_devices_do_not_reach_a_kernel():
    from kernels.triton import softmax_attention as fused

    q, k, v = inputs()
    fused.softmax_attention(q, k, v)
    with pytest.raises(ValueError, match="softmax_attention: tensors are on a GPU and on the CPU"):
        fused.softmax_attention(q, k.cpu(), v)


@EACH
def test_compiles_without_graph_breaks(operator):
    torch._dynamo.reset()
    function, tensors = OPERATORS[operator], inputs()
    expected = gradients(function, tensors)
    found = gradients(torch.compile(function, fullgraph=True), tensors)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2 * y.abs().max().item(), rtol=2e-2)


@EACH
def test_a_captured_graph_repeats_the_eager_result(operator):
    function, tensors = OPERATORS[operator], inputs()
    expected = gradients(function, tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(function, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(function, tensors)
    for _ in range(2):
        graph.replay()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


@EACH
def test_activation_checkpointing_changes_nothing(operator):
    function, tensors = OPERATORS[operator], inputs()
    expected = gradients(function, tensors)
    found = gradients(lambda *x: checkpoint(function, *x, use_reentrant=False), tensors)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@EACH
def test_under_autocast_a_projection_feeds_the_kernel(operator):
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 3 * 4 * 64, device="cuda")
    x = torch.randn(2, 300, 32, device="cuda")

    def output() -> torch.Tensor:
        return OPERATORS[operator](*layer(x).unflatten(-1, (3, 4, 64)).unbind(2))

    expected = torch.autograd.grad(output().float().square().mean(), layer.weight)[0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mixed = output()
    assert mixed.dtype == torch.bfloat16
    found = torch.autograd.grad(mixed.float().square().mean(), layer.weight)[0]
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 3e-2 * expected.norm()


@pytest.mark.parametrize("operator", [n for n in OPERATORS if n != "scalar_decay"])
def test_a_second_backward_is_refused_by_name(operator):
    q, k, v = inputs()
    loss = OPERATORS[operator](q, k, v).float().square().mean()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(ValueError, match=f"{operator}_backward: second derivatives are not available"):
        gradient.float().sum().backward()


def test_every_operator_is_registered_as_torch_checks_it():
    from kernel_operator_inputs import CHECKS, differentiable, every_operator

    for name, given in every_operator("cuda", torch.bfloat16).items():
        plain = name.endswith(("_backward", "_step", "_matches"))
        operator = getattr(torch.ops.beyond_softmax, name).default
        checks = CHECKS if plain else (*CHECKS, "test_aot_dispatch_static")
        torch.library.opcheck(operator, given if plain else differentiable(given), test_utils=checks)


def test_a_dtype_without_a_kernel_and_two_devices_are_named():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="k is on cpu, but q is on cuda:0"):
        softmax.softmax_attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="q has dtype torch.int32, accepted are floating-point dtypes"):
        softmax.softmax_attention(q.int(), k, v)
