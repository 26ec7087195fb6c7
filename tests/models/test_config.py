"""Configurations: exact round trip, and refusals that say what is accepted."""

import dataclasses
import json

import language_models
import pytest

from models import ConfigError, LanguageModelConfig, RopeConfig, SoftmaxAttentionConfig
from models.config import MIXER_CONFIGS, Mamba2Config, mixer_config
from models.errors import out_of_memory
from models.form import Form


@pytest.mark.parametrize("name", language_models.CONFIGS)
def test_round_trip_through_json_is_exact(name):
    config = language_models.CONFIGS[name]
    again = LanguageModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.fingerprint() == config.fingerprint()
    assert again.to_dict() == config.to_dict()


def test_fingerprint_tells_models_apart():
    a = language_models.CONFIGS["softmax"]
    assert a.replace(seed=a.seed + 1).fingerprint() != a.fingerprint()


def test_configs_are_frozen_and_keyword_only():
    config = SoftmaxAttentionConfig(n_heads=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_heads = 3
    with pytest.raises(TypeError):
        SoftmaxAttentionConfig(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layrs": 2}, "no key 'n_layrs'; did you mean n_layers?"),
        ({"n_layers": 3}, "mixers has 2 entries"),
        ({"norm": "rmsnorm"}, "'rmsnorm'; accepted: 'rms', 'layer', 'none'"),
        ({"d_model": "16"}, "d_model is '16'; accepted: int"),
        ({"d_model": True}, "d_model is True; accepted: int"),
        ({"d_vocab": 0}, "d_vocab is 0; accepted: a positive number"),
        ({"norm_eps": float("nan")}, "norm_eps is nan; accepted: a finite number"),
        ({"positions": "none"}, "rope"),
        ({"norm_bias": True}, "norm_bias is True"),
        ({"parallel_residual": True}, "without an MLP"),
        ({"residual_in_fp32": True, "norm": "none"}, "False without norm"),
        ({"bos": 13}, "bos is 13; accepted: None or 0..12"),
        ({"mixers": [{"kind": "mamba3"}] * 2}, "'mamba3'; accepted: softmax, linear, mamba1, mamba2"),
        ({"mixers": [{"kind": "softmax", "n_heads": 3}] * 2}, "16 does not divide into 3"),
        ({"mixers": [{"kind": "softmax"}] * 2}, "needs the key 'n_heads'"),
        ({"rope": {"base": 10000.0, "layuot": "half"}}, "no key 'layuot'; did you mean layout?"),
        ({"rope": {"scaling": {"type": "yarn", "factor": 2}}}, "needs the key 'original_length'"),
        ({"rope": {"scaling": {"type": "ntk"}}}, "type 'ntk'; accepted: linear"),
        ({"rope": {"scaling": {"type": ["yarn"]}}}, "type ['yarn']; accepted: linear"),
        ({"d_model": 10**20}, "d_model is 100000000000000000000; accepted: a positive number up to"),
        ({"norm_eps": 10**400}, "accepted: a finite number"),
        ({"norm_eps": -1e-5}, "norm_eps is -1e-05; accepted: a number of at least 0"),
        ({"init_std": -0.02}, "init_std is -0.02; accepted: a number of at least 0"),
        ({"out_init_scale": -1.0}, "out_init_scale is -1.0; accepted: None or a number of at least 0"),
        ({"mixers": [{"kind": ["softmax"]}] * 2}, "a mixer has kind ['softmax']; accepted: softmax"),
        ({"mixers": [{"kind": "softmax", "n_heads": 2, "window": 1.5}] * 2}, "window is 1.5; accepted: int"),
        ({"mixers": [{"kind": "softmax", "n_heads": 2, "window": True}] * 2}, "window is True; accepted"),
        ({"mixers": [{"kind": "softmax", "n_heads": 2, "window": 0}] * 2}, "window is 0; accepted"),
        ({"mixers": [{"kind": "softmax", "n_heads": 2, "scale": float("nan")}] * 2}, "a finite number"),
        ({"mixers": [{"kind": "mamba2", "norm_eps": -1.0}] * 2}, "norm_eps is -1.0; accepted: a number"),
        ({"mixers": [{"kind": "mamba1", "d_state": 2**60}] * 2}, "d_state is 1152921504606846976; accepted"),
        ({"mixers": [{"kind": "softmax", "n_heads": 2**40, "d_head": 2**40}] * 2}, "n_heads * d_head is"),
        ({"mixers": [{"kind": "mamba2", "n_groups": 2**40, "d_state": 2**40}] * 2}, "n_groups * d_state is"),
    ],
)
def test_what_is_refused_is_named(change, message):
    values = language_models.CONFIGS["softmax"].to_dict() | change
    with pytest.raises(ConfigError) as error:
        LanguageModelConfig.from_dict(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


LINEAR = {"type": "linear"}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_length": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_length": 16}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        *[
            (LINEAR | {"factor": bad}, f"factor = {bad!r}; accepted: a finite number above 0")
            for bad in (0, -2.0, float("nan"), float("inf"), "8", True, None)
        ],
        (LLAMA3 | {"low_freq_factor": 5.0}, "low_freq_factor = 5.0; accepted: a number below"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "below high_freq_factor = 1.0"),
        (YARN | {"beta_fast": 0.5}, "beta_slow = 1.0; accepted: a number below beta_fast = 0.5"),
        (YARN | {"beta_slow": 0}, "beta_slow = 0; accepted: a finite number above 0"),
        (YARN | {"attention_factor": -1.0}, "attention_factor = -1.0"),
        (YARN | {"truncate": 1}, "truncate = 1; accepted: true or false"),
        *[
            (YARN | {"original_length": bad}, f"original_length = {bad!r}; accepted: a positive whole number")
            for bad in (0, -4, 1.5, "64", True)
        ],
        (LINEAR | {"factor": 2.0, 3: 4}, "has no key 3"),
    ],
)
def test_values_of_rope_scaling_are_checked(scaling, message):
    with pytest.raises(ConfigError) as error:
        RopeConfig(scaling=scaling)
    assert message in str(error.value)


def test_a_mixer_needs_a_dictionary():
    with pytest.raises(ConfigError, match="a mixer needs a dictionary, not list"):
        mixer_config([1])


def test_resolved_fills_in_default_widths():
    resolved = Mamba2Config().resolved(96)
    assert (resolved.d_inner, resolved.d_head, resolved.n_heads) == (192, 64, 3)
    assert mixer_config({"kind": "mamba1"}).resolved(40).dt_rank == 3
    with pytest.raises(ConfigError, match="3 \\* 64 is not 100"):
        Mamba2Config(d_inner=100, d_head=64, n_heads=3).resolved(32)


def test_every_kind_round_trips_on_its_own():
    for kind in MIXER_CONFIGS:
        values = {"kind": kind} | ({"n_heads": 2} if kind in ("softmax", "linear") else {})
        assert mixer_config(mixer_config(values).to_dict()) == mixer_config(values)


def test_rope_scaling_is_kept_as_given():
    scaling = {"type": "yarn", "factor": 4.0, "original_length": 16, "ramp": "rotations"}
    assert RopeConfig.from_dict(RopeConfig(scaling=scaling).to_dict()).scaling == scaling


def test_sizes_that_overflow_are_out_of_memory():
    error = RuntimeError("Storage size calculation overflowed with sizes=[3458764513820540928, 64]")
    assert out_of_memory(error).startswith("out of memory, a smaller model")
    assert out_of_memory(RuntimeError("something else")) is None


def test_form_by_name():
    assert Form.of("parallel") is Form.PARALLEL
    with pytest.raises(ConfigError, match="'paralel'; accepted: parallel, chunked, recurrent"):
        Form.of("paralel")
