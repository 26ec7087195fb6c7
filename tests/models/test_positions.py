"""Rotary positions against the handed rotated queries and keys, and against Hugging Face's frequencies."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from models.config import RopeConfig
from models.errors import ConfigError
from models.positions import Rope, rope_frequencies, rotate

CASES = Path(__file__).parents[1] / "cases" / "mixers"
ROPE_CASES = sorted({*CASES.glob("softmax_*rope*.safetensors"), *CASES.glob("softmax_yarn*.safetensors")})


def config_of(flags: dict) -> RopeConfig:
    """The project's configuration of a case's `rope` flags."""
    scaling = None
    if flags["yarn"]:
        scaling = {"type": "yarn"} | {k: v for k, v in flags["yarn"].items() if v is not None}
        del scaling["attention_factor"]
    return RopeConfig(
        base=flags["base"], rotary_dim=flags["rotary_dim"], layout=flags["layout"], scaling=scaling
    )


@pytest.mark.parametrize("path", ROPE_CASES, ids=lambda p: p.stem)
def test_cases(path):
    with safe_open(path, "pt") as case:
        flags = json.loads(case.metadata()["flags"])["rope"]
        q, k = case.get_tensor("in.q"), case.get_tensor("in.k")
        rope = Rope(config_of(flags), q.shape[-1])
        for x, name in ((q, "q_rotated"), (k, "k_rotated")):
            expected = case.get_tensor(f"out.{name}")
            assert (rope(x, flags["position_offset"]) - expected).abs().max() <= 1e-10
            # Negative control: another offset is another rotation.
            assert (rope(x, flags["position_offset"] + 1) - expected).abs().max() > 1e-3
        if flags["yarn"]:
            assert rope.frequencies.factor == pytest.approx(flags["yarn"]["attention_factor"], abs=1e-12)


def test_all_rope_cases_are_there():
    assert len(ROPE_CASES) == 9


@pytest.mark.parametrize("layout", ["half", "adjacent"])
def test_scores_depend_on_the_distance_alone(layout):
    rope = Rope(RopeConfig(layout=layout, rotary_dim=6), 8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = (rope(q, 17) * rope(k, 5)).sum()
    assert (rope(q, 1017) * rope(k, 1005)).sum() == pytest.approx(float(score), abs=1e-11)
    assert abs((rope(q, 17) * rope(k, 6)).sum() - score) > 1e-3
    # Entries beyond rotary_dim pass unchanged.
    assert torch.equal(rope(q, 17)[..., 6:], q[..., 6:])


def test_known_rotation():
    """One pair at position p turns by p radians."""
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    turned = Rope(RopeConfig(), 2)(x, 3).flatten()
    assert turned.tolist() == pytest.approx([math.cos(3), math.sin(3)], abs=1e-14)


def test_a_piece_with_an_offset_is_a_piece_of_the_whole():
    rope = Rope(RopeConfig(), 4)
    x = torch.randn(1, 200, 2, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat((rope(x[:, :3]), rope(x[:, 3:], 3)), 1), rope(x))


SCALINGS = {
    "linear": ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (
        {"factor": 2.0, "original_length": 64},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        {"factor": 4.0, "original_length": 64, "beta_fast": 8.0, "beta_slow": 1.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_scalings_equal_hugging_face(kind):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = SCALINGS[kind]
    theirs = theirs | {"rope_theta": 10000.0}
    n_ctx = 64 if kind == "dynamic" else 256
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=n_ctx, rope_parameters=theirs
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=200)
    got = rope_frequencies(RopeConfig(scaling={"type": kind, **ours}), 16, n_ctx=200)
    assert torch.allclose(got.theta.float(), inv_freq.float(), rtol=1e-6)
    assert got.factor == pytest.approx(factor)
    plain = rope_frequencies(RopeConfig(), 16)
    assert (got.theta / plain.theta - 1).abs().max() > 0.1


def test_dynamic_scaling_leaves_short_contexts_alone():
    config = RopeConfig(scaling={"type": "dynamic", "factor": 2.0, "original_length": 64})
    assert torch.equal(rope_frequencies(config, 16, n_ctx=64).theta, rope_frequencies(RopeConfig(), 16).theta)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RopeConfig(rotary_dim=10), r"rotary_dim is 10; accepted: an even number from 2 to d_head = 8"),
        (
            RopeConfig(scaling={"type": "yarn", "factor": 2.0, "original_length": 64, "ramp": "steps"}),
            r"ramp is 'steps'; accepted: 'index', 'rotations'",
        ),
        (RopeConfig(scaling={"type": "dynamic", "factor": 2.0, "original_length": 64}), "needs n_ctx"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(ConfigError, match=message):
        rope_frequencies(config, 8)


def test_unknown_layout_is_refused():
    table = torch.ones(1, 1)
    with pytest.raises(ConfigError, match="layout is 'interleaved'"):
        rotate(torch.ones(1, 1, 1, 2), table, table, "interleaved")
