"""One-token steps in Triton's interpreter: through the public `step` functions, against their torch forms.

Run by ../test_interpreter.py, as test_operators.py is.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels import causal_conv as conv
from kernels import gated_linear_attention as linear
from kernels import selective_scan as scan
from kernels import softmax_attention as softmax
from kernels import ssd
from kernels.triton import decode_attention

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("processors", [1, 60], ids=["one part", "many parts"])
@pytest.mark.parametrize(
    ("n_src", "heads", "groups", "d_v", "window", "has_sink"),
    [(1, 1, 1, 16, None, False), (70, 6, 2, 24, None, True), (300, 2, 2, 16, None, False),
     (300, 20, 1, 16, 130, True)],
)  # fmt: skip
def test_softmax_step(n_src, heads, groups, d_v, window, has_sink, processors, monkeypatch):
    monkeypatch.setattr(decode_attention, "processors", lambda device: processors)
    torch.manual_seed(0)
    q = torch.randn(2, 1, heads, 12)
    k, v = torch.randn(2, n_src, groups, 12), torch.randn(2, n_src, groups, d_v)
    options = {"window": window, "sink": torch.randn(heads) if has_sink else None, "scale": -0.4}
    state = softmax.KVState(k=k[:, :-1], v=v[:, :-1], length=n_src - 1)
    found, after = softmax.step(q, k[:, -1:], v[:, -1:], state, **options, backend="triton")
    expected, kept = softmax.step(q, k[:, -1:], v[:, -1:], state, **options, backend="torch")
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(after.k, kept.k)
    assert after.length == n_src


def test_several_new_positions_take_the_kernel_of_sequences():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 4, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
    state = softmax.KVState(k=k[:, :-3], v=v[:, :-3], length=17)
    found, _ = softmax.step(q, k[:, -3:], v[:, -3:], state, backend="triton")
    torch.testing.assert_close(found, softmax.parallel(q, k, v), **CLOSE)


@pytest.mark.parametrize("kind", ["plain", "per head", "normalised", "grouped"])
def test_linear_step(kind):
    torch.manual_seed(0)
    heads, groups = 4, 2 if kind == "grouped" else 4
    q, k = (torch.rand(3, groups, 20) for _ in range(2))
    v = torch.randn(3, heads, 24)
    normalise = kind == "normalised"
    options = {
        "scale": 0.7, "normalise": normalise, "eps": 0.1,
        "log_decay": {"plain": None, "per head": -torch.rand(heads)}.get(kind, -torch.rand(3, heads)),
        "k_weight": torch.rand(3, heads) if kind == "grouped" else None,
    }  # fmt: skip
    state = linear.LinearState(s=torch.randn(3, heads, 20, 24), z=torch.rand(3, heads, 20))
    for before in (None, state):
        found, after = linear.step(q, k, v, **options, state=before, backend="triton")
        expected, end = linear.step(q, k, v, **options, state=before, backend="torch")
        torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(after.s, end.s, **CLOSE)
        assert (after.z is None) == (end.z is None)
        if normalise:
            torch.testing.assert_close(after.z, end.z, **CLOSE)


def test_ssd_step_carries_its_state_on():
    torch.manual_seed(0)
    x, dt, rates, skip = torch.randn(2, 3, 4, 16), torch.rand(2, 3, 4), torch.randn(4), torch.randn(4)
    b, c = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 8)
    states = {"triton": None, "torch": None}
    for t in range(3):
        found = {}
        for backend, state in states.items():
            found[backend], states[backend] = ssd.step(
                x[:, t], dt[:, t], rates, b[:, t], c[:, t], D=skip, state=state, backend=backend
            )
        torch.testing.assert_close(found["triton"], found["torch"], **CLOSE)
    torch.testing.assert_close(states["triton"], states["torch"], **CLOSE)


@pytest.mark.parametrize(("d_state", "full"), [(5, True), (16, False), (40, True)])
def test_scan_step(d_state, full):
    torch.manual_seed(0)
    u, dt, z = torch.randn(2, 36), torch.rand(2, 36), torch.randn(2, 36)
    rates, b, c = torch.randn(36, d_state), torch.randn(2, d_state), torch.randn(2, d_state)
    options = {"D": torch.randn(36), "z": z, "state": torch.randn(2, 36, d_state)} if full else {}
    found, after = scan.step(u, dt, rates, b, c, **options, backend="triton")
    expected, end = scan.step(u, dt, rates, b, c, **options, backend="torch")
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(after, end, **CLOSE)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("full", [True, False])
def test_conv_step(width, full):
    torch.manual_seed(0)
    wide = torch.randn(2, 60)
    x, state = wide[:, ::2][:, :30], torch.randn(2, width - 1, 30)
    weight, bias = torch.randn(30, width), torch.randn(30) if full else None
    found, after = conv.step(x, weight, bias, state=state, silu=full, backend="triton")
    expected, end = conv.step(x, weight, bias, state=state, silu=full, backend="torch")
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(after, end)


def test_a_gradient_through_a_step_is_refused_by_name():
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(8, 4)
    with pytest.raises(ValueError, match="'triton' does not take a gradient through a step"):
        conv.step(x, weight, state=torch.zeros(2, 3, 8), backend="triton")
    q = torch.randn(2, 4, 16, requires_grad=True)
    with pytest.raises(ValueError, match="'triton' does not take a gradient through a step"):
        linear.step(q, q, q, backend="triton")
    with torch.no_grad():
        linear.step(q, q, q, backend="triton")
    with pytest.raises(ValueError, match="'triton' does not take a decay per key channel"):
        linear.step(q.detach(), q.detach(), q.detach(), log_decay=-q.detach().abs(), backend="triton")


def test_shapes_that_disagree_are_named_before_a_kernel_starts():
    q, v = torch.randn(2, 3, 16), torch.randn(2, 4, 16)
    with pytest.raises(ValueError, match="q has 3 heads, accepted are divisors of 4"):
        linear.step(q, q, v, backend="triton")
    with pytest.raises(ValueError, match=r"state has shape \(2, 2, 8\)"):
        conv.step(torch.randn(2, 8), torch.randn(8, 4), state=torch.zeros(2, 2, 8), backend="triton")
