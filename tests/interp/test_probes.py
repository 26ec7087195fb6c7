"""Carrying, matching, lag and interchange interventions: on wired circuits, and on none."""

import math

import pytest
import torch
from constructed_cases import CASES, probe

from interp.errors import DetectionError
from interp.interchange import Recall, interchange, only_current_tap
from interp.probes import block_probes
from models.config import LanguageModelConfig, Mamba1Config
from models.constructed import constructed_model
from models.language_model import LanguageModel

GAIN = math.log(32)


def _mean(values):
    return values.mean(-1).tolist()


def test_softmax_carries_in_one_block_and_matches_in_the_next():
    model, _ = constructed_model("softmax")
    first, second = block_probes(model, probe(4, repeats=2))
    assert _mean(first.carrying) > GAIN - 0.1 and abs(_mean(second.carrying)) < 1e-3
    assert _mean(second.matching) > GAIN - 0.1 and abs(_mean(first.matching)) < 1e-3
    assert max(map(abs, _mean(first.lag))) < 1e-3
    lag = dict(zip(second.lags, _mean(second.lag), strict=True))
    # The carried token and the value are both read one after the earlier copy.
    assert lag[1] > GAIN - 0.1 and max(abs(v) for k, v in lag.items() if k != 1) < 0.02


@pytest.mark.parametrize("kind, offset", [case for case in CASES if case[0] != "softmax"])
def test_a_convolution_carries_inside_the_block(kind, offset):
    model, _ = constructed_model(kind, offset=offset)
    (block,) = block_probes(model, probe(4, repeats=2))
    assert abs(_mean(block.carrying)) < 1e-3
    assert _mean(block.matching) > GAIN - 0.1
    lag = dict(zip(block.lags, _mean(block.lag), strict=True))
    # The earlier copy (match) and the token after it (value), whatever the scan's own offset.
    assert lag[0] > GAIN - 0.1 and lag[1] > GAIN - 0.1
    assert max(abs(v) for k, v in lag.items() if k not in (0, 1)) < 1e-3


@pytest.mark.parametrize("kind, offset", CASES)
def test_controls_read_nothing(kind, offset):
    model, _ = constructed_model(kind, offset=offset)
    for block in block_probes(model, probe(4, repeats=2)):
        assert abs(_mean(block.carrying_control)) < 0.02 and abs(_mean(block.matching_control)) < 0.02


def test_an_untrained_model_neither_carries_nor_matches():
    config = LanguageModelConfig(d_model=16, n_layers=2, d_vocab=64, n_ctx=64, mixers=(Mamba1Config(),) * 2)
    for block in block_probes(LanguageModel(config), probe(4, repeats=2)):
        record = block.to_dict()
        assert abs(record["carrying_nats"]) < 0.01 and abs(record["matching_nats"]) < 0.01
        assert max(map(abs, record["lag_nats"])) < 0.01


def test_probes_that_cannot_be_made_are_refused():
    model, _ = constructed_model("linear")
    with pytest.raises(DetectionError, match="a probe of 3 copies; accepted: 2"):
        block_probes(model, probe(2))
    with pytest.raises(DetectionError, match="period of 8 is too short"):
        block_probes(model, probe(2, 8, 2))
    with pytest.raises(DetectionError, match="layer index 1 is out of range"):
        block_probes(model, probe(2, 25, 2), layers=(1,))
    with pytest.raises(DetectionError, match="holds all 32 tokens"):
        block_probes(model, probe(2, 32, 2))


# Interchange.


def _recall(n=8, key=6, query=22):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.stack([torch.randperm(32, generator=draw) for _ in range(n)])
    spare = tokens[:, query : query + 2].clone()
    tokens[:, query : query + 2] = tokens[:, key : key + 2]
    corrupted = tokens.clone()
    corrupted[:, key] = spare[:, 0]
    place = torch.full((n,), key)
    return Recall(tokens=tokens, corrupted=corrupted, key=place, query=torch.full((n,), query))


def _restored(model, **options):
    return {(r.layer, r.component, r.place): r.restored for r in interchange(model, _recall(), **options)}


def test_softmax_stores_the_pair_with_its_first_block():
    model, _ = constructed_model("softmax")
    found = _restored(model)
    for place in ((0, "v", "+0"), (0, "output", "+1"), (1, "k", "+1"), (1, "z", "query")):
        assert found[place] > 0.98
    for place in (
        (0, "k", "+1"),
        (0, "output", "+0"),
        (1, "v", "+1"),
        (1, "output", "after"),
        (0, "z", "query"),
    ):
        assert abs(found[place]) < 0.02
    assert not any(component in ("conv", "state", "dt") for _, component, _ in found)


@pytest.mark.parametrize("kind, offset", [case for case in CASES if case[0] != "softmax"])
def test_a_convolution_stores_the_pair_and_the_state_does_not(kind, offset):
    model, _ = constructed_model(kind, offset=offset)
    found = _restored(model)
    assert found[0, "conv", "after"] > 0.98 and found[0, "conv", f"+{offset}"] > 0.98
    assert found[0, "k", "after"] > 0.98
    assert abs(found[0, "conv", "+0"]) < 0.02 and abs(found[0, "v", "after"]) < 0.02
    assert abs(found[0, "output", "after"]) < 0.02
    for lag in range(4):
        assert found[0, "state", f"+{lag}"] == pytest.approx(float(lag >= offset), abs=0.02)


def test_recall_needs_the_earlier_taps():
    model, circuit = constructed_model("mamba1", offset=2)
    recall = _recall()
    rows = torch.arange(8)

    def accuracy():
        best = model(recall.tokens)[rows, recall.query].argmax(-1)
        return float((best == recall.tokens[rows, recall.query + 1]).double().mean())

    assert accuracy() == 1
    with only_current_tap(model):
        assert accuracy() < 0.5
    assert accuracy() == 1


def test_questions_that_make_no_sense_are_refused():
    config = LanguageModelConfig(d_model=16, n_layers=1, d_vocab=32, n_ctx=64, mixers=(Mamba1Config(),))
    with pytest.raises(DetectionError, match="nothing to restore: the model does not recall"):
        interchange(LanguageModel(config), _recall())
    model, _ = constructed_model("linear")
    with pytest.raises(DetectionError, match="unknown components b; accepted: input, conv"):
        interchange(model, _recall(), components=("b",))
    good = _recall()
    with pytest.raises(DetectionError, match="does not repeat its pair at key 5"):
        Recall(tokens=good.tokens, corrupted=good.corrupted, key=good.key - 1, query=good.query)
    with pytest.raises(DetectionError, match="corrupted key equals the key"):
        Recall(tokens=good.tokens, corrupted=good.tokens, key=good.key, query=good.query)
    with pytest.raises(DetectionError, match="outside its window of 32"):
        Recall(tokens=good.tokens, corrupted=good.corrupted, key=good.key, query=good.query + 20)
