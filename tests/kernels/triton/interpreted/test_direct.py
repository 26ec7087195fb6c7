"""Operators called directly and through PyTorch's dispatcher do the same; what is to see an operator sees it.

Run by ../test_interpreter.py, as test_operators.py is.
"""

import os

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels.triton import decode, ops
from kernels.triton.causal_conv import causal_conv
from kernels.triton.gated_linear_attention import gated_linear_attention
from kernels.triton.selective_scan import selective_scan
from kernels.triton.softmax_attention import softmax_attention

X = torch.randn(1, 9, 2, 16, generator=torch.Generator().manual_seed(0))
CALLS = {
    "softmax_attention": lambda x: softmax_attention(x, x, x, sink=x[0, 0, :, 0].contiguous()),
    "linear_attention": lambda x: gated_linear_attention(
        x[:, :, :1], x, x, log_decay=-x[..., 0].abs(), k_weight=x[..., 1], skip=x[0, 0, :, 2].contiguous(),
        scale=2,
    )[:2],
    "selective_scan": lambda x: selective_scan(
        x[:, :, 0], x[:, :, 1].abs(), x[0, 0, 0, :, None].expand(16, 4), x[:, :, 0, :4], x[:, :, 1, :4],
        z=x[:, :, 1],
    ),
    "causal_conv": lambda x: causal_conv(x[:, :, 0], x[0, :4, 1].T, x[0, 0, 0], silu=True),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CALLS)


def results(name: str, x: torch.Tensor = X) -> tuple[torch.Tensor, ...]:
    """Outputs and the gradient of x."""
    x = x.detach().requires_grad_()
    outputs = CALLS[name](x)
    (gradient,) = torch.autograd.grad(sum(out.square().sum() for out in outputs), x)
    return *outputs, gradient


def through_the_dispatcher(name: str, monkeypatch) -> tuple[torch.Tensor, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(ops, "DIRECT", False)
        return results(name)


class Seen(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """The same of a function mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@EACH
def test_both_paths_give_the_same(name, monkeypatch):
    found = results(name)
    assert found[-1].abs().max() > 0
    for x, y in zip(found, through_the_dispatcher(name, monkeypatch), strict=True):
        assert torch.equal(x, y)
    with torch.no_grad():
        outputs = CALLS[name](X.detach().requires_grad_())
    assert not outputs[0].requires_grad and torch.equal(outputs[0], found[0])
    assert not CALLS[name](X)[0].requires_grad


@EACH
def test_the_direct_path_is_taken_and_left_for_what_is_to_see_the_operator(name):
    x = X.clone().requires_grad_()
    assert type(CALLS[name](x)[0].grad_fn).__name__ == f"{name}Backward"
    for mode in (Seen(), Calls()):
        with mode:
            y = CALLS[name](x)[0]
            torch.autograd.grad(y.sum(), x)
        assert f"beyond_softmax.{name}.default" in mode.names
        # A function mode ends where the backward begins.
        assert (f"beyond_softmax.{name}_backward.default" in mode.names) == isinstance(mode, Seen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        CALLS[name](x)
    assert f"beyond_softmax::{name}" in {event.key for event in profile.key_averages()}


@EACH
def test_hooks_see_what_is_saved(name, monkeypatch):
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.clone()

    expected = through_the_dispatcher(name, monkeypatch)[-1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = X.clone().requires_grad_()
        outputs = CALLS[name](x)
    (gradient,) = torch.autograd.grad(sum(out.square().sum() for out in outputs), x)
    assert torch.equal(gradient, expected)
    assert (1, 9, 2, 16) in seen or (1, 9, 16) in seen


@EACH
def test_autocast_changes_nothing(name, monkeypatch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = results(name), through_the_dispatcher(name, monkeypatch)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y)


@EACH
@pytest.mark.parametrize("direct", [True, False])
def test_a_second_backward_is_refused_by_name(name, direct, monkeypatch):
    monkeypatch.setattr(ops, "DIRECT", direct)
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(CALLS[name](x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(ValueError, match=f"{name}_backward: second derivatives are not available"):
        gradient.sum().backward()


def forward_mode(name: str) -> None:
    with forward_ad.dual_level():
        CALLS[name](forward_ad.make_dual(X.clone().requires_grad_(), torch.ones_like(X)))


@EACH
@pytest.mark.parametrize("transform", ["vmap", "grad", "forward"])
def test_transforms_meet_what_they_met(name, transform, monkeypatch):
    call = {
        "vmap": lambda: torch.vmap(lambda x: CALLS[name](x)[0])(X.expand(3, *X.shape).clone()),
        "grad": lambda: torch.func.grad(lambda x: CALLS[name](x)[0].sum())(X),
        "forward": lambda: forward_mode(name),
    }[transform]
    found = []
    for direct in (True, False):
        monkeypatch.setattr(ops, "DIRECT", direct)
        try:
            found.append(call())
        except Exception as error:
            found.append((type(error), str(error)))
    if isinstance(found[0], torch.Tensor):
        assert torch.equal(*found)
    else:
        assert found[0] == found[1]


def test_tensors_that_are_not_plain_go_through_the_dispatcher():
    y = softmax_attention(*[X.to("meta")] * 3)[0]
    assert y.shape == X.shape and y.device.type == "meta"
    negative = torch.complex(X, X).conj().imag
    assert negative.is_neg()
    weight = torch.ones(16, 2)
    found = causal_conv(negative[:, :, 0], weight)[0]
    assert torch.equal(found, causal_conv(-X[:, :, 0], weight)[0])


def test_vectors_may_have_gaps():
    """A sink, a skip, a D and a bias that are columns of a matrix; also those of steps."""
    heads, channels = torch.randn(2, 3)[:, 1], torch.randn(16, 3)[:, 1]
    u, rates, dt = X[:, :, 0], torch.zeros(16, 4), X[:, :, 1].abs()
    calls = {
        "sink": lambda s: softmax_attention(X, X, X, sink=s)[0],
        "skip": lambda s: gated_linear_attention(X, X, X, skip=s)[0],
        "d": lambda s: selective_scan(u, dt, rates, u[..., :4], u[..., :4], D=s)[0],
        "bias": lambda s: causal_conv(u, torch.ones(16, 2), s)[0],
        "bias of a step": lambda s: decode.conv_step(u[:, 0], rates, s, state=u[:, :3])[0],
    }
    for name, call in calls.items():
        vector = heads if name in ("sink", "skip") else channels
        assert torch.equal(call(vector), call(vector.contiguous())), name
        with Seen():
            assert torch.equal(call(vector), call(vector.contiguous())), name


def test_numbers_are_those_of_the_schema():
    given = (X, X, X, None, 1, 0)
    kinds = []

    def implementation(*args):
        kinds.append([type(x) for x in args[4:]])
        return X, X

    registered = torch.ops.beyond_softmax.softmax_attention.default
    call = ops._caller("softmax_attention", registered, implementation)
    call(*given)
    assert kinds == [[float, int]]
