"""Sheets, cuts and states against models whose circuit is known, and readings computed on their own."""

import threading

import hf_models
import numpy as np
import pytest
import torch
from language_models import build

from interp.bridge_subject import open_bridge
from interp.dashboard.ahead import Ahead
from interp.dashboard.captions import cut_caption
from interp.dashboard.causal import cut_profile
from interp.dashboard.desk import Desk
from interp.dashboard.mixer_inputs import MixerInputs
from interp.dashboard.prompt import Prompt, PromptSpec, make_prompt
from interp.dashboard.run import Run
from interp.dashboard.selection import Selection
from interp.dashboard.sheet import read_sheet
from interp.dashboard.states import state_norms
from interp.dashboard.views import cut_view
from interp.errors import DetectionError
from interp.subject import LanguageModelSubject
from models.checkpoint import save_model
from models.constructed import CONSTRUCTED_KINDS, constructed_model
from models.form import Form

IDS = (3, 1, 4, 12, 5, 9, 2, 6, 3, 1, 4, 12)


def prompt(ids=IDS) -> Prompt:
    return Prompt(ids=tuple(ids), tokens=tuple(map(str, ids)))


@pytest.mark.parametrize("kind", CONSTRUCTED_KINDS)
def test_the_wired_unit_reads_what_followed_the_earlier_copy(kind):
    model, circuit = constructed_model(kind)
    units = "layer" if kind == "mamba1" else "head"
    sheet = read_sheet(
        LanguageModelSubject(model),
        prompt(),
        layer=circuit.layer,
        reading=circuit.reading,
        units=units,
    )
    for dest in range(8, 11):
        # Mamba's skip carries each token to itself.
        row = np.abs(sheet.of(circuit.unit)[dest, :dest])
        assert row.argmax() == dest - 7, (kind, dest, row)
    idle = 0 if circuit.unit else None
    if idle is not None:
        row = np.abs(sheet.of(idle)[10])
        assert row[3] < 0.2 * row.sum(), row


@pytest.mark.parametrize("name, layer", [("hybrid", n) for n in range(4)] + [("llama", 1)])
def test_weights_are_those_of_the_reading(name, layer):
    model = build(name)
    subject = LanguageModelSubject(model)
    tokens = torch.tensor([IDS])
    inputs = []
    handle = model.blocks[layer].attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(tokens)
    handle.remove()
    mixer = model.blocks[layer].attn
    for reading in mixer.readings:
        expected = mixer.read(inputs[0], reading).weights()[0].float().detach().numpy()
        units = "layer" if mixer.kind == "mamba1" else "head"
        sheet = read_sheet(subject, prompt(), layer=layer, reading=reading, units=units)
        np.testing.assert_allclose(sheet.weights, expected, atol=1e-6)
        assert sheet.mixer == mixer.kind and sheet.values == "scored"


def test_signed_values_are_the_implied_attention():
    model = build("hybrid")
    subject = LanguageModelSubject(model)
    pattern = model.run_with_cache(torch.tensor([IDS]))[1]["pattern", 2][0].float().numpy()
    sheet = read_sheet(subject, prompt(), layer=2, reading="ssm", units="head", values="signed")
    np.testing.assert_allclose(sheet.weights, pattern, atol=1e-5)
    assert sheet.values == "signed" and sheet.weights.min() < 0
    # Mamba-1: one map for each channel; a unit shows the mean of its channels.
    channels = model.run_with_cache(torch.tensor([IDS]))[1]["pattern", 0][0].float()
    sheet = read_sheet(subject, prompt(), layer=0, reading="ssm", units="layer", values="signed")
    np.testing.assert_allclose(sheet.weights[0], channels.mean(0), atol=1e-5)
    assert sheet.quantity == "implied attention, mean of channels"
    groups = read_sheet(subject, prompt(), layer=0, reading="ssm", units="cluster:2", values="signed")
    with torch.no_grad():
        index = model.blocks[0].attn.read(_input(model, 0), units="cluster:2").z_index
    for unit, row in enumerate(index):
        np.testing.assert_allclose(groups.weights[unit], channels[row[row >= 0]].mean(0), atol=1e-5)


def _input(model, layer):
    kept = []
    handle = model.blocks[layer].attn.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([IDS]))
    handle.remove()
    return kept[0]


@pytest.mark.parametrize("layers", [(3, 0, 2, 1), (0, 1, 2, 3), (1, 3, 3, 0)])
def test_kept_inputs_are_those_of_a_whole_run(layers):
    """Whatever the order of layers: each is run once, and reads as on its own."""
    model = build("hybrid")
    subject, kept, runs = LanguageModelSubject(model), MixerInputs(IDS), []
    handles = [
        block.register_forward_pre_hook(lambda _, __, n=n: runs.append(n))
        for n, block in enumerate(model.blocks)
    ]
    found = {}
    for layer in layers:
        found[layer] = kept.at(subject, layer)
    assert runs == list(range(max(layers) + 1))
    for handle in handles:
        handle.remove()
    for layer, x in found.items():
        torch.testing.assert_close(x, _input(model, layer), rtol=1e-6, atol=1e-6)
    mixer = model.blocks[3].attn
    options = {"layer": 3, "reading": mixer.readings[-1], "units": "head"}
    with torch.no_grad():
        expected = mixer.read(_input(model, 3), mixer.readings[-1]).weights()[0].numpy()
    np.testing.assert_allclose(
        read_sheet(subject, prompt(), inputs=kept, **options).weights, expected, atol=1e-6, rtol=0
    )
    assert kept.n_bytes == found[1].element_size() * (max(layers) + 1) * len(IDS) * model.config.d_model


def test_vectors_have_no_sign():
    sheet = read_sheet(
        LanguageModelSubject(build("mamba2")),
        prompt(),
        layer=0,
        reading="block",
        units="head",
        values="signed",
    )
    assert sheet.values == "scored" and not sheet.signed_possible and sheet.weights.min() >= 0


def test_models_read_through_the_bridge_have_maps_and_say_what_they_lack(tmp_path):
    hf_models.gpt2().save_pretrained(tmp_path)
    bridge, run = open_bridge(tmp_path), Run(str(tmp_path))
    options = {"layer": 1, "reading": "pattern", "units": "head"}
    ours = read_sheet(run.load(0).subject, prompt(), **options)
    theirs = read_sheet(bridge, prompt(), **options)
    np.testing.assert_allclose(theirs.weights, ours.weights, atol=1e-5)
    with pytest.raises(DetectionError, match="Cuts need a model in our own mixers"):
        cut_profile(run, bridge, prompt(), unit=0, **options)
    with pytest.raises(DetectionError, match="States need a model in our own mixers"):
        state_norms(bridge, prompt(), layer=0, units="head")


def test_what_is_not_there_is_refused():
    subject = LanguageModelSubject(build("mamba2"))
    with pytest.raises(DetectionError, match="layers 0..1"):
        read_sheet(subject, prompt(), layer=2, reading="ssm", units="head")
    with pytest.raises(ValueError, match="no reading 'pattern'"):
        read_sheet(subject, prompt(), layer=0, reading="pattern", units="head")
    sheet = read_sheet(subject, prompt(), layer=0, reading="ssm", units="head")
    with pytest.raises(DetectionError, match=r"0\.\.3; asked for 4"):
        sheet.of(4)


@pytest.mark.parametrize("kind, offset", [("softmax", 1), ("mamba2", 1), ("linear", 3)])
def test_cuts_find_the_wired_offset(kind, offset, tmp_path):
    model, circuit = constructed_model(kind, offset=offset)
    run = Run(str(save_model(tmp_path / "m", model)))
    subject = run.load(0).subject
    one = make_prompt(run, subject, PromptSpec(period=20, repeats=3))
    options = {"layer": circuit.layer, "units": "head", "reading": circuit.reading}
    for measured_on, n in (("probe", 8), ("prompt", 1)):
        found = cut_profile(run, subject, one, unit=circuit.unit, measured_on=measured_on, **options)
        assert found.best == 1 and found.effect > 3 and found.n_sequences == n, found
        assert list(found.cut) == ["this head", "whole layer"]
    idle = cut_profile(run, subject, one, unit=0, **options)
    assert abs(idle.effect) < 0.05
    with pytest.raises(DetectionError, match="no token comes again"):
        cut_profile(run, subject, prompt((1, 2, 3)), unit=0, measured_on="prompt", **options)


def test_a_short_prompt_has_fewer_offsets_and_one_sequence_no_error(tmp_path):
    model, circuit = constructed_model("softmax")
    run = Run(str(save_model(tmp_path / "model", model)))
    options = {"layer": circuit.layer, "unit": circuit.unit, "reading": circuit.reading, "units": "head"}
    found = cut_profile(run, run.load(0).subject, prompt((3, 3, 3)), measured_on="prompt", **options)
    assert found.offsets == (-2, -1, 0, 1, 2) and found.best in (1, 2)
    two = cut_profile(run, run.load(0).subject, prompt((3, 4, 3, 4)), measured_on="prompt", **options)
    assert two.n_sequences == 1 and two.cut_se == () and two.effect_se is None
    assert "(one sequence: no standard error); 1 sequence (this prompt)" in cut_caption(two)
    assert not cut_view(two).data[0].error_y.array
    probe = cut_profile(run, run.load(0).subject, prompt(), **options)
    assert len(probe.cut_se) == len(probe.offsets) and "(standard error 0." in cut_caption(probe)


def test_states_are_those_of_the_recurrence():
    model = build("hybrid")
    subject = LanguageModelSubject(model)
    tokens = torch.tensor([IDS])
    _, cache = model.run_with_cache(tokens, form=Form.RECURRENT)
    for layer, units in ((0, "layer"), (2, "head"), (3, "head")):
        states = cache[f"blocks.{layer}.attn.hook_state"][0].double()
        axes = (1, 2) if units == "layer" else (2, 3)
        expected = states.square().sum(axes).sqrt()
        expected = expected[None] if units == "layer" else expected.T
        found = state_norms(subject, prompt(), layer=layer, units=units)
        np.testing.assert_allclose(found.norms, expected.numpy(), rtol=1e-4)
    by_state = state_norms(subject, prompt(), layer=0, units="state").norms
    whole = state_norms(subject, prompt(), layer=0, units="layer").norms
    groups = state_norms(subject, prompt(), layer=0, units="cluster:2").norms
    for parts, n in ((by_state, 4), (groups, 2)):
        assert parts.shape == (n, len(IDS))
        np.testing.assert_allclose(np.square(parts).sum(0), np.square(whole[0]), rtol=1e-4)


def test_the_softmax_state_is_its_cache():
    model = build("softmax")
    cache = model.run_with_cache(torch.tensor([IDS]))[1]
    k, v = cache["blocks.0.attn.hook_k"][0], cache["blocks.0.attn.hook_v"][0]
    expected = (k.square().sum(-1) + v.square().sum(-1)).cumsum(0).sqrt().T
    found = state_norms(LanguageModelSubject(model), prompt(), layer=0, units="head")
    np.testing.assert_allclose(found.norms, expected.numpy(), rtol=1e-5)
    assert (np.diff(found.norms) > 0).all()


def test_a_desk_computes_once_and_sees_new_files(wired_run, tmp_path):
    import shutil

    run = shutil.copytree(wired_run, tmp_path / "run")
    desk = Desk([str(run)])
    chosen = Selection(step=4, layer=1, head=2, reading="pattern")
    spec = PromptSpec(period=10, repeats=3)
    sheet = desk.sheet(chosen, spec)
    assert desk.sheet(chosen, spec) is sheet
    other = desk.sheet(Selection(step=0, layer=1, head=2, reading="pattern"), spec)
    assert other is not sheet and sheet.of(2)[15, 6] > 0.9 and other.of(2)[15, 6] < 0.2
    # Another checkpoint of the same name: what was computed does not stand for it.
    shutil.rmtree(run / "step_00000040")
    with pytest.raises(DetectionError, match="the checkpoint of step 40 is gone"):
        desk.sheet(chosen, spec)
    shutil.copytree(run / "step_00000000", run / "step_00000040", copy_function=shutil.copy)
    assert desk.sheet(chosen, spec).of(2)[15, 6] < 0.2
    assert desk.heading(chosen) == "run · step 40 · L1H2 · pattern"


def test_the_checkpoints_beside_are_read_before_they_are_chosen(wired_run, monkeypatch):
    read = []

    def counted(subject, prompt, **options):
        read.append(threading.current_thread() is threading.main_thread())
        return read_sheet(subject, prompt, **options)

    monkeypatch.setattr("interp.dashboard.desk.read_sheet", counted)
    desk, spec = Desk([str(wired_run)], ahead=True), PromptSpec(period=10, repeats=3)
    chosen = Selection(step=3, layer=1, head=2, reading="pattern")
    desk.sheet(chosen, spec)
    desk.prepare([chosen], spec)
    assert desk.ahead.idle.wait(20)
    assert read == [True, False, False]
    for step, strength in ((4, 0.9), (2, 0.2)):
        sheet = desk.sheet(Selection(step=step, layer=1, head=2, reading="pattern"), spec)
        assert bool(sheet.of(2)[15, 6] > 0.9) is (strength == 0.9)
    assert len(read) == 3
    # Nothing lies beyond the ends, and without being told to nothing is read ahead.
    desk.prepare([Selection(step=4, layer=0, reading="pattern")], spec)
    assert desk.ahead.idle.wait(20) and len(read) == 4
    Desk([str(wired_run)]).prepare([chosen], spec)
    assert len(read) == 4


def test_a_newer_wish_replaces_what_is_not_begun():
    done, ahead = [], Ahead(pause=0.2)
    ahead.wish([lambda: done.append("old")] * 3)
    ahead.wish([lambda: done.append("new")])
    assert not ahead.idle.is_set() and ahead.idle.wait(20) and done == ["new"]


def test_a_run_takes_in_what_was_written_later(wired_run, tmp_path):
    import shutil

    run = shutil.copytree(wired_run, tmp_path / "run")
    later = [shutil.move(run / f"step_000000{step}", tmp_path / str(step)) for step in (20, 40)]
    desk = Desk([str(run)])
    assert desk.runs[0].steps == (0, 5, 10)
    shutil.move(later[1], run / "step_00000040")
    shutil.rmtree(run / "step_00000005")
    desk.look_again()
    # Places stay: open windows name a checkpoint by its place, a deleted one too.
    assert desk.runs[0].steps == (0, 5, 10, 40)
    sheet = desk.sheet(
        Selection(step=3, layer=1, head=2, reading="pattern"), PromptSpec(period=10, repeats=3)
    )
    assert sheet.of(2)[15, 6] > 0.9
    with pytest.raises(DetectionError, match="the checkpoint of step 5 is gone"):
        desk.sheet(Selection(step=1, layer=1, reading="pattern"), PromptSpec())
    shutil.rmtree(run)
    desk.look_again()
    assert desk.runs[0].steps == (0, 5, 10, 40)


def test_a_window_opens_on_the_wired_unit(wired_run, mamba_run):
    desk = Desk([str(wired_run), str(mamba_run)])
    assert desk.opening(0) == {"layer": 1, "head": 2, "reading": "pattern"}
    assert desk.runs[1].layers[1].n_units == {"layer": 1, "cluster:4": 4, "cluster:8": 8, "state": 4}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"run": 0, "step": "0"}, "step is '0'; choose one"),
        ({"run": True}, "run is True"),
        ({}, "run is None"),
    ],
)
def test_a_selection_is_checked(values, message):
    with pytest.raises(DetectionError, match=message):
        Selection.of(values)
