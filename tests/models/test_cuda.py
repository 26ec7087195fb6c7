"""Whole small models of each mixer on a GPU: compiled in one graph, under autocast, blocks checkpointed."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from models import LanguageModel, LanguageModelConfig
from models.blocks import MLP
from models.config import (
    LinearAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    MLPConfig,
    RopeConfig,
    SoftmaxAttentionConfig,
)
from models.mixers.linear_attention import LinearAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIXERS = {
    "softmax": SoftmaxAttentionConfig(n_heads=2),
    "linear": LinearAttentionConfig(n_heads=2, d_conv=4),
    "mamba1": Mamba1Config(d_state=8),
    "mamba2": Mamba2Config(n_heads=2, d_state=16),
}


def build(name: str, n_layers: int = 1, **options) -> LanguageModel:
    """A model of width 64 in training mode, with weights large enough that every path matters."""
    rope = {"positions": "rope", "rope": RopeConfig()} if name == "softmax" else {}
    config = LanguageModelConfig(
        d_model=64,
        n_layers=n_layers,
        d_vocab=100,
        n_ctx=256,
        mixers=(MIXERS[name],) * n_layers,
        mlp=MLPConfig(d_mlp=128, act="silu", gated=True),
        init_std=0.1,
        **rope,
        **options,
    )
    return LanguageModel(config).cuda().train()


def tokens(batch: int = 4, seq: int = 130) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(0, 100, (batch, seq), device="cuda", generator=generator)


def step(model, call=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and gradients by parameter."""
    model.zero_grad(set_to_none=True)
    loss = (model if call is None else call)(tokens(), return_type="loss")
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative error of any gradient, by norm, and whose it is."""
    assert found.keys() == expected.keys()
    assert all(x.abs().max() > 0 for x in expected.values())
    return max((float((found[n] - x).norm() / x.norm()), n) for n, x in expected.items())


@pytest.mark.parametrize("name", MIXERS)
def test_compiled_in_one_graph(name):
    model = build(name)
    loss, gradients = step(model)
    compiled_loss, compiled = step(model, torch.compile(model, fullgraph=True))
    assert float(compiled_loss) == pytest.approx(float(loss), rel=1e-5)
    assert largest_error(compiled, gradients)[0] < 1e-3


@pytest.mark.parametrize("name", MIXERS)
def test_autocast(name):
    """bfloat16 where it is safe: parameters and gradients stay float32 and near those of full precision."""
    model = build(name)
    loss, gradients = step(model)
    with torch.autocast("cuda", torch.bfloat16):
        low_loss, low = step(model)
    assert low_loss.dtype == torch.float32 and all(x.dtype == torch.float32 for x in low.values())
    assert float(low_loss) == pytest.approx(float(loss), rel=5e-3)
    assert float(low_loss) != float(loss)
    error, parameter = largest_error(low, gradients)
    assert error < 0.1, parameter


@pytest.mark.parametrize("name", MIXERS)
def test_pytorchs_own_hooks_on_norms_are_called(name):
    model, seen = build(name, n_layers=2), []
    norms = {n: m for n, m in model.named_modules() if n.endswith(("ln1", "ln2", "ln_final", "attn.norm"))}
    for own, norm in norms.items():
        norm.register_forward_hook(lambda module, args, output, own=own: seen.append(own))
    step(model)
    assert sorted(seen) == sorted(norms)


@pytest.mark.parametrize(("autocast", "bound", "bound_to_full"), [(False, 2e-5, 2e-5), (True, 3e-2, 0.1)])
def test_mamba2_in_one_operator(autocast, bound, bound_to_full, monkeypatch):
    """The same gradients as by one operator after the other, which a hook inside brings back.

    A hook on the gate rounds it to bfloat16, which nothing else does: gradients are then as near to those of
    full precision as `test_autocast` asks for.
    """
    from models.mixers.mamba2 import Mamba2

    model = build("mamba2", n_layers=2)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss, gradients = step(model)
        points = model.blocks[0].attn.hook_gate, model.blocks[1].attn.hook_q
        # PyTorch's own hooks: TransformerLens's are these.
        handles = [point.register_forward_hook(lambda module, x, y: None) for point in points]
        hooked_loss, hooked = step(model)
        for handle in handles:
            handle.remove()
        monkeypatch.setattr(Mamba2, "_is_one_operator", lambda self, packed: False)
        plain_loss, plain = step(model)
    full = step(model)[1]
    assert float(loss) == pytest.approx(float(plain_loss), rel=bound / 10)
    assert float(hooked_loss) == pytest.approx(float(plain_loss), rel=bound / 10)
    for found, expected, most in ((gradients, plain, bound), (hooked, full, bound_to_full)):
        error, parameter = largest_error(found, expected)
        assert error < most, parameter


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed_blocks_give_the_same_gradients_in_less_memory(name, autocast):
    model = build(name, n_layers=4)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss, gradients = step(model)
        plain = peak(model)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        again, recomputed = step(model)
        assert float(again) == float(loss)
        assert largest_error(recomputed, gradients)[0] < 1e-6
        del recomputed
        assert peak(model) < plain


ENDS = {"own": {}, "bias": {"unembed_bias": True}, "tied": {"tied": True}}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_loss_is_that_of_the_logits(end, dtype):
    """The fused loss beside the one that a hook on the unembedding asks for: losses, means and gradients."""
    model = build("softmax", **ENDS[end])
    found, fired = [], []
    for hooked in (False, True):
        if hooked:
            model.unembed.register_forward_hook(lambda module, args, logits: fired.append(logits.dtype))
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss, gradients = step(model)
            with torch.no_grad():
                losses = model(tokens(), return_type="loss", loss_per_token=True)
                logits = model(tokens())
        assert losses.shape == (4, 129) and losses.dtype == torch.float32
        assert float(losses.mean()) == pytest.approx(float(loss), rel=1e-5)
        found.append((losses, gradients))
    # The mean, the losses and the logits, all with the hook.
    assert fired == [dtype or torch.float32] * 3
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), tokens()[:, 1:], reduction="none"
    )
    # A logit on the border between two numbers may be rounded either way.
    atol = 1e-4 if dtype is None else 2e-2
    torch.testing.assert_close(found[0][0], expected, atol=atol, rtol=1e-4)
    error, parameter = largest_error(found[0][1], found[1][1])
    assert error < (1e-4 if dtype is None else 0.1), parameter


def test_other_forms_have_second_derivatives_and_the_chunked_one_refuses_by_name():
    model = build("softmax")
    weight = model.unembed.weight
    for form in ("parallel", "chunked"):
        loss = model(tokens(1, 20), return_type="loss", form=form)
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        if form == "parallel":
            assert torch.autograd.grad(slope.square().sum(), weight)[0].abs().max() > 0
            continue
        with pytest.raises(ValueError, match="linear_cross_entropy_backward: second derivatives"):
            torch.autograd.grad(slope.square().sum(), weight)


def peak(model) -> int:
    """Most bytes held during a step."""
    torch.cuda.reset_peak_memory_stats()
    step(model)
    return torch.cuda.max_memory_allocated()


class Seen(TorchDispatchMode):
    """Names of this project's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "beyond_softmax":
            self.names.add(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def operators_of(model) -> set[str]:
    """Operators of this project that a forward pass calls."""
    with Seen() as seen:
        model(tokens(), return_type="loss")
    return seen.names


def test_projections_stay_packed_only_in_training_where_nothing_looks_at_a_part():
    model = build("linear")
    packed, apart = {"packed_linear_attention", "packed_gated_silu"}, {"elu_plus_one", "linear_attention"}
    found = operators_of(model)
    assert found >= packed and not found & {*apart, "gated_silu"}
    with torch.no_grad():
        assert operators_of(model) >= {*apart, "gated_silu"}
    block = model.blocks[0]
    for point in (block.attn.hook_q, block.attn.hook_k, block.attn.hook_v):
        handle = point.register_forward_hook(lambda module, x, y: None)
        found = operators_of(model)
        handle.remove()
        assert found >= {*apart, "packed_gated_silu"} and "packed_linear_attention" not in found
    for point in (block.mlp.hook_pre, block.mlp.hook_pre_linear):
        handle = point.register_forward_hook(lambda module, x, y: None)
        found = operators_of(model)
        handle.remove()
        assert found >= {"packed_linear_attention", "gated_silu"} and "packed_gated_silu" not in found


def gradients_of(model, given: torch.Tensor, low: bool) -> list[torch.Tensor]:
    """Loss and gradients of all parameters, which keep none."""
    with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=False):
        loss = model(given, return_type="loss")
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("d_conv", [0, 4])
@pytest.mark.parametrize(("low", "bound"), [(False, 1e-4), (True, 3e-2)])
def test_packed_projections_give_what_their_parts_give(low, bound, d_conv, monkeypatch):
    """Under autocast and in full precision; a captured graph repeats it, bit for bit."""
    monkeypatch.setitem(MIXERS, "linear", LinearAttentionConfig(n_heads=2, d_conv=d_conv, normalise=True))
    model, given = build("linear", n_layers=2), tokens()
    packed = [x.detach() for x in gradients_of(model, given, low)]
    with monkeypatch.context() as patch:
        patch.setattr(LinearAttention, "_stays_packed", lambda *_: False)
        patch.setattr(MLP, "_projects_once", lambda *_: False)
        apart = [x.detach() for x in gradients_of(model, given, low)]
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, x, y in zip(names, packed, apart, strict=True):
        assert y.norm() > 0
        assert (x - y).norm() / y.norm() < bound, name
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients_of(model, given, low)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients_of(model, given, low)
    for _ in range(2):
        graph.replay()
        for name, x, y in zip(names, found, packed, strict=True):
            assert torch.equal(x, y), name
