"""Operators of projections that lie side by side, in Triton's interpreter against their readable forms in
float64, and the mixer and the MLP that call them.

Run by ../test_interpreter.py, as test_operators.py is.
"""

import os
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

import interpreter_bfloat16  # noqa: F401

import kernels.gated_silu as silu
import kernels.packed_linear_attention as packed
from kernels import KernelError
from kernels.triton import linear_attention_launch
from models.blocks import MLP
from models.config import LinearAttentionConfig, MLPConfig
from models.form import Form
from models.mixers.linear_attention import LinearAttention

SEGMENTS = pytest.mark.parametrize("processors", [1, 40], ids=["whole", "segments"])


def outputs(call, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of `call` and the gradient of x; every output but None is used."""
    x = x.detach().requires_grad_()
    found = [out for out in call(x) if out is not None]
    torch.manual_seed(1)
    total = 0.0
    for out in found:
        cotangent = torch.randn(*out.shape[:-1], 2 * out.shape[-1], dtype=torch.float64)[..., ::2]
        total = total + (out.double() * cotangent).sum()
    return [out.detach() for out in found] + list(torch.autograd.grad(total, x))


def agree(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    """Every tensor within a bound, relative to its norm."""
    for n, (x, wide) in enumerate(zip(found, expected, strict=True)):
        x, wide = x.detach(), wide.detach()
        assert wide.norm() > 0.1
        error = float((x.double() - wide.double()).norm() / wide.norm())
        assert error < bound, (n, error)


def attend(backend: str, normalise: bool, n_heads: int = 2):
    """Packed linear attention as a function to its output and its last state."""

    def call(x: torch.Tensor) -> list[torch.Tensor | None]:
        o, state = packed.packed_linear_attention(
            x, n_heads, normalise=normalise, eps=0.1 if normalise else 0.0, backend=backend
        )
        return [o, state.s, state.z]

    return call


@SEGMENTS
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_linear_attention(dtype, bound, normalise, processors, monkeypatch):
    monkeypatch.setattr(linear_attention_launch, "processors", lambda device: processors)
    torch.manual_seed(0)
    # Columns of something wider, from an odd one on, and a length that is no whole chunk.
    x = torch.randn(2, 133, 110).to(dtype)[..., 3:105]
    found = outputs(attend("triton", normalise), x)
    assert [t.dtype for t in (found[0], found[1], found[-1])] == [dtype, torch.float32, dtype]
    agree(found, outputs(attend("torch", normalise), x.double()), bound)


@pytest.mark.parametrize(("n_heads", "d_head"), [(1, 1), (3, 5), (1, 150)])
def test_linear_attention_of_odd_sizes(n_heads, d_head):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 3 * n_heads * d_head)[:, 1:]
    wide = outputs(attend("torch", True, n_heads), x.double())
    agree(outputs(attend("triton", True, n_heads), x), wide, 5e-6)


def test_rows_of_any_stride():
    torch.manual_seed(0)
    whole = torch.randn(9, 3, 24)
    for x in (whole.transpose(0, 1), whole[::2], whole.flip(0)[1:], torch.randn(2, 24, 9).mT):
        wide = outputs(attend("torch", False), x.double())
        agree(outputs(attend("triton", False), x), wide, 5e-6)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_one_output_alone_has_its_gradient(used):
    torch.manual_seed(0)
    x = torch.randn(1, 7, 24)

    def one(backend: str):
        return lambda x: attend(backend, True)(x)[used : used + 1]

    agree(outputs(one("triton"), x), outputs(one("torch"), x.double()), 5e-6)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("width", [1, 17, 300])
def test_gated_silu(width, dtype, bound):
    torch.manual_seed(0)
    h = (3 * torch.randn(2, 7, 2 * width + 5)).to(dtype)[..., 3 : 2 * width + 3]
    found = outputs(lambda h: [silu.packed_gated_silu(h, backend="triton")], h)
    assert found[0].dtype == found[1].dtype == dtype
    agree(found, outputs(lambda h: [silu.gated_silu(*h.chunk(2, -1))], h.double()), bound)


def test_gated_silu_of_one_row_and_of_a_transpose():
    h = torch.randn(6, 4)
    for x in (h[0], h.T, h[:, None].transpose(0, 1)):
        found = silu.packed_gated_silu(x, backend="triton")
        torch.testing.assert_close(found, silu.packed_gated_silu(x, backend="torch"))


@pytest.mark.parametrize("name", ["packed_linear_attention", "packed_gated_silu"])
def test_a_second_backward_is_refused_by_name(name):
    x = torch.randn(1, 5, 24, requires_grad=True)
    y = attend("triton", False)(x)[0] if "linear" in name else silu.packed_gated_silu(x, backend="triton")
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(KernelError, match=f"{name}_backward: second derivatives are not available"):
        gradient.sum().backward()


def test_what_the_kernels_do_not_take_is_named():
    for call in (attend("triton", False, 1), lambda x: silu.packed_gated_silu(x, backend="triton")):
        with pytest.raises(KernelError, match="does not take dtype torch.float64"):
            call(torch.ones(1, 2, 24).double())
    with pytest.raises(KernelError, match="does not take d_head 257"):
        attend("triton", False, 1)(torch.ones(1, 2, 3 * 257))


def use_triton(module, monkeypatch) -> list[tuple[int, ...]]:
    """Have a module's operator take its kernels here, as it does on a GPU; shapes that it was called with."""
    seen = []

    def resolve(operator, backend, tensor, unfit=None):
        seen.append(tuple(tensor.shape))
        return "triton"

    monkeypatch.setattr(module, "resolve_backend", resolve)
    return seen


@pytest.mark.parametrize("d_conv", [0, 3])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_mixer(normalise, d_conv, monkeypatch):
    """Output, last state and gradients are those of the ordinary path, which a hook brings back."""
    torch.manual_seed(0)
    config = LinearAttentionConfig(n_heads=2, d_head=5, normalise=normalise, d_conv=d_conv)
    mixer = LinearAttention(config, 12, n_ctx=32)
    mixer.reset_parameters(std=0.5, out_std=0.5, generator=None)
    x, seen = torch.randn(2, 9, 12), use_triton(packed, monkeypatch)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        y, state = mixer.evaluate(x, Form.CHUNKED, None)
        assert state.length == 9
        total = y.square().sum() + state.linear.s.sin().sum()
        if normalise:
            total = total + state.linear.z.sin().sum()
        return [y, state.linear.s, total]

    def pull() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        *found, total = run(leaf)
        return found + list(torch.autograd.grad(total, [leaf, *mixer.parameters()]))

    fused = pull()
    assert seen == [(2, 9, 30)]
    for name in ("hook_q", "hook_k", "hook_v"):
        point, fired = getattr(mixer, name), []
        point.add_hook(lambda tensor, hook, fired=fired: fired.append(tensor.shape))
        expected = pull()
        point.remove_hooks()
        assert fired == [(2, 9, 2, 5)] and len(seen) == 1
        agree(fused, expected, 5e-6)
    with torch.no_grad():
        assert torch.allclose(mixer(x), fused[0], atol=1e-5) and len(seen) == 1
    for other in (Form.PARALLEL, Form.RECURRENT):
        assert torch.allclose(mixer(x, other), fused[0], atol=1e-5)
    later = mixer.evaluate(x, Form.CHUNKED, mixer.init_state(2))[0]
    assert torch.allclose(later, fused[0], atol=1e-5) and len(seen) == 1


@pytest.mark.parametrize("bias", [False, True])
def test_the_mlp(bias, monkeypatch):
    """The same of a gated MLP whose two projections are one."""
    torch.manual_seed(0)
    mlp = MLP(MLPConfig(d_mlp=17, act="silu", gated=True, bias=bias), 12)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, seen = torch.randn(2, 9, 12), use_triton(silu, monkeypatch)

    def pull() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = mlp(leaf)
        return [y, *torch.autograd.grad(y.square().sum(), [leaf, *mlp.parameters()])]

    ordinary = pull()
    assert seen == [(2, 9, 17)]
    monkeypatch.setattr(MLP, "_projects_once", lambda self, x: True)
    agree(pull(), ordinary, 5e-6)
    assert seen == [(2, 9, 17), (2, 9, 34)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = pull()
    assert [t.dtype for t in low] == [torch.bfloat16, *[torch.float32] * (len(low) - 1)]
    agree(low, ordinary, 4e-2)


def test_the_mlp_projects_once_only_where_nothing_looks_between():
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), torch.ones(1, 1, 4)
    mlp = MLP(MLPConfig(d_mlp=3, act="silu", gated=True), 4)
    assert mlp._projects_once(on_gpu) and not mlp._projects_once(on_cpu)
    for point in (mlp.hook_pre, mlp.hook_pre_linear):
        point.add_hook(lambda tensor, hook: None)
        assert not mlp._projects_once(on_gpu)
        point.remove_hooks()
    with torch.no_grad():
        assert not mlp._projects_once(on_gpu)
    assert mlp._projects_once(on_gpu) and not mlp.double()._projects_once(on_gpu)
    for config in (MLPConfig(d_mlp=3, act="gelu", gated=True), MLPConfig(d_mlp=3, act="silu", gated=False)):
        assert not MLP(config, 4)._projects_once(on_gpu)
