"""Steering: equal in every form and token by token, exact against known changes, with the effect that was
wired.
"""

from pathlib import Path

import pytest
import torch
from language_models import build, tokens

from interp.ablation import zero_ablated
from interp.errors import InterventionError
from interp.offset_cuts import offset_profile
from interp.offset_edges import probe_matches
from interp.sequences import candidates, repeated_tokens
from interp.steering import Steering, steer, steering_effect
from models.constructed import constructed_model
from models.form import Form

KINDS = ["softmax", "linear", "mamba1", "mamba2"]
LAYER = {"softmax": 1, "linear": 0, "mamba1": 0, "mamba2": 0}


def _steerings(layer):
    return {
        "off": Steering(layer=layer, scale=0.0),
        "late": Steering(layer=layer, scale=2.0, start=4),
        "edges": Steering(layer=layer, offset=1, scale=0.5),
        "moved": Steering(layer=layer, offset=1, to=2, stop=8),
        "state": Steering(layer=layer, scale=0.5, level="state", start=3, stop=6),
        "state_moved": Steering(layer=layer, offset=2, to=1, level="state"),
    }


def _by_step(model, ids, split):
    logits, state = model.prefill(ids[:, :split])
    found = [logits]
    for t in range(split, ids.shape[1]):
        step, state = model.step(ids[:, t], state)
        found.append(step[:, None])
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", [*KINDS, "hybrid", "llama"])
@torch.no_grad()
def test_every_form_and_every_step_agree(name):
    model, ids = build(name), tokens(seq=12)
    ids[:, 6:] = ids[:, :6]
    for layer in (0, model.config.n_layers - 1):
        for label, steering in _steerings(layer).items():
            with steer(model, steering):
                whole = model(ids)
            with steer(model, steering, form=Form.RECURRENT):
                assert torch.allclose(model(ids), whole, atol=1e-9), label
                assert torch.allclose(_by_step(model, ids, 5), whole, atol=1e-9), label
            with steer(model, steering, form=Form.CHUNKED):
                assert torch.allclose(_by_step(model, ids, 1), whole, atol=1e-9), label
            assert (whole - model(ids)).abs().max() > 1e-8, label
            assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_scale_one_and_moves_to_the_same_place_change_nothing(name):
    model, ids = build(name), tokens()
    for steering in (
        Steering(layer=1),
        Steering(layer=1, level="state"),
        Steering(layer=1, offset=1, to=1),
        Steering(layer=1, offset=2, to=2, level="state"),
    ):
        with steer(model, steering):
            assert torch.allclose(model(ids), model(ids, form=Form.PARALLEL), atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_off_is_zero_ablation_on_either_level(name):
    model, ids = build(name), tokens()
    with zero_ablated(model, [(1, 1)]):
        want = model(ids)
    for level in ("output", "state"):
        with steer(model, Steering(layer=1, head=1, scale=0.0, level=level)):
            assert torch.allclose(model(ids), want, atol=1e-10)


@pytest.mark.parametrize("name", [*KINDS, "hybrid"])
@torch.no_grad()
def test_edges_are_those_that_a_reading_cuts(name):
    model, ids = build(name), tokens(seq=12)
    ids[:, 6:] = ids[:, :6]
    from interp.offset_edges import window_matches

    edges = window_matches(ids).at(1)
    for layer, block in enumerate(model.blocks):
        x = block.ln1(model(ids, stop_at_layer=layer))
        _, cache = model.run_with_cache(ids)
        want = block.attn.read(x).cut(cache["z", layer], *edges)
        with steer(model, Steering(layer=layer, offset=1, scale=0.0)):
            _, steered = model.run_with_cache(ids, names_filter=[f"blocks.{layer}.attn.hook_z"])
        assert torch.allclose(steered["z", layer], want, atol=1e-10)


@torch.no_grad()
def test_what_was_written_off_stays_off_on_the_state_alone():
    model, ids = build("mamba2"), tokens(seq=10)
    plain = model(ids)
    changes = {}
    for level in ("output", "state"):
        # The last layer: nothing above it keeps what it wrote.
        with steer(model, Steering(layer=1, scale=0.0, start=2, stop=4, level=level)):
            changes[level] = (model(ids) - plain).abs().amax((0, 2))
    assert changes["output"][4:].max() < 1e-10 and changes["output"][2:4].min() > 1e-6
    assert changes["state"][4:].min() > 1e-8 and changes["state"][:2].max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_constructed_head_is_switched_and_moved_while_it_generates(kind):
    offset = 1 if kind == "softmax" else 2
    model, circuit = constructed_model(kind, offset=offset)
    layer, head = LAYER[kind], None if kind == "mamba1" else circuit.unit
    period = 20
    probe = repeated_tokens(3, period, 2, ids=candidates(32))
    prompt = probe.tokens[:, : period + 1]
    first = probe.tokens[:, :period]

    def drawn(steering):
        with steer(model, steering, form=Form.RECURRENT):
            return model.generate(prompt, 10, temperature=0)[:, period + 1 :]

    assert torch.equal(drawn(Steering(layer=layer)), first[:, 1:11])
    with steer(model, Steering(layer=layer, head=head, offset=offset, scale=0.0), form=Form.RECURRENT):
        # Nothing is left of 16 nats but rounding.
        assert model.prefill(prompt, logits="last")[0].abs().max() < 0.01
    # Two places on: it copies the token after the next, and goes on from there.
    moved = drawn(Steering(layer=layer, head=head, offset=offset, to=offset + 1))
    assert torch.equal(moved[:, :9], first[:, 2:20:2])
    if offset == 2:
        # On the state, everything that it attends to is taken one place earlier: the current token itself.
        back = drawn(Steering(layer=layer, head=head, offset=offset, to=offset - 1, level="state"))
        assert torch.equal(back, prompt[:, -1:].expand(-1, 10))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [Form.PARALLEL, Form.RECURRENT])
def test_effects_on_the_constructed_circuit(kind, form):
    model, circuit = constructed_model(kind)
    head = None if kind == "mamba1" else circuit.unit
    probe = repeated_tokens(3, 20, 2, ids=candidates(32))
    off = steering_effect(
        model, Steering(layer=circuit.layer, head=head, offset=1, scale=0.0), probe, form=form
    )
    assert off.change("repeat")[0] > 3 and abs(off.change("ordinary")[0]) < 1e-6
    assert off.to_dict()["form"] == form.value and off.to_dict()["repeat_loss_nats"] < 0.01
    if head is not None:
        idle = steering_effect(model, Steering(layer=circuit.layer, head=0, scale=0.0), probe, form=form)
        assert abs(idle.change("repeat")[0]) < 1e-6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One layer of linear attention with a convolution, on periodic tokens: it has just learned to match and
    copy.
    """
    from experiments.recipes import PERIODIC_SMALL, toy
    from experiments.train import train
    from models.checkpoint import list_checkpoints, load_model
    from models.config import LinearAttentionConfig

    mixer = LinearAttentionConfig(n_heads=2, d_conv=4)
    config = toy("tiny", PERIODIC_SMALL, mixer, steps=160, d_model=32, every=160, lr=6e-3)
    folder = tmp_path_factory.mktemp("run") / "run"
    train(config.replace(training={**config.training.to_dict(), "batch": 32}), folder)
    return load_model(list_checkpoints(folder)[-1][1]).eval()


def test_a_trained_model_loses_its_repeats_and_little_else(trained):
    probe = repeated_tokens(16, 12, 3, ids=candidates(32))
    layer = offset_profile(trained, probe_matches(probe), controls=("random",), by_unit=False).layers[0]
    delta = layer.best()
    off = Steering(layer=0, offset=delta, scale=0.0)
    effects = {
        form: steering_effect(trained, off, probe, form=form) for form in (Form.PARALLEL, Form.RECURRENT)
    }
    for effect in effects.values():
        repeat, error = effect.change("repeat")
        assert repeat > 0.2 and repeat > 4 * error
        assert abs(effect.change("ordinary")[0]) < 1e-5
    assert torch.allclose(
        effects[Form.PARALLEL].repeat_steered, effects[Form.RECURRENT].repeat_steered, atol=1e-4
    )
    text = torch.randint(32, (8, 40), generator=torch.Generator().manual_seed(2))
    on_text = steering_effect(trained, off, probe, windows=text)
    assert abs(on_text.change("ordinary")[0]) < on_text.change("repeat")[0]


@pytest.mark.parametrize(
    "steering, said",
    [
        (Steering(layer=9), "layer index 9 is out of range; accepted: 0..1"),
        (Steering(layer=0, head=7), "head index 7 is out of range"),
        (Steering(layer=0, to=2), "to is 2 without an offset"),
        (Steering(layer=0, offset=99), r"offset is 99; accepted: 0..23"),
        (Steering(layer=0, level="both"), "level is 'both'"),
        (Steering(layer=0, start=5, stop=2), "positions 5..2"),
        (Steering(layer=0, offset=1, to=3, level="state"), "accepted: a move to an earlier offset"),
        (Steering(layer=0, head=1, scale=0.0, level="state"), "shares its values with others"),
        (Steering(layer=0, offset=1.5), "offset is 1.5; accepted: a whole number"),
        (Steering(layer=0, start=0.5), "start is 0.5; accepted: a whole number"),
        (Steering(layer=0, scale=float("nan")), "scale is nan; accepted: a finite number"),
    ],
)
def test_errors(steering, said):
    model = build("llama")
    with pytest.raises(InterventionError, match=said) as caught, steer(model, steering):
        pass
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_a_text_from_the_middle_is_refused():
    model, ids = build("softmax"), tokens()
    _, state = model.prefill(ids[:, :4])
    with pytest.raises(InterventionError, match="goes on at position 4, steering has seen 0"):
        with steer(model, Steering(layer=0, offset=1, scale=0.0)):
            model.step(ids[:, 4], state)
    assert not any(m._forward_hooks for m in model.modules())


def test_public_names_are_what_they_say():
    import interp

    for name in interp.__all__:
        assert getattr(interp, name).__name__ == name


def test_no_module_stands_in_the_way_of_a_public_name():
    """Importing a submodule sets its name in the package, over a function that is imported on first use."""
    import interp

    modules = {path.stem for path in Path(interp.__file__).parent.iterdir()}
    assert "offset_cuts" in modules and not modules & set(interp.__all__)
    # The module that has it is imported above.
    assert interp.offset_profile is offset_profile
