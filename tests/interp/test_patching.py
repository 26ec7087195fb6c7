"""Activation and path patching: identities that hold exactly, in every mixer, and a circuit found by them."""

from collections import Counter

import pytest
import torch
from language_models import CONFIGS, build, tokens

from interp.attribution import attribution_patching
from interp.errors import InterventionError
from interp.patching import activation_patching, patched, record, swapped_state
from interp.path_patching import Receiver, Sender, all_receivers, patch_paths, path_patching_scores
from interp.sequences import candidates, repeated_tokens
from interp.sites import Site, checked, head_sites
from models.constructed import constructed_model
from models.errors import HookNotFired, UnknownHook
from models.form import Form

KINDS = ["softmax", "linear", "mamba1", "mamba2", "hybrid"]
ALL_KINDS = (
    "resid_pre",
    "resid_post",
    "mixer_out",
    "z",
    "q",
    "k",
    "v",
    "pattern",
    "conv",
    "state",
    "gate",
    "dt",
    "result",
)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def _n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _sites(model, layer, kind):
    """The site and, with heads, its last head at two positions; nothing where the layer lacks it."""
    name = Site(kind=kind, layer=layer)
    mixer = model.blocks[layer].attn
    if (kind == "state" and mixer.kind == "softmax") or name.point not in model.hook_dict:
        return []
    found = [name]
    if kind in ("z", "q", "k", "v", "pattern", "state"):
        last = head_sites(model, kind, [layer])[-1]
        found += [last, Site(kind=kind, layer=layer, head=last.head, positions=(2, 5))]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_clean_into_clean_changes_nothing_and_other_values_do(name):
    model = build(name)
    clean, corrupt = tokens(), tokens(seed=1)
    hooks = _n_hooks(model)
    met = Counter()
    for kind in ALL_KINDS:
        for layer in range(model.config.n_layers):
            for site in _sites(model, layer, kind):
                form = Form.RECURRENT if kind == "state" else Form.PARALLEL
                own, other = record(model, clean, [site]), record(model, corrupt, [site])
                with patched(model, [site], own):
                    assert torch.equal(model(clean), model(clean, form=form)), site
                    same = model(clean)
                assert torch.allclose(same, model(clean), atol=1e-10), site
                with patched(model, [site], other):
                    assert (model(clean) - same).abs().max() > 1e-8, site
                met[kind] += 1
    assert met["z"] and met["pattern"] and met["resid_pre"]
    assert _n_hooks(model) == hooks


@pytest.mark.parametrize("name", list(CONFIGS))
def test_patching_everything_restores_the_clean_logits(name):
    model = build(name)
    clean, corrupt = tokens(), tokens(seed=1)
    first, last = Site(kind="resid_pre", layer=0), Site(kind="resid_post", layer=model.config.n_layers - 1)
    for sites in ([first], [last], [first, *head_sites(model, "z")]):
        with patched(model, sites, record(model, clean, sites)):
            assert torch.allclose(model(corrupt), model(clean, form=Form.PARALLEL), atol=1e-10)
    result = activation_patching(model, corrupt, clean, [first, last], lambda logits: logits[..., 0].mean())
    assert torch.allclose(result.recovered, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["linear", "mamba1", "mamba2", "hybrid"])
def test_all_taps_together_are_the_convolution(name):
    model = build(name)
    clean, corrupt = tokens(), tokens(seed=1)
    layer = next(n for n, b in enumerate(model.blocks) if hasattr(b.attn, "conv1d"))
    width = model.blocks[layer].attn.conv1d.weight.shape[-1]
    taps = [Site(kind="tap", layer=layer, lag=lag) for lag in range(width)]
    own, other = record(model, clean, taps), record(model, corrupt, taps)
    conv = Site(kind="conv", layer=layer)
    with patched(model, taps[:1], own):
        assert torch.allclose(model(clean), model(clean, form=Form.PARALLEL), atol=1e-10)
    # Taps are patched one at a time from the run's own input: the sum of their shares is checked before
    # SiLU's bend.
    effects = []
    for tap in taps:
        with patched(model, [tap], other):
            effects.append(model(clean))
    assert all((e - model(clean)).abs().max() > 1e-6 for e in effects)
    only_last = Site(kind="tap", layer=layer, lag=0, positions=(8,))
    with patched(model, [only_last], other):
        assert torch.allclose(model(clean)[:, :8], model(clean, form=Form.PARALLEL)[:, :8], atol=1e-10)
    assert checked(model, conv) is conv


@pytest.mark.parametrize("kind", ["linear", "mamba1", "mamba2"])
def test_the_state_carries_a_patch_to_later_tokens_and_not_to_earlier_ones(kind):
    model = build(kind)
    clean, corrupt = tokens(), tokens(seed=1)
    site = Site(kind="state", layer=0, positions=(4,))
    source = record(model, corrupt, [site])
    with patched(model, [site], source):
        whole = model(clean)
        state, steps = model.init_state(2), []
        for t in range(clean.shape[1]):
            logits, state = model.step(clean[:, t], state)
            steps.append(logits)
        drawn = model.generate(clean[:, :3], 6, temperature=0)
    plain = model(clean)
    change = (whole - plain).abs().amax((0, 2))
    assert change[:4].max() < 1e-10 and change[4:].min() > 1e-6
    assert torch.allclose(torch.stack(steps, 1), whole, atol=1e-10)
    assert drawn.shape == (2, 9)


@pytest.mark.parametrize("name", KINDS)
def test_swapping_every_layers_state_is_the_other_sequence(name):
    model = build(name)
    a, b = tokens(), tokens(seed=1)
    _, own = model.prefill(a)
    _, other = model.prefill(b)
    swapped = own
    for layer in range(model.config.n_layers):
        swapped = swapped_state(model, swapped, other, layer)
    new = torch.tensor([1, 2])
    assert torch.allclose(model.step(new, swapped)[0], model.step(new, other)[0], atol=1e-12)
    one = swapped_state(model, own, other, 0, head=0)
    changed = model.step(new, one)[0]
    assert (changed - model.step(new, own)[0]).abs().max() > 1e-8
    assert (changed - model.step(new, other)[0]).abs().max() > 1e-8


@pytest.mark.parametrize("name", list(CONFIGS))
def test_all_paths_together_are_the_full_patch(name):
    model = build(name)
    clean, corrupt = tokens(), tokens(seed=1)
    for sender, site in (
        (Sender(layer=0), Site(kind="mixer_out", layer=0)),
        (Sender(layer=0, head=1), Site(kind="result", layer=0, head=1)),
    ):
        with patched(model, [site], record(model, corrupt, [site])):
            full = model(clean)
        assert torch.allclose(patch_paths(model, clean, corrupt, sender), full, atol=1e-9)
        assert torch.allclose(patch_paths(model, clean, clean, sender), model(clean), atol=1e-9)
        assert torch.allclose(patch_paths(model, clean, corrupt, sender, []), model(clean), atol=1e-9)


def test_heads_and_parts_one_by_one_are_all_receivers():
    model = build("llama")
    clean, corrupt = tokens(), tokens(seed=1)
    sender = Sender(layer=0, head=2)
    by_head = [
        Receiver(kind=kind, layer=1, head=h) for kind, n in (("q", 4), ("k", 2), ("v", 2)) for h in range(n)
    ]
    others = [r for r in all_receivers(model, sender) if r.kind in ("mlp", "logits")]
    found = patch_paths(model, clean, corrupt, sender, by_head + others)
    assert torch.allclose(found, patch_paths(model, clean, corrupt, sender), atol=1e-9)
    through = patch_paths(model, clean, corrupt, sender, [Receiver(kind="k", layer=1)], through_mlps=True)
    assert (
        through - patch_paths(model, clean, corrupt, sender, [Receiver(kind="k", layer=1)])
    ).abs().max() > 1e-6


def test_path_patching_finds_the_wired_edge():
    model, circuit = constructed_model("softmax")
    probe = repeated_tokens(4, 20, 2, ids=candidates(32))
    clean = probe.tokens
    corrupt = repeated_tokens(4, 20, 2, ids=candidates(32), seed=9).tokens

    def loss(logits):
        return torch.nn.functional.cross_entropy(logits[:, 20:-1].flatten(0, 1), clean[:, 21:].flatten())

    senders = [Sender(layer=0, head=h) for h in range(4)]
    receivers = [Receiver(kind=k, layer=1, head=h) for k in "qkv" for h in range(4)]
    scores = path_patching_scores(model, clean, corrupt, senders, receivers, loss) - loss(model(clean))
    best = int(scores.argmax())
    assert senders[best // 12].head == circuit.previous_token[1]
    assert receivers[best % 12] == Receiver(kind="k", layer=1, head=circuit.unit)
    rest = scores.flatten().clone()
    rest[best] = 0
    assert scores.max() > 3 and rest.abs().max() < 1e-5


def test_nothing_stays_attached_after_an_exception():
    model = build("hybrid")
    hooks = _n_hooks(model)
    sites = [Site(kind="z", layer=1), Site(kind="tap", layer=0, lag=1)]
    source = record(model, tokens(), sites)
    with pytest.raises(RuntimeError, match="inside"), patched(model, sites, source):
        raise RuntimeError("inside")
    with pytest.raises(InterventionError, match="accepted: equal ones"), patched(model, sites, source):
        model(tokens(batch=3))
    assert _n_hooks(model) == hooks


@pytest.mark.parametrize(
    "site, error, said",
    [
        (Site(kind="z", layer=7), InterventionError, r"layer index 7 is out of range; accepted: 0..3"),
        (Site(kind="z", layer=1, head=5), InterventionError, r"head index 5 .* accepted: 0..1"),
        (Site(kind="k", layer=0, head=1), InterventionError, r"head index 1 .* accepted: 0..0"),
        (Site(kind="zz", layer=0), InterventionError, r"no kind of site 'zz'"),
        (Site(kind="state", layer=1), UnknownHook, "softmax attention, whose state is its cache"),
        (Site(kind="conv", layer=1), UnknownHook, "no hook point"),
        (Site(kind="tap", layer=0, lag=4), InterventionError, r"lag is 4; accepted: 0..3"),
        (Site(kind="z", layer=0, lag=1), InterventionError, "lag is 1"),
        (Site(kind="conv", layer=0, channels=(3, 99)), InterventionError, r"channels are \(3, 99\)"),
        (Site(kind="z", layer=0, positions=(-1,)), InterventionError, "position -1"),
        (Site(kind="z", layer=0, positions=()), InterventionError, "at least one"),
        (Site(kind="z", layer=0, positions=(1.5,)), InterventionError, "position 1.5 is no whole number"),
        (Site(kind="z", layer=1, head=True), InterventionError, "head True is no whole number"),
        (Site(kind="z", layer=1.0), InterventionError, r"layer 1.0 is no whole number; accepted: 0..3"),
        (Site(kind="tap", layer=0, lag=0.5), InterventionError, r"lag is 0.5; accepted: 0..3"),
        (Site(kind="conv", layer=0, channels=(0.5, 2)), InterventionError, r"channels are \(0.5, 2\)"),
    ],
)
def test_errors_name_the_value_and_what_is_accepted(site, error, said):
    with pytest.raises(error, match=said) as caught:
        record(build("hybrid"), tokens(), [site])
    assert "\n" not in str(caught.value)


def test_nothing_to_recover_is_nan():
    model, ids = build("softmax"), tokens()
    found = activation_patching(model, ids, ids, [Site(kind="z", layer=0)], torch.mean)
    assert found.recovered.isnan().all()
    assert "no share to recover" in found._repr_html_()


@pytest.mark.parametrize(
    "act",
    [
        lambda m, ids, sites: activation_patching(m, ids, ids, sites, lambda logits: None),
        lambda m, ids, sites: attribution_patching(m, ids, ids, sites, lambda logits: None),
        lambda m, ids, sites: path_patching_scores(
            m, ids, ids, [Sender(layer=0)], [Receiver(kind="logits")], lambda logits: None
        ),
    ],
)
def test_a_metric_gives_a_tensor(act):
    with pytest.raises(InterventionError, match="the metric gave None; accepted: a tensor"):
        act(build("softmax"), tokens(), [Site(kind="z", layer=0)])


def test_attribution_names_a_position_beyond_the_run():
    sites = [Site(kind="z", layer=0, positions=(99,))]
    with pytest.raises(InterventionError, match=r"position 99 is beyond the run's 9; accepted: 0..8"):
        attribution_patching(build("softmax"), tokens(), tokens(seed=1), sites, torch.mean)


def test_errors_of_forms_shapes_and_paths():
    model = build("hybrid")
    with pytest.raises(HookNotFired, match="it fires in: recurrent"):
        record(model, tokens(), [Site(kind="state", layer=0)], form="parallel")
    with pytest.raises(HookNotFired, match="it fires in: parallel"):
        record(model, tokens(), [Site(kind="pattern", layer=0)], form="chunked")
    with (
        pytest.raises(InterventionError, match="was not recorded"),
        patched(model, [Site(kind="z", layer=1)], record(model, tokens(), [Site(kind="z", layer=0)])),
    ):
        pass
    with pytest.raises(InterventionError, match=r"source_tokens have shape \[2, 8\]"):
        activation_patching(model, tokens(), tokens(seq=8), [Site(kind="z", layer=0)], torch.mean)
    with pytest.raises(InterventionError, match="does not come after"):
        patch_paths(model, tokens(), tokens(), Sender(layer=2), [Receiver(kind="q", layer=1)])
    with pytest.raises(InterventionError, match="has no part 'gate'"):
        patch_paths(model, tokens(), tokens(), Sender(layer=0), [Receiver(kind="gate", layer=1)])
    with pytest.raises(InterventionError, match="as many as the other, 9"):
        swapped_state(model, model.prefill(tokens())[1], model.init_state(2), 0)
