"""What operators refuse, by name; extreme inputs; precision; second derivatives."""

import pytest
import torch
from mixer_cases import RANDOM, random_softmax

from kernels import KernelError, causal_conv, checks, selective_scan, softmax_attention
from kernels import gated_linear_attention as linear
from kernels.checkpointed_scan import CheckpointedScan

q4 = torch.ones(2, 5, 4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax_attention.pattern(q4, q4[:, :, :3]), "k has 3 heads, accepted are divisors of 4"),
        (lambda: softmax_attention.pattern(q4, q4[..., :2]), "k has shape (2, 5, 4, 2)"),
        (lambda: softmax_attention.pattern(q4[0], q4), "q has shape (5, 4, 3)"),
        (lambda: softmax_attention.pattern(q4, q4[:, :3]), "5 queries for 3 keys"),
        (lambda: softmax_attention.pattern(q4, q4, window=0), "window is 0"),
        (lambda: softmax_attention.pattern(q4, q4, sink=q4[0, 0, :3, 0]), "sink has shape (3,)"),
        (lambda: softmax_attention.pattern(q4.int(), q4), "q has dtype torch.int32"),
        (lambda: softmax_attention.pattern(q4, q4.to("meta")), "k is on meta, but q is on cpu"),
        (lambda: linear.parallel(q4, q4, q4, log_decay=q4[0]), "log_decay has shape (5, 4, 3)"),
        (lambda: linear.parallel(q4, q4, q4, log_decay=q4[0, 0]), "log_decay has shape (4, 3)"),
        (lambda: linear.chunked(q4, q4, q4, chunk=0), "chunk is 0"),
        (lambda: linear.chunked(q4[:, :0], q4[:, :0], q4[:, :0]), "accepted are sequences of at least 1"),
        (
            lambda: linear.chunked(
                q4, q4, q4, normalise=True, state=linear.LinearState(s=torch.ones(2, 4, 3, 3))
            ),
            "normalise=True needs a state with z",
        ),
        (lambda: linear.gated_linear_attention(q4, q4, q4, form="fast"), "form 'fast' is unknown"),
        (lambda: linear.gated_linear_attention(q4, q4, q4, backend="cuda"), "backend 'cuda' is unknown"),
        (lambda: causal_conv.causal_conv(q4[0], torch.ones(3, 4), state=q4[0]), "state has shape (5, 4, 3)"),
        (
            lambda: selective_scan.step(q4[0, 0], q4[0, 0], torch.ones(3, 2), q4[0, 0], torch.ones(4, 2)),
            "B has shape (4, 3) for [batch d_state], but d_state is 2",
        ),
    ],
)
def test_refusals_name_the_tensor_and_what_is_accepted(call, message):
    with pytest.raises(KernelError) as error:
        call()
    assert message in str(error.value)


def test_backend_rule(monkeypatch):
    monkeypatch.setattr(checks, "TRITON_OPERATORS", frozenset({"delta_rule"}))
    cpu = torch.ones(1)
    assert checks.resolve_backend("delta_rule", None, cpu) == "torch"
    assert checks.resolve_backend("delta_rule", "torch", cpu) == "torch"
    with pytest.raises(KernelError, match="needs CUDA tensors, got cpu"):
        checks.resolve_backend("delta_rule", "triton", cpu)
    with pytest.raises(KernelError, match="s4d: backend 'triton' is not available for this operator"):
        checks.resolve_backend("s4d", "triton", cpu)


@pytest.mark.parametrize("name", ["linear", "scalar_decay", "ssd", "selective_scan"])
def test_a_second_derivative_is_refused_by_name_and_given_by_the_parallel_form(name):
    operator = RANDOM[name]
    x = {n: t.requires_grad_() for n, t in operator.inputs(5, torch.Generator().manual_seed(0)).items()}
    for form in ("parallel", "chunked"):
        output = operator.run(x, form, None)[0]
        # The square makes the first derivative depend on the inputs.
        gradients = torch.autograd.grad((output**2).sum(), list(x.values()), create_graph=True)
        second = sum((g**2).sum() for g in gradients)
        if form == "parallel":
            assert torch.autograd.grad(second, list(x.values()))[0].abs().max() > 0
        else:
            with pytest.raises(KernelError, match="no second derivative in form 'chunked'"):
                torch.autograd.grad(second, list(x.values()))


def test_softmax_second_derivative_is_refused():
    x = {n: t.requires_grad_() for n, t in random_softmax(5).items()}
    output = softmax_attention.chunked(x["q"], x["k"], x["v"], window=2)
    (gradient,) = torch.autograd.grad((output**2).sum(), x["q"], create_graph=True)
    with pytest.raises(KernelError, match="softmax_attention: no second derivative"):
        torch.autograd.grad(gradient.sum(), x["q"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per_channel", [False, True])
def test_extreme_decays_give_no_nan(dtype, per_channel):
    """Log decays of 0, -1e4 and -inf: a hard reset forgets what was before it, and gradients stay finite."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 4, generator=g, dtype=dtype).requires_grad_() for _ in range(3))
    decay = torch.zeros(1, 70, 2, 4 if per_channel else 1, dtype=dtype)
    decay[:, 10], decay[:, 40], decay[:, 41:50] = -1e4, -torch.inf, -30.0
    decay = (decay if per_channel else decay[..., 0]).requires_grad_()
    outputs = {}
    for form in ("parallel", "chunked", "recurrent"):
        outputs[form], state = linear.gated_linear_attention(q, k, v, log_decay=decay, form=form)
        loss = (outputs[form] ** 2).sum() + (state.s**2).sum()
        for gradient in torch.autograd.grad(loss, [q, k, v, decay]):
            assert gradient.isfinite().all(), form
        torch.testing.assert_close(outputs[form], outputs["parallel"], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        after = linear.chunked(q[:, 40:], k[:, 40:], v[:, 40:], log_decay=decay[:, 40:])[0]
        torch.testing.assert_close(after, outputs["chunked"][:, 40:], rtol=1e-4, atol=1e-4)


def test_extreme_step_sizes_give_no_nan():
    dt = torch.tensor([0.0, 1e-30, 1e4, 1.0, 1e-8]).view(1, 5, 1).expand(1, 5, 2).clone().requires_grad_()
    ones = torch.ones(1, 5, 2)
    A_log = torch.tensor([[-20.0, 12.0], [0.0, 5.0]], requires_grad=True)
    for form in ("parallel", "chunked", "recurrent"):
        y, state = selective_scan.selective_scan(ones, dt, A_log, ones, ones, form=form)
        gradients = torch.autograd.grad((y**2).sum() + state.sum(), [dt, A_log])
        assert y.isfinite().all() and all(g.isfinite().all() for g in gradients), form
    steps = selective_scan.softplus_dt(torch.tensor([-200.0, 0.0, 200.0]))
    assert steps.tolist() == [
        0.0,
        pytest.approx(0.693147),
        200.0,
    ]


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_half_precision_inputs_are_added_up_in_float32(form):
    """4,096 equal writes: a bfloat16 sum would stop at 256."""
    one = torch.ones(1, 4096 if form == "chunked" else 600, 1, 1, dtype=torch.bfloat16)
    output, state = linear.gated_linear_attention(one, one, one, form=form)
    assert output.dtype == torch.bfloat16 and state.s.dtype == torch.float32
    assert state.s.item() == one.shape[1]
    scan, last = selective_scan.selective_scan(
        one[0].view(1, -1, 1),
        *[one.view(1, -1, 1)],
        torch.full((1, 1), -50.0),
        one.view(1, -1, 1),
        one.view(1, -1, 1),
        form=form,
    )
    assert scan.dtype == torch.bfloat16 and last.item() == pytest.approx(one.shape[1], rel=1e-4)


def test_autocast_does_not_lower_the_precision():
    x = RANDOM["scalar_decay"].inputs(33, torch.Generator().manual_seed(0))
    x = {name: t.float() for name, t in x.items()}
    plain = RANDOM["scalar_decay"].run(x, "chunked", None)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(RANDOM["scalar_decay"].run(x, "chunked", None)[0], plain)


def test_gradients_that_are_not_contiguous_or_missing():
    x = {n: t.requires_grad_() for n, t in RANDOM["ssd"].inputs(33, torch.Generator().manual_seed(0)).items()}
    for form in ("parallel", "chunked"):
        output, (state,) = RANDOM["ssd"].run(x, form, None)
        strided = torch.autograd.grad(
            output, x["x"], torch.ones(()).double().expand_as(output), retain_graph=True
        )[0]
        only_state = torch.autograd.grad(state.sum(), x["x"])[0]
        if form == "parallel":
            expected = strided, only_state
    torch.testing.assert_close(strided, expected[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(only_state, expected[1], rtol=0, atol=1e-11)


def saved_elements(function, *inputs: torch.Tensor) -> int:
    """Numbers that autograd keeps for the backward of a call."""
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = function(*inputs)
    assert result is not None
    return sum(kept.values())


def test_what_is_kept_for_the_backward_grows_linearly():
    def kept(seq: int) -> dict[str, int]:
        u, dt = (torch.rand(1, seq, 32, requires_grad=True) for _ in range(2))
        B, C = (torch.rand(1, seq, 16, requires_grad=True) for _ in range(2))
        A_log = torch.zeros(32, 16, requires_grad=True)
        q, k, v = (torch.rand(1, seq, 2, 8, requires_grad=True) for _ in range(3))
        return {
            "scan": saved_elements(lambda *a: selective_scan.chunked(*a)[0], u, dt, A_log, B, C),
            "linear": saved_elements(lambda *a: linear.chunked(*a, normalise=True)[0], q, k, v),
            "window": saved_elements(lambda *a: softmax_attention.chunked(*a, window=64), q, k, v),
        }

    short, long = kept(512), kept(2048)
    for name, count in long.items():
        assert count < 4.5 * short[name], name
    # Less than one state per step (the loop keeps several).
    assert long["scan"] < 2048 * 32 * 16 / 2


def test_scan_gradients_against_finite_differences():
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 19, 3), (2, 19, 3), (4, 3), (2, 19, 4), (2, 19, 4), (2, 4, 3))
    inputs = [torch.rand(s, generator=g, dtype=torch.float64) for s in shapes]
    inputs[2] = -inputs[2]
    assert torch.autograd.gradcheck(CheckpointedScan.apply, [x.requires_grad_() for x in inputs])


def test_a_width_of_zero_is_refused_in_every_form():
    q = torch.zeros(1, 3, 2, 0)
    for form in (softmax_attention.chunked, softmax_attention.parallel):
        with pytest.raises(KernelError, match="d_head is 1 or more"):
            form(q, q, torch.zeros(1, 3, 2, 4))
    u, a, b = torch.zeros(1, 3, 4), torch.zeros(4, 0), torch.zeros(1, 3, 0)
    for form in (selective_scan.chunked, selective_scan.parallel):
        with pytest.raises(KernelError, match="d_state is 1 or more"):
            form(u, u, a, b, b)


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_a_wider_skip_leaves_the_output_its_dtype(form):
    x = torch.ones(1, 3, 2, 4, dtype=torch.bfloat16)
    plain = linear.gated_linear_attention(x, x, x, form=form)[0]
    skipped = linear.gated_linear_attention(x, x, x, skip=torch.tensor([1.0, 2.0]), form=form)[0]
    assert skipped.dtype == torch.bfloat16
    assert torch.equal((skipped - plain)[0, :, :, 0], torch.tensor([[1.0, 2.0]] * 3, dtype=torch.bfloat16))
