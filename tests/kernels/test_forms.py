"""The three forms of each operator agree on random inputs: outputs, states, gradients, and across a cut."""

import pytest
import torch
from mixer_cases import RANDOM, SOFTMAX_FORMS, RandomOperator, random_softmax

from kernels import causal_conv, delta_rule, s4d, selective_scan, softmax_attention, ssd
from kernels import gated_linear_attention as linear
from kernels.softmax_attention import empty_state

FORMS = ("parallel", "chunked", "recurrent")
LENGTHS = (1, 7, 33, 65)
OPERATORS = pytest.mark.parametrize("operator", RANDOM.values(), ids=RANDOM.keys())


def initial_state(operator: RandomOperator, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random; positive, so that a normaliser stays away from zero."""
    dtype = torch.complex128 if operator.complex_state else torch.float64
    return tuple(torch.rand(shape, generator=g, dtype=torch.float64).to(dtype) for shape in operator.state)


def results(operator: RandomOperator, form: str, x: dict, state: tuple) -> dict[str, torch.Tensor]:
    """Output, last state, and the gradients of a random function of both with respect to every input and
    the state.
    """
    x = {name: t.clone().requires_grad_() for name, t in x.items()}
    state = tuple(s.clone().requires_grad_() for s in state)
    output, last = operator.run(x, form, state)
    g = torch.Generator().manual_seed(1)
    loss = (output * torch.randn(output.shape, generator=g, dtype=output.dtype)).sum()
    for s in last:
        weights = torch.randn(s.shape, generator=g, dtype=torch.float64)
        loss = (
            loss + (s.real * weights).sum() + (2 * s.imag * weights).sum()
            if s.is_complex()
            else loss + (s * weights).sum()
        )
    gradients = torch.autograd.grad(loss, [*x.values(), *state])
    found = {"output": output} | {f"last {i}": s for i, s in enumerate(last)}
    return found | dict(zip([*x, *(f"state {i}" for i in range(len(state)))], gradients, strict=True))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, reference in expected.items():
        error = (found[name] - reference).abs().max().item() / max(1.0, reference.abs().max().item())
        assert error <= 1e-10, (name, error)


@OPERATORS
@pytest.mark.parametrize("seq", LENGTHS)
def test_forms_agree(operator, seq):
    g = torch.Generator().manual_seed(seq)
    x, state = operator.inputs(seq, g), initial_state(operator, g)
    reference = results(operator, "recurrent", x, state)
    for form in ("parallel", "chunked"):
        assert_same(results(operator, form, x, state), reference)
    # Negative control: the comparison notices a state that is left out.
    zero = tuple(torch.zeros_like(s) for s in state)
    with pytest.raises(AssertionError):
        assert_same(results(operator, "chunked", x, zero), reference)


@OPERATORS
@pytest.mark.parametrize(
    "forms", [("chunked", "recurrent"), ("recurrent", "chunked"), ("parallel", "chunked")]
)
@torch.no_grad()
def test_a_sequence_split_across_two_forms(operator, forms):
    x = operator.inputs(33, torch.Generator().manual_seed(0))
    whole, last = operator.run(x, "chunked", None)
    state, outputs = None, []
    for form, piece in zip(forms, (slice(0, 18), slice(18, 33)), strict=True):
        part = {name: t[:, piece] if name in operator.sequence.split() else t for name, t in x.items()}
        output, state = operator.run(part, form, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-11)
    for mine, reference in zip(state, last, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-11)


@OPERATORS
@torch.no_grad()
def test_outputs_do_not_see_the_future(operator):
    x = operator.inputs(33, torch.Generator().manual_seed(0))
    changed = {name: t.clone() for name, t in x.items()}
    for name in set(operator.sequence.split()) & set(x):
        changed[name][:, 20:] *= 0.5
    for form in FORMS:
        before, after = operator.run(x, form, None)[0], operator.run(changed, form, None)[0]
        torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-12)
        assert (after[:, 20:] - before[:, 20:]).abs().max() > 1e-3


SOFTMAX_OPTIONS = [
    {},
    {"window": 1},
    {"window": 6},
    {"window": 100},
    {"sink": True},
    {"sink": True, "window": 6},
    {"scale": 0.3},
]


@pytest.mark.parametrize("options", SOFTMAX_OPTIONS, ids=str)
@pytest.mark.parametrize("seq", LENGTHS)
@pytest.mark.parametrize("d_v", [5, 3])
def test_softmax_forms_agree(seq, options, d_v):
    found = {}
    for form, function in SOFTMAX_FORMS.items():
        x = {n: t.requires_grad_() for n, t in random_softmax(seq, sink="sink" in options, d_v=d_v).items()}
        output = function(
            x["q"],
            x["k"],
            x["v"],
            sink=x.get("sink"),
            window=options.get("window"),
            scale=options.get("scale"),
        )
        loss = (output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)).sum()
        found[form] = {"o": output} | dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))
    for form in ("chunked", "recurrent"):
        assert_same(found[form], found["parallel"])


@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_softmax_cache_takes_any_number_of_new_positions(window):
    x = random_softmax(33)
    whole = softmax_attention.parallel(x["q"], x["k"], x["v"], window=window)
    state = empty_state(2, 2, 5, 5, dtype=torch.float64, device="cpu")
    outputs = []
    for start, stop in ((0, 1), (1, 9), (9, 10), (10, 33)):
        piece = [x[name][:, start:stop] for name in "qkv"]
        output, after = softmax_attention.step(*piece, state, window=window)
        again, _ = softmax_attention.step(*piece, state, window=window)
        assert torch.equal(output, again)
        outputs.append(output)
        state = after
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-12)
    assert state.length == 33
    assert state.k.shape[1] == (33 if window is None else window - 1)


@pytest.mark.parametrize("options", SOFTMAX_OPTIONS, ids=str)
def test_softmax_logsumexp_is_the_patterns_denominator(options):
    x = {n: t.requires_grad_() for n, t in random_softmax(33, sink="sink" in options).items()}
    kwargs = {"sink": x.get("sink"), "window": options.get("window"), "scale": options.get("scale")}
    scale = options.get("scale") or 5**-0.5
    scores = torch.einsum("bihd,bjhd->bhij", x["q"], x["k"].repeat_interleave(2, dim=2)) * scale
    pattern = softmax_attention.pattern(x["q"], x["k"], **kwargs)
    lse = softmax_attention.logsumexp(x["q"], x["k"], **kwargs)
    rebuilt = torch.exp(scores - lse[..., None]).where(pattern > 0, 0)
    torch.testing.assert_close(rebuilt, pattern, rtol=0, atol=1e-12)
    # Its gradient with respect to q is the expected scaled key.
    (gradient,) = torch.autograd.grad(lse.sum(), x["q"])
    expected = torch.einsum("bhij,bjhd->bihd", pattern, x["k"].repeat_interleave(2, dim=2)) * scale
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_softmax_queries_that_are_the_last_positions():
    x = random_softmax(33)
    whole = softmax_attention.pattern(x["q"], x["k"], window=7)
    torch.testing.assert_close(softmax_attention.pattern(x["q"][:, 20:], x["k"], window=7), whole[:, :, 20:])
    late = softmax_attention.chunked(x["q"][:, 20:], x["k"], x["v"], window=7)
    torch.testing.assert_close(late, softmax_attention.parallel(x["q"], x["k"], x["v"], window=7)[:, 20:])


@torch.no_grad()
def test_patterns_of_chosen_channels_and_rows():
    x = RANDOM["selective_scan"].inputs(33, torch.Generator().manual_seed(0))
    arguments = selective_scan.softplus_dt(x["dt_raw"]), x["A_log"], x["B"], x["C"]
    whole = selective_scan.pattern(*arguments)
    for rows in (slice(0, 33), slice(0, 5), slice(5, 20), slice(32, 33)):
        part = selective_scan.pattern(*arguments, channels=slice(1, 3), rows=rows)
        torch.testing.assert_close(part, whole[:, 1:3, rows], rtol=0, atol=1e-12)
    by_state = selective_scan.pattern_by_state(*arguments)
    torch.testing.assert_close(by_state.sum(dim=2), whole, rtol=0, atol=1e-12)
    assert whole.triu(1).abs().max() == 0


@torch.no_grad()
def test_the_public_operators_name_every_form():
    """Known answers: one step, all ones."""
    one = torch.ones(1, 1, 1, 1)
    for form in FORMS:
        assert softmax_attention.softmax_attention(one, one, 3 * one, form=form).item() == 3
        assert linear.gated_linear_attention(one, one, 3 * one, scale=2.0, form=form)[0].item() == 6
        assert delta_rule.delta_rule(one, one, 3 * one, one[..., 0] / 2, form=form)[0].item() == 1.5
        scan = selective_scan.selective_scan(
            one[0], one[0], one[0, 0] * 0, 2 * one[0], 5 * one[0], D=one[0, 0, 0], form=form
        )
        assert scan[0].item() == 11
        assert (
            ssd.ssd(one, 2 * one[..., 0], one[0, 0, 0] * 0, one, 3 * one, D=one[0, 0, 0], form=form)[0].item()
            == 7
        )
        assert (
            causal_conv.causal_conv(one[0], torch.tensor([[7.0, 2.0]]), one[0, 0, 0], form=form)[0].item()
            == 3
        )
        modes = [
            one[0, 0, 0] * 0,
            -torch.complex(one, one * 0)[0, 0],
            *(torch.complex(one, one * 0)[0, 0],) * 2,
        ]
        expected = 2 * (1 - torch.exp(torch.tensor(-1.0)).item())
        assert s4d.s4d(one[0], *modes, form=form)[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seq", [2, 6, 15, 40])
@pytest.mark.parametrize("broken", ["query", "key"])
def test_what_is_not_finite_stays_so_in_every_form_of_softmax(seq, broken):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seq, 2, 8) for _ in range(3))
    (q if broken == "query" else k)[0, seq // 2, 1, 3] = torch.nan
    expected = softmax_attention.parallel(q, k, v)
    found = softmax_attention.chunked(q, k, v)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()
    torch.testing.assert_close(found, expected, equal_nan=True)
