"""Detection end to end on models whose circuit is known, and on models that have none."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from induction_circuit import D_VOCAB, induction_model
from language_models import CONFIGS, build
from safetensors.torch import save_file

from interp import detect
from interp.errors import DetectionError
from interp.records import rows, to_csv, to_json
from interp.subject import LanguageModelSubject
from models import LanguageModel, LanguageModelConfig
from models.checkpoint import load_model, load_weights, save_model
from models.config import Mamba2Config, SoftmaxAttentionConfig
from models.errors import CheckpointError

DESIGN_KEYS = {"format", "path", "mixers", "n_layers", "n_heads", "probe", "checkpoints", "phase_transition"}
CHECKPOINT_KEYS = {
    "step", "tokens", "loss_nats", "in_context_learning_nats", "icl_positions", "repeat_loss_nats",
    "first_copy_loss_nats", "order_gain_nats", "hit_loss_nats", "heads",
}  # fmt: skip
HEAD_KEYS = {
    "layer", "head", "unit", "reading", "prefix_matching", "prefix_matching_chance", "copying",
    "copying_edge", "copying_eigenvalue", "previous_token", "offset", "offset_effect_nats", "is_induction",
}  # fmt: skip


@pytest.fixture(scope="module")
def wired():
    return detect(induction_model())


def _head(report, layer, head):
    return next(h for h in report.checkpoints[-1].heads if (h.layer, h.head) == (layer, head))


def test_the_wired_heads_are_found_and_no_other(wired):
    assert [(head.layer, head.head) for head in wired.induction_heads()] == [(1, 0)]
    induction, before, idle = _head(wired, 1, 0), _head(wired, 0, 0), _head(wired, 1, 1)
    assert induction.prefix_matching == pytest.approx(1.0, abs=1e-4)
    assert induction.copying_edge == pytest.approx(1.0, abs=1e-4)
    assert induction.copying_edge_argmax == 1.0
    assert induction.copying_eigenvalue == pytest.approx(1.0, abs=1e-6)
    assert induction.offset == 1
    assert before.previous_token == pytest.approx(1.0, abs=1e-4)
    assert before.prefix_matching < 1e-4
    assert idle.prefix_matching == pytest.approx(idle.prefix_matching_chance, abs=1e-6)
    assert idle.previous_token == pytest.approx(idle.previous_token_chance, abs=1e-6)
    assert idle.copying is None and idle.copying_eigenvalue is None


def test_the_wired_circuit_shows_in_the_losses(wired):
    found = wired.checkpoints[0]
    assert found.first_copy_loss_nats > math.log(D_VOCAB) - 0.5
    assert found.repeat_loss_nats < 0.05
    assert found.order_gain_nats > 3
    assert found.repeat_gain_nats == pytest.approx(found.first_copy_loss_nats - found.repeat_loss_nats)


@pytest.mark.parametrize("name", ["softmax", "linear", "mamba1", "mamba2", "hybrid", "gpt2", "llama"])
def test_an_untrained_model_has_no_induction_head(name):
    report = detect(build(name, dtype=torch.float32))
    assert not report.induction_heads()
    assert abs(report.checkpoints[0].order_gain_nats) < 0.5
    assert report.phase_transition is None
    readings = {(head.layer, head.reading) for head in report.checkpoints[0].heads}
    expected = {"softmax": ["pattern"], "mamba1": ["ssm", "block"], "mamba2": ["ssm", "block"]}
    expected["linear"] = ["pattern", "block"]
    for layer, mixer in enumerate(CONFIGS[name].mixers):
        assert {reading for at, reading in readings if at == layer} == set(expected[mixer.kind])


def test_units_of_mamba1():
    model = build("mamba1", dtype=torch.float32)
    counts = {}
    for units in ("layer", "state", "cluster:3"):
        heads = detect(model, mamba_units=units, n_maps=0).checkpoints[0].heads
        counts[units] = {(h.unit, sum(o.layer == 0 and o.reading == "ssm" for o in heads)) for h in heads}
    assert counts == {"layer": {("layer", 1)}, "state": {("state", 4)}, "cluster:3": {("cluster", 3)}}
    with pytest.raises(DetectionError, match="mamba_units 'state' for layers of softmax; accepted: only"):
        detect(build("softmax", dtype=torch.float32), mamba_units="state")


def test_json_has_the_keys_of_the_design_and_reads_back(wired):
    record = json.loads(to_json(wired))
    assert DESIGN_KEYS <= set(record)
    assert record["format"] == 1
    assert CHECKPOINT_KEYS <= set(record["checkpoints"][0])
    assert all(HEAD_KEYS <= set(head) for head in record["checkpoints"][0]["heads"])
    assert record["probe"]["aggregation"] == "rowsum"
    table = to_csv(wired).splitlines()
    assert len(table) == 1 + 4 == 1 + len(rows(wired))


def test_the_seed_decides_and_is_recorded(wired):
    again, other = detect(induction_model()), detect(induction_model(), seed=1)
    assert again.checkpoints == wired.checkpoints
    assert other.probe.seed == 1
    assert other.checkpoints[0].first_copy_loss_nats != wired.checkpoints[0].first_copy_loss_nats


def test_the_default_probe_shrinks_and_says_so(wired):
    # 41 positions, one of them BOS: four copies of ten.
    assert (wired.probe.period, wired.probe.repeats) == (10, 4)
    assert any("probe shrunk from 25 x 4 to 10 x 4" in note for note in wired.notes)


def test_a_probe_of_unknown_training_length_is_noted(wired):
    said = "probe of 41 tokens, as the context allows: the length of the training sequences is not known"
    assert [said in note for note in wired.notes].count(True) == 1
    told = detect(induction_model(), period=10, repeats=2, n_sequences=2, scores=["prefix_matching"])
    assert not any("as the context allows" in note for note in told.notes)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"period": 5.5}, r"period 5.5; accepted: None or a whole number from 1 to 100,000"),
        ({"repeats": True}, "repeats True; accepted: None or a whole number from 2"),
        ({"seed": 1.5}, "seed 1.5; accepted: 0 or a positive number .* a whole one"),
        ({"n_maps": -1}, "n_maps -1; accepted"),
    ],
)
def test_numbers_of_the_probe_are_whole(options, said):
    with pytest.raises(DetectionError, match=said):
        detect(induction_model(), **options)


def test_what_does_not_fit_is_refused():
    model = induction_model()
    with pytest.raises(DetectionError, match=r"vocabulary too small.*20 usable.*--period 25"):
        detect(model, period=25, repeats=2)
    with pytest.raises(
        DetectionError, match=r"context shorter than the probe: the model holds 41 tokens.*46"
    ):
        detect(model, period=15, repeats=3)
    with pytest.raises(DetectionError, match="unknown scores 'entropy'; accepted: prefix_matching"):
        detect(model, scores=["entropy"])


def test_scores_that_are_left_out_are_none():
    report = detect(induction_model(), scores=["prefix_matching"])
    head, found = _head(report, 1, 0), report.checkpoints[0]
    assert head.prefix_matching > 0.99 and head.copying is None and head.copying_edge is None
    assert found.order_gain_nats is None and found.in_context_learning_nats is None
    assert any("copying is not measured" in note for note in report.notes)


def test_a_series_is_read_step_by_step(tmp_path):
    wired, blank = induction_model(), induction_model()
    with torch.no_grad():
        for parameter in blank.parameters():
            parameter.zero_()
    windows = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.arange(40).remainder(10)]).repeat(6, 1)
    from safetensors.torch import save_file

    save_file({"tokens": windows.to(torch.int32)}, tmp_path / "eval.safetensors")
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "tokens": 640}\n{"step": 20, "to')
    for step, model in ((0, blank), (5, blank), (20, wired)):
        save_model(tmp_path / f"step_{step:08d}", model)
    report = detect(tmp_path)
    assert [c.step for c in report.checkpoints] == [0, 5, 20]
    assert [c.tokens for c in report.checkpoints] == [None, 640, None]
    assert [len(report.induction_heads(step)) for step in (0, 5, 20)] == [0, 0, 1]
    assert report.checkpoints[1].same_weights_as_step == 0
    assert report.checkpoints[0].weight_sha256 != report.checkpoints[2].weight_sha256
    # The windows have period ten: at first nothing is predicted, then everything after the first copy.
    assert report.checkpoints[0].in_context_learning_nats == pytest.approx(0, abs=1e-5)
    assert report.checkpoints[2].in_context_learning_nats < -2
    assert report.checkpoints[2].hit_loss_nats < 0.05
    assert [c.step for c in detect(tmp_path, steps="5:").checkpoints] == [5, 20]
    assert [c.step for c in detect(tmp_path, steps="0,last").checkpoints] == [0, 20]
    with pytest.raises(DetectionError, match="no checkpoint at steps 7; there are: 0, 5, 20"):
        detect(tmp_path, steps="7")


def test_weights_read_ahead_are_those_of_their_own_step(tmp_path):
    """The next checkpoint is read while one is scored: a series gives what each checkpoint alone gives, and a
    checkpoint that turns out damaged is named when its turn comes."""
    model = build("softmax")
    for step in range(4):
        model.reset_parameters(torch.Generator().manual_seed(step))
        save_model(tmp_path / f"step_{step:08d}", model)
    options = {"n_sequences": 2, "period": 6, "repeats": 2, "scores": ["repeats"]}
    series = detect(tmp_path, **options)
    for step, scored in enumerate(series.checkpoints):
        alone = detect(tmp_path / f"step_{step:08d}", **options).checkpoints[0]
        assert [head.prefix_matching for head in scored.heads] == [
            head.prefix_matching for head in alone.heads
        ]
    assert len({scored.heads[0].prefix_matching for scored in series.checkpoints}) == 4
    weights = tmp_path / "step_00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    seen = []
    with pytest.raises(CheckpointError, match="step_00000002.*truncated"):
        detect(tmp_path, **options, progress=lambda done, total, step: seen.append(step))
    assert seen == [0, 1, 2]


def test_a_model_loaded_from_a_run_is_read_as_the_runs_folder_is(tmp_path, monkeypatch):
    model = LanguageModel(
        LanguageModelConfig(
            d_model=16, n_layers=1, d_vocab=40, n_ctx=64, mixers=(SoftmaxAttentionConfig(n_heads=2),)
        )
    )
    for step in (10, 20):
        model.reset_parameters(torch.Generator().manual_seed(step))
        save_model(tmp_path / f"step_{step:08d}", model)
    windows = torch.randint(0, 40, (4, 24), generator=torch.Generator().manual_seed(0))
    save_file({"tokens": windows}, tmp_path / "eval.safetensors")
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "tokens": 960}\n')
    loaded = load_model(tmp_path / "step_00000010")
    for step in (10, 20):
        if step == 20:
            load_weights(tmp_path / "step_00000020", loaded)
        expected, found = detect(tmp_path, steps=step), detect(loaded)
        assert found.probe.period * found.probe.repeats <= 24
        assert (found.probe, found.notes, found.text) == (expected.probe, expected.notes, expected.text)
        shown = dataclasses.replace(found.checkpoints[0], weight_sha256=None)
        assert shown == dataclasses.replace(expected.checkpoints[0], weight_sha256=None)
        assert shown.tokens == {10: None, 20: 960}[step]
    monkeypatch.chdir(tmp_path / "step_00000020")
    link = tmp_path.parent / f"link to {tmp_path.name}"
    link.symlink_to(tmp_path / "step_00000020")
    for target in (load_model("."), ".", link, load_model(link)):
        if not isinstance(target, (str, Path)):
            monkeypatch.chdir(tmp_path.parent)
        shown = detect(target).checkpoints[0]
        monkeypatch.chdir(tmp_path / "step_00000020")
        assert (shown.step, shown.heads) == (20, expected.checkpoints[0].heads)
    assert detect(LanguageModelSubject(loaded)).checkpoints[0].step == 20
    assert detect(copy.deepcopy(loaded).to(torch.bfloat16)).checkpoints[0].step == 20
    changed = copy.deepcopy(loaded)
    with torch.no_grad():
        changed.unembed.weight[0, 0] += 1
    report = detect(changed)
    assert (report.checkpoints[0].step, report.checkpoints[0].tokens) == (0, None)
    assert report.probe == expected.probe
    assert any(note.startswith("step not known: the weights are not, or no longer") for note in report.notes)
    (tmp_path / "eval.safetensors").write_bytes(b"")
    notes = detect(loaded, scores=["copying"]).notes
    assert any(note.startswith("not read on its run's windows: ") for note in notes)
    # Weights of its own: it knows no run.
    assert any("not known here" in note for note in detect(model).notes)


def test_maps_are_of_the_strongest_heads(wired):
    found = {(m.layer, m.head): m for m in wired.attention_maps}
    assert {(1, 0), (0, 0)} <= set(found)
    matrix = found[0, 0].matrix
    assert len(matrix) == len(found[0, 0].tokens) == 41
    assert all(matrix[i][i - 1] == pytest.approx(1, abs=1e-4) for i in range(1, 41))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_in_float32(dtype):
    """The scores are those of the rounded weights; the model that was given keeps its dtype."""
    mixers = (SoftmaxAttentionConfig(n_heads=2), Mamba2Config(n_heads=2, d_state=8))
    model = LanguageModel(LanguageModelConfig(d_model=32, n_layers=2, d_vocab=20, n_ctx=64, mixers=mixers))
    options = {"n_sequences": 2, "period": 8, "repeats": 2, "scores": ["prefix_matching", "copying"]}
    model = model.to(dtype)
    half = detect(model, **options)
    assert next(model.parameters()).dtype == dtype
    assert f"weights are {str(dtype)[6:]}, read in float32" in half.notes
    whole = detect(model.float(), **options)
    pairs = zip(half.checkpoints[-1].heads, whole.checkpoints[-1].heads, strict=True)
    assert all(one.prefix_matching == two.prefix_matching for one, two in pairs)


def test_a_token_ruled_out_by_minus_infinity_is_no_overflow():
    config = LanguageModelConfig(
        d_model=32, n_layers=1, d_vocab=20, n_ctx=64, mixers=(SoftmaxAttentionConfig(n_heads=2),),
        unembed_bias=True,
    )  # fmt: skip
    model = LanguageModel(config)
    options = {"n_sequences": 2, "period": 8, "repeats": 2, "scores": ["prefix_matching"]}
    with torch.no_grad():
        model.unembed.b_U[-1] = -torch.inf
    assert detect(model, **options).checkpoints[-1].heads
    with torch.no_grad():
        model.unembed.b_U[-1] = torch.inf
    with pytest.raises(DetectionError, match="not finite"):
        detect(model, **options)
