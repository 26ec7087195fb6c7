"""Records stand for what they score: a scored Mamba-1 layer is the whole layer, not its channel 0."""

import pytest
import torch
from interp_reports import head_score
from language_models import build, tokens

from interp import head_sites
from interp.ablation import mean_ablated, patterns_held, resample_ablated, zero_ablated
from interp.attribution import direct_logit_attribution
from interp.circuits import ov_circuit, qk_circuit, tap_alignment, value_alignment
from interp.composition import composition_scores
from interp.errors import InterventionError
from interp.sites import Site

LAYER = {"unit": "layer", "mixer": "mamba1", "reading": "ssm"}


def _record(layer=1, head=0, **options):
    return head_score(layer, head, 0.5, _Drawn(), **options)


class _Drawn:
    def standard_normal(self, n):
        return torch.linspace(-1, 1, n).numpy()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def _run(context, model, ids):
    with context:
        return model(ids)


def test_the_key_of_a_record():
    assert _record(1, 0, **LAYER).unit_key == (1, None)
    assert _record(1, 3).unit_key == (1, 3)
    assert "unit_key" not in _record(1, 3).__dataclass_fields__
    for unit in ("state", "cluster"):
        with pytest.raises(InterventionError, match=f"the record is of {unit} 2 of layer 1; accepted"):
            _ = _record(1, 2, **LAYER | {"unit": unit}).unit_key


@pytest.mark.parametrize(
    "name, record, pair, other",
    [("mamba1", _record(**LAYER), (1, None), (1, 0)), ("mamba2", _record(1, 1), (1, 1), (1, 0))],
)
def test_interventions_take_records(name, record, pair, other):
    model, ids, reference = build(name), tokens(), tokens(seed=1)
    contexts = {
        "zero": lambda heads: zero_ablated(model, heads),
        "mixing": lambda heads: zero_ablated(model, heads, part="mixing"),
        "mean": lambda heads: mean_ablated(model, heads, reference),
        "resample": lambda heads: resample_ablated(model, heads, reference),
        "held": lambda heads: patterns_held(model, reference, heads=heads),
    }
    for kind, context in contexts.items():
        found = _run(context([record]), model, ids)
        assert torch.equal(found, _run(context([pair]), model, ids)), kind
        assert not torch.allclose(found, _run(context([other]), model, ids)), kind


def test_circuits_and_contributions_take_records():
    model, ids = build("hybrid"), tokens()
    layer, head = _record(0, 0, **LAYER), _record(2, 1)
    for one, pair in ((layer, (0, 0)), (head, (2, 1))):
        for circuit in (ov_circuit, qk_circuit):
            assert torch.equal(circuit(model, one).AB, circuit(model, *pair).AB)
        for alignment in (tap_alignment, value_alignment):
            assert torch.equal(alignment(model, one), alignment(model, *pair))
    assert torch.equal(ov_circuit(model, *layer.unit_key).AB, ov_circuit(model, 0).AB)
    found = direct_logit_attribution(model, ids)
    assert torch.equal(found.of(layer), found.of("L0"))
    assert torch.equal(found.of(head), found.of("L2H1"))
    composed = composition_scores(model, "k")
    index = [composed.heads.index(pair) for pair in ((0, 0), (2, 1))]
    assert composed.of(layer, head) == float(composed.scores[index[0], index[1]])
    assert head_sites(model, heads=[layer, head]) == [
        Site(kind="z", layer=0),
        Site(kind="z", layer=2, head=1),
    ]


@pytest.mark.parametrize(
    "act, said",
    [
        (lambda m: zero_ablated(m, _record()).__enter__(), r"one record; accepted: a list"),
        (lambda m: zero_ablated(m, [(0, 1.5)]).__enter__(), "head 1.5 is no whole number; accepted: 0..1"),
        (lambda m: zero_ablated(m, [(0, True)]).__enter__(), "head True is no whole number"),
        (lambda m: zero_ablated(m, [(0, -3)]).__enter__(), "head index -3 is out of range"),
        (lambda m: zero_ablated(m, [(1.0, 0)]).__enter__(), "layer 1.0 is no whole number; accepted: 0..1"),
        (lambda m: head_sites(m, layers=[0], heads=[(0, 0)]), "layers and heads are both given"),
        (lambda m: head_sites(m, layers=[0.5]), "layer 0.5 is no whole number"),
        (lambda m: ov_circuit(m, 0, 0.5), "head 0.5 of layer 0 is no whole number; accepted: 0..1"),
        (lambda m: ov_circuit(m, 0, None), "head None of layer 0 is no whole number; accepted: 0..1"),
        (lambda m: ov_circuit(m, _record(), 1), "head 1 is given beside a record"),
        (lambda m: composition_scores(m, "q").of((0, 0), (1, 7)), r"no unit \(1, 7\) here; accepted: \(0, 0"),
        (lambda m: direct_logit_attribution(m, tokens()).of((1, 7)), "no component 'L1H7'; accepted: embed"),
    ],
)
def test_what_is_no_head_is_refused(act, said):
    with pytest.raises(InterventionError, match=said) as caught:
        act(build("softmax"))
    assert "\n" not in str(caught.value)
