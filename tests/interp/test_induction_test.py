"""The verdict on units: the wired one alone passes, with all three thresholds."""

import pytest
import torch
from constructed_cases import CASES, probe

from interp import detect, induction_test
from interp.copying import edge_copying
from interp.induction_test import (
    MIN_COPYING,
    MIN_EFFECT_NATS,
    CausalScore,
    begin_causal_scores,
    causal_scores,
    copying_at_offset,
)
from interp.offset_edges import probe_matches
from interp.records import rows, to_json
from interp.subject import LanguageModelSubject
from models.config import LanguageModelConfig, Mamba1Config, SoftmaxAttentionConfig
from models.constructed import constructed_model
from models.language_model import LanguageModel


@pytest.mark.parametrize("kind, offset", CASES)
def test_only_the_wired_unit_passes(kind, offset):
    model, circuit = constructed_model(kind, offset=offset)
    found = causal_scores(LanguageModelSubject(model), probe())
    passed = [(score.layer, score.unit, score.offset) for score in found if score.is_induction]
    assert passed == [(circuit.layer, circuit.unit, offset)]
    best = next(score for score in found if score.is_induction)
    assert best.copying == pytest.approx(1, abs=1e-3)
    assert all(abs(score.effect_nats) < 1e-3 for score in found if not score.is_induction)


@pytest.mark.parametrize("kind", ["softmax", "linear", "mamba1", "mamba2"])
@pytest.mark.parametrize("kept", [True, False])
def test_copying_read_ahead_at_every_offset_changes_nothing(kind, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(induction_test, "KEPT_TOKENS", 0)
    subject = LanguageModelSubject(constructed_model(kind, offset=1)[0])
    expected, begun = causal_scores(subject, probe()), begin_causal_scores(subject, probe(), ahead=True)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.zero_()
    assert begun() == expected


def _score(**changes):
    values = dict(
        layer=0, unit=0, reading="pattern", offset=1, offsets=(1,), cut_nats=(1.0,), effect_nats=1.0,
        effect_se_nats=0.01, control_nats=0.0, copying=0.5,
    )  # fmt: skip
    return CausalScore(**(values | changes))


def test_all_three_thresholds_are_needed():
    assert _score().is_induction
    assert not _score(effect_nats=MIN_EFFECT_NATS / 2).is_induction
    assert not _score(effect_se_nats=1.0).is_induction
    assert not _score(copying=MIN_COPYING - 0.1).is_induction
    assert not _score(copying=None).is_induction


def test_an_anti_induction_head_is_not_one():
    model, circuit = constructed_model("linear", offset=2)
    with torch.no_grad():
        model.blocks[0].attn.out_proj.weight.neg_()
    found = causal_scores(LanguageModelSubject(model), probe())
    assert not any(score.is_induction for score in found)


def test_copying_at_offset_one_is_edge_copying():
    model, _ = constructed_model("softmax")
    with torch.no_grad():
        model.blocks[1].attn.out_proj.weight += 0.1 * torch.randn_like(model.blocks[1].attn.out_proj.weight)
    subject, tokens = LanguageModelSubject(model), probe(2)
    sample = tokens.tokens[:, :25]
    directions = subject.directions(sample)
    found = []

    def look(view):
        reading = view.readings[0]
        matches = probe_matches(tokens)
        new = copying_at_offset(reading, matches, 1, sample, directions)
        old = edge_copying(reading, tokens, directions).raises.score
        found.append((new, old))

    with torch.no_grad():
        subject.visit(tokens.tokens, look)
    for new, old in found:
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "mixer", [SoftmaxAttentionConfig(n_heads=4), Mamba1Config(), Mamba1Config(constant_bcdt=True)], ids=str
)
def test_an_untrained_model_has_none(mixer):
    config = LanguageModelConfig(
        d_model=32, n_layers=2, d_vocab=64, n_ctx=128, mixers=(mixer,) * 2, init_std=0.1
    )
    found = causal_scores(LanguageModelSubject(LanguageModel(config)), probe())
    assert not any(score.is_induction for score in found)
    assert all(abs(score.effect_nats) < MIN_EFFECT_NATS for score in found)


# In the detection report.


@pytest.fixture(scope="module")
def report():
    model, _ = constructed_model("mamba2", offset=3)
    return detect(model, n_sequences=4)


def test_detection_fills_effect_offset_and_what_decided(report):
    wired = [h for h in report.checkpoints[0].heads if h.head == 2]
    assert {h.reading for h in wired} == {"ssm", "block"}
    own, block = sorted(wired, key=lambda h: h.reading, reverse=True)
    assert own.offset == 3 and own.prefix_matching < 0.01
    assert block.offset == 1 and block.prefix_matching == pytest.approx(1, abs=1e-3)
    for head in wired:
        assert head.decided_by == "causal" and head.is_induction
    assert own.offset_effect_nats > 3 and own.copying_offset == pytest.approx(1, abs=1e-3)
    # The cut was made in the other reading: its nats do not belong to this one's offset.
    assert block.offset_effect_nats is None and block.copying_offset is None
    assert own.cut_first_offset == -2 and own.cut_by_offset_nats[5] > 3
    assert max(abs(v) for n, v in enumerate(own.cut_by_offset_nats) if n != 5) < 1e-3
    assert {h.head for h in report.induction_heads()} == {2}


def test_idle_units_read_chance_in_both_readings(report):
    for head in report.checkpoints[0].heads:
        if head.head != 2:
            assert head.prefix_matching == pytest.approx(head.prefix_matching_chance, abs=0.01)
            assert head.previous_token == pytest.approx(head.previous_token_chance, abs=0.02)
            assert not head.is_induction


def test_the_record_is_json_csv_and_a_page(report):
    assert '"decided_by": "causal"' in to_json(report)
    assert len(rows(report)[0]["cut_by_offset_nats"].split()) == 8
    from interp.report import html_report

    page = html_report(report)
    assert "Causal offset profile" in page


def test_without_causal_the_attention_rule_decides():
    model, _ = constructed_model("softmax")
    report = detect(model, n_sequences=2, scores=["copying"])
    wired = next(h for h in report.checkpoints[0].heads if (h.layer, h.head) == (1, 2))
    assert wired.decided_by == "attention" and wired.is_induction
    assert wired.offset_effect_nats is None and wired.cut_by_offset_nats == ()


def test_detectors_name_the_softmax_circuit():
    model, circuit = constructed_model("softmax")
    report = detect(model, n_sequences=4)
    heads = {(h.layer, h.head): h for h in report.checkpoints[0].heads}
    assert [(h.layer, h.head) for h in report.induction_heads()] == [(circuit.layer, circuit.unit)]
    assert heads[1, 2].prefix_matching > 0.999 and heads[1, 2].copying_edge > 0.999
    assert heads[circuit.previous_token].previous_token > 0.999
    for place, head in heads.items():
        if place not in ((1, 2), circuit.previous_token):
            assert head.prefix_matching == pytest.approx(head.prefix_matching_chance, abs=1e-3)
            assert head.previous_token == pytest.approx(head.previous_token_chance, abs=1e-3)
