"""Anything but a fitting tensor or option is refused with KernelError by every operator, in every form; what
is unusual but defined gives the same numbers in every form."""

import inspect
import itertools

import pytest
import torch
from mixer_cases import RANDOM

from kernels import (
    KernelError,
    causal_conv,
    cross_entropy,
    delta_rule,
    feature_maps,
    gated_silu,
    linear_cross_entropy,
    packed_linear_attention,
    rms_norm,
    rotation,
    s4d,
    selective_scan,
    softmax_attention,
    ssd,
    ssd_block,
    step_size,
)
from kernels import gated_linear_attention as linear

FORMS = ("parallel", "chunked", "recurrent")
g = torch.Generator().manual_seed(0)
heads, u, table = (torch.randn(shape, generator=g) for shape in ((2, 5, 4, 3), (2, 5, 3), (3, 4)))
at, dt, read = heads[:, 0], u.exp(), torch.randn(2, 5, 4, generator=g)
modes = {"A": torch.complex(-table.exp(), table), "B": table + 0j, "C": table + 0j}
attention = {"q": heads, "k": heads, "v": heads}
cache = softmax_attention.empty_state(2, 4, 3, 3, dtype=torch.float32, device="cpu")
scan = {"dt": dt, "A_log": table, "B": read, "C": read}
mamba2 = {"dt": read.exp(), "A_log": torch.zeros(4), "B": heads, "C": heads}
mamba2_step = {"x": at, "dt": read[:, 0].exp(), "A_log": torch.zeros(4), "B": at, "C": at}
first = {name: t if name == "A_log" else t[:, 0] for name, t in scan.items()}

# Name: (function, inputs that it cannot do without, names of optional tensors).
CALLS = {
    "softmax": (softmax_attention.softmax_attention, attention, "sink"),
    "softmax pattern": (softmax_attention.pattern, {"q": heads, "k": heads}, "sink"),
    "softmax denominator": (softmax_attention.logsumexp, {"q": heads, "k": heads}, "sink"),
    "softmax step": (
        softmax_attention.step,
        {n: t[:, :1] for n, t in attention.items()} | {"state": cache},
        "sink",
    ),
    "linear": (linear.gated_linear_attention, attention, "log_decay k_weight skip state"),
    "linear pattern": (linear.pattern, {"q": heads, "k": heads}, "log_decay k_weight state"),
    "linear step": (linear.step, {"q": at, "k": at, "v": at}, "log_decay k_weight state"),
    "scan": (selective_scan.selective_scan, {"u": u} | scan, "D z state"),
    "scan pattern": (selective_scan.pattern, scan, ""),
    "scan by state": (selective_scan.pattern_by_state, scan, ""),
    "scan step": (selective_scan.step, {"u": u[:, 0]} | first, "D z state"),
    "convolution": (causal_conv.causal_conv, {"x": u, "weight": table}, "bias state"),
    "convolution pattern": (causal_conv.pattern, {"weight": table, "seq": 4}, ""),
    "convolution step": (
        causal_conv.step,
        {"x": u[:, 0], "weight": table, "state": torch.zeros(2, 3, 3)},
        "bias",
    ),
    "delta rule": (delta_rule.delta_rule, attention | {"beta": read}, "log_decay state"),
    "delta pattern": (delta_rule.pattern, {"q": heads, "k": heads, "beta": read}, "log_decay"),
    "delta step": (delta_rule.step, {"q": at, "k": at, "v": at, "beta": read[:, 0]}, "log_decay state"),
    "ssd": (ssd.ssd, {"x": heads} | mamba2, "D state"),
    "ssd pattern": (ssd.pattern, mamba2, ""),
    "ssd step": (ssd.step, mamba2_step, "D state"),
    "s4d": (s4d.s4d, {"u": u, "log_dt": torch.zeros(3)} | modes, "D state"),
    "s4d step": (s4d.step, {"u": u[:, 0], "log_dt": torch.zeros(3)} | modes, "D state"),
    "s4d kernel": (s4d.kernel, {"log_dt": torch.zeros(3), "seq": 4} | modes, ""),
    "rms norm": (rms_norm.rms_norm, {"x": heads, "w": torch.ones(3), "eps": 1e-5}, "gate"),
    "sum's norm": (
        rms_norm.add_rms_norm,
        {"x": heads, "delta": heads, "w": torch.ones(3), "eps": 1e-5},
        "",
    ),
    "ssd block": (
        ssd_block.ssd_block,
        {
            "packed": torch.randn(2, 5, 26, generator=g), "conv_weight": torch.ones(16, 4),
            "dt_bias": torch.zeros(2), "A_log": torch.zeros(2), "D": torch.ones(2), "gain": torch.ones(8),
            "n_groups": 1, "eps": 1e-5, "conv_bias": None,
        },
        "conv_bias",
    ),
    "rotation": (
        rotation.rotate,
        {"x": heads, "cos": torch.ones(5, 1), "sin": torch.ones(5, 1), "layout": "half"},
        "",
    ),
    "step size": (step_size.step_size, {"raw": u, "bias": torch.ones(3)}, ""),
    "gated SiLU": (gated_silu.gated_silu, {"gate": u, "x": u}, ""),
    "packed gated SiLU": (gated_silu.packed_gated_silu, {"h": read}, ""),
    "packed linear": (packed_linear_attention.packed_linear_attention, {"qkv": u, "n_heads": 1}, ""),
    "ELU + 1": (feature_maps.elu_plus_one, {"x": u}, ""),
    "linear cross entropy": (
        linear_cross_entropy.linear_cross_entropy,
        {"x": u[0], "weight": torch.ones(7, 3), "target": torch.zeros(5).long()},
        "bias",
    ),
    "cross entropy": (cross_entropy.cross_entropy, {"logits": table, "target": torch.zeros(3).long()}, ""),
}
JUNK = (None, [1.0], 3.0, "x", heads.int(), heads.to(torch.complex64), torch.ones(1, 1, 1, 1, 1, 1))
OPTIONS = {
    "scale": (float("nan"), float("inf"), "1", True, torch.tensor(1.0)),
    "window": (float("nan"), 1.5, 2.0, True, "3", 0, -1),
    "rows": (slice(0, 6, 2), slice(5, 2), slice(0, 1.5), 3),
    "eps": (float("nan"), "1"),
    "re_factor": (float("inf"), "1"),
    "seq": (1.5, 0, "3"),
    "form": ([1], None),
}
NUMBERS = ("seq", "eps", "layout", "n_heads")
# Elementwise functions take any number of axes.
ELEMENTWISE = ("rms norm", "sum's norm", "step size", "gated SiLU", "packed gated SiLU", "ELU + 1")


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_a_fitting_tensor_or_option_is_refused(name):
    function, inputs, optional = CALLS[name]
    function(**inputs)
    accepted = inspect.signature(function).parameters
    for form in FORMS if "form" in accepted else (None,):
        chosen = {} if form is None else {"form": form}
        for tensor, junk in itertools.product([*inputs, *optional.split()], JUNK):
            whole = isinstance(junk, torch.Tensor) and junk.is_floating_point() and name in ELEMENTWISE
            absent = junk is None and tensor in optional.split()
            if tensor in NUMBERS or whole or absent:
                continue
            with pytest.raises(KernelError, match=tensor):
                function(**inputs | {tensor: junk}, **chosen)
        for option in set(OPTIONS) & set(accepted):
            for value in OPTIONS[option]:
                with pytest.raises(KernelError, match=option):
                    function(**{**inputs, **chosen, option: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear.chunked(**attention, chunk=1.5), "chunk is 1.5"),
        (lambda: delta_rule.chunked(**attention, beta=read, chunk=True), "chunk is True"),
        (lambda: s4d.chunked(u, torch.zeros(3), **modes, chunk="3"), "chunk is '3'"),
        (lambda: linear.pattern(heads, heads, log_decay=-read.exp(), rows=slice(5, 2)), "slice(5, 2, None)"),
        (lambda: linear.gated_linear_attention(heads, heads, heads[:, :, :0]), "head is 1 or more"),
        (lambda: softmax_attention.softmax_attention(*[heads[:, :, :0]] * 3), "head is 1 or more"),
        (lambda: causal_conv.causal_conv(u[:, :0], table), "need seq, width >= 1"),
        (lambda: causal_conv.recurrent(u, table[:, :0]), "need seq, width >= 1"),
        (lambda: causal_conv.recurrent(u, table[0]), "weight has shape (4,)"),
        (lambda: s4d.recurrent(u[:, :0], torch.zeros(3), **modes), "sequences of at least 1"),
        (lambda: s4d.s4d(u + 0j, torch.zeros(3), **modes), "u has dtype torch.complex64"),
        (lambda: selective_scan.pattern(**scan, channels=[0]), "channels is [0]"),
        (lambda: packed_linear_attention.packed_linear_attention(u, 2), "qkv has 3 channels"),
        (lambda: packed_linear_attention.packed_linear_attention(u, True), "n_heads is True"),
        (lambda: packed_linear_attention.packed_linear_attention(u[:, :0], 1), "sequences of at least 1"),
        (lambda: rms_norm.rms_norm(heads, torch.ones(3), eps=-1.0), "finite number of at least 0"),
    ],
)
def test_refusals_of_options_and_empty_axes(call, message):
    with pytest.raises(KernelError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("operator", RANDOM.values(), ids=RANDOM.keys())
def test_a_batch_of_none_has_outputs_and_states_of_none(operator):
    x = operator.inputs(5, torch.Generator().manual_seed(0))
    dtype = torch.complex128 if operator.complex_state else torch.float64
    for form, given in itertools.product(FORMS, (False, True)):
        state = tuple(torch.zeros(0, *s[1:], dtype=dtype) for s in operator.state) if given else None
        own = {n: (t[:0] if n in operator.sequence.split() else t).requires_grad_() for n, t in x.items()}
        output, last = operator.run(own, form, state)
        output.sum().backward()
        whole, states = operator.run(x, form, None)
        assert output.shape == (0, *whole.shape[1:])
        assert [s.shape for s in last] == [(0, *s.shape[1:]) for s in states]


@pytest.mark.parametrize("scale", [-0.7, 0, 0.0, 1e-300, -1e-300])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"sink": torch.tensor([torch.inf, 0.0, -1.0, 3.0])}])
def test_softmax_with_any_scale_and_sink(scale, options):
    x = [t.requires_grad_() for t in torch.randn(3, 2, 6, 4, 8, generator=torch.Generator().manual_seed(1))]
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = softmax_attention.parallel(*wide, scale=scale, **options)
    gradients = torch.autograd.grad((expected**2).sum(), wide)
    for form in FORMS:
        found = softmax_attention.softmax_attention(*x, scale=scale, form=form, **options)
        assert (found - expected).abs().max() < 1e-6, form
        for mine, reference in zip(torch.autograd.grad((found**2).sum(), x), gradients, strict=True):
            assert (mine - reference).abs().max() < 5e-5, form


def test_mixed_dtypes_give_the_values_dtype_in_every_form():
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    q, k, v = torch.randn(3, 2, 6, 4, 8, generator=torch.Generator().manual_seed(1))
    for chosen in itertools.product(dtypes, repeat=3):
        x = [t.to(dtype) for t, dtype in zip((q, k, v), chosen, strict=True)]
        expected = softmax_attention.parallel(*x)
        for form in FORMS:
            found = softmax_attention.softmax_attention(*x, form=form)
            assert found.dtype == chosen[2]
            assert (found - expected).abs().max() < 0.02


@pytest.mark.parametrize("form", FORMS)
def test_a_wider_state_or_input_widens_the_sums(form):
    wide = torch.float64
    state = linear.LinearState(s=torch.ones(2, 4, 3, 3, dtype=wide))
    output, after = linear.gated_linear_attention(**attention, state=state, form=form)
    assert (output.dtype, after.s.dtype) == (torch.float32, wide)
    before = torch.ones(2, 3, 4, dtype=wide)
    output, after = selective_scan.selective_scan(u, **scan, state=before, form=form)
    assert (output.dtype, after.dtype) == (torch.float32, wide)
    output, after = delta_rule.delta_rule(heads, heads, heads.to(wide), read, form=form)
    assert (output.dtype, after.dtype) == (wide, wide)
    exact = s4d.s4d(u.to(wide), torch.zeros(3, dtype=wide), **modes, form="parallel")[0]
    output, after = s4d.s4d(u.to(wide), torch.zeros(3), **modes, form=form)
    assert (output.dtype, after.dtype) == (wide, torch.complex128)
    assert (output - exact).abs().max() < 1e-12
