"""Mamba mixers against the handed block cases and against Hugging Face's modules with the same weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from models.config import Mamba1Config, Mamba2Config
from models.form import Form
from models.mixers import MIXERS
from models.mixers.mamba1 import Mamba1State

CASES = Path(__file__).parents[1] / "cases" / "mixers"
BLOCK_CASES = sorted(CASES.glob("mamba1_block*.safetensors"))
# The case files' names of our parameters.
PARAMETERS = {
    "in_proj.weight": "in_proj_weight",
    "conv1d.weight": "conv_weight",
    "conv1d.bias": "conv_bias",
    "x_proj.weight": "x_proj_weight",
    "dt_proj.weight": "dt_proj_weight",
    "dt_proj.bias": "dt_proj_bias",
    "A_log": "A_log",
    "D": "D",
    "out_proj.weight": "out_proj_weight",
}


def load(path: Path):
    """Mixer with the case's weights, its tensors and its flags."""
    with safe_open(path, "pt") as case:
        tensors = {name: case.get_tensor(name) for name in case.keys()}
        flags = json.loads(case.metadata()["flags"])
    channels, d_state = tensors["in.A_log"].shape
    config = Mamba1Config(d_inner=channels, d_state=d_state, d_conv=flags["width"], dt_rank=flags["dt_rank"])
    mixer = MIXERS["mamba1"](config, tensors["in.hidden"].shape[-1]).double()
    weights = {ours: tensors[f"in.{theirs}"] for ours, theirs in PARAMETERS.items()}
    weights["conv1d.weight"] = weights["conv1d.weight"].reshape(channels, 1, -1)
    mixer.load_state_dict(weights)
    return mixer, tensors, flags


def start_of(tensors) -> Mamba1State | None:
    if "in.conv_state0" not in tensors:
        return None
    return Mamba1State(ssm=tensors["in.ssm_state0"], conv=tensors["in.conv_state0"], length=0)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual - expected).abs().max().item() / max(1.0, expected.abs().max().item())


def test_block_cases_are_there():
    assert len(BLOCK_CASES) == 4


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("path", BLOCK_CASES, ids=lambda p: p.stem)
def test_block_case_outputs_states_and_gradients(path, form):
    mixer, tensors, flags = load(path)
    hidden = tensors["in.hidden"].requires_grad_()
    state = start_of(tensors)
    if state is not None:
        state.ssm.requires_grad_(), state.conv.requires_grad_()
    y, after = mixer.prefill(hidden, state, form)
    assert error(y, tensors["out.o"]) < 1e-10
    assert error(after.ssm, tensors["out.ssm_state"]) < 1e-10
    assert error(after.conv, tensors["out.conv_state"]) < 1e-10
    (y * tensors["cot.o"]).sum().backward()
    assert error(hidden.grad, tensors["grad.hidden"]) < 1e-10
    for ours, theirs in PARAMETERS.items():
        grad = dict(mixer.named_parameters())[ours].grad
        expected = tensors[f"grad.{theirs}"]
        grad = torch.zeros_like(expected) if grad is None else grad.reshape(expected.shape)
        assert error(grad, expected) < 1e-10, ours
    if state is not None:
        assert error(state.ssm.grad, tensors["grad.ssm_state0"]) < 1e-10
        assert error(state.conv.grad, tensors["grad.conv_state0"]) < 1e-10
    for cut in flags.get("cuts", []):
        _, middle = mixer.prefill(hidden[:, :cut], state, form)
        assert error(middle.ssm, tensors[f"split.{cut}.ssm_state"]) < 1e-10
        assert error(middle.conv, tensors[f"split.{cut}.conv_state"]) < 1e-10
        assert error(mixer.prefill(hidden[:, cut:], middle, form)[0], tensors["out.o"][:, cut:]) < 1e-10


@pytest.mark.parametrize("path", [p for p in BLOCK_CASES if "state" not in p.stem], ids=lambda p: p.stem)
@torch.no_grad()
def test_block_case_readings(path):
    """The block reading is the case's `block`, column by column, its constant the case's `block_bias`."""
    mixer, tensors, _ = load(path)
    hidden = tensors["in.hidden"]
    seq = hidden.shape[1]
    assert error(mixer.implied_attention(hidden), tensors["out.A"]) < 1e-10
    reading = mixer.read(hidden, "block")
    x = mixer.in_proj(hidden)[..., : mixer.d_inner]
    y = reading.rows(0, seq)[:, :, :, 0].permute(0, 3, 1, 2)
    expected = tensors["out.block"] * x.transpose(1, 2)[:, :, None]
    assert error(y, expected) < 1e-10
    constant = tensors["out.block_bias"] @ mixer.out_proj.weight.T
    assert error(reading.constant, constant) < 1e-10
    if "out.contribution" in tensors:
        batch, dest, src = torch.meshgrid(
            *(torch.arange(n) for n in (hidden.shape[0], seq, seq)), indexing="ij"
        )
        got = reading.contribution(batch.flatten(), dest.flatten(), src.flatten())[:, 0]
        assert error(got.view_as(tensors["out.contribution"]), tensors["out.contribution"]) < 1e-10


def copied(theirs: torch.nn.Module, ours: torch.nn.Module) -> torch.nn.Module:
    """Our mixer with their weights: every name and shape the same."""
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours


@pytest.mark.parametrize("use_bias", [False, True])
@torch.no_grad()
def test_parity_with_hugging_face_mamba(use_bias):
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    config = MambaConfig(
        hidden_size=24,
        state_size=5,
        conv_kernel=4,
        expand=2,
        time_step_rank=3,
        num_hidden_layers=1,
        use_bias=use_bias,
    )
    theirs = MambaMixer(config, 0).eval()
    ours = MIXERS["mamba1"](Mamba1Config(d_inner=48, d_state=5, dt_rank=3, proj_bias=use_bias), 24)
    copied(theirs, ours)
    x = torch.randn(2, 33, 24)
    expected = theirs(x)
    for form in Form:
        assert error(ours(x, form), expected) < 1e-5
    assert error(ours(x.roll(1, 1)), expected) > 1e-2


@pytest.mark.parametrize("n_groups", [1, 2])
@torch.no_grad()
def test_parity_with_hugging_face_mamba2(n_groups):
    from transformers import Mamba2Config as TheirConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    torch.manual_seed(0)
    their_config = TheirConfig(
        hidden_size=24, num_heads=4, head_dim=12, state_size=6, n_groups=n_groups, expand=2, conv_kernel=4,
        chunk_size=16, num_hidden_layers=1, use_bias=True,
    )  # fmt: skip
    theirs = Mamba2Mixer(their_config, 0).eval()
    torch.nn.init.normal_(theirs.norm.weight, 1, 0.2)
    config = Mamba2Config(
        d_inner=48,
        d_head=12,
        d_state=6,
        n_groups=n_groups,
        proj_bias=True,
        norm_eps=their_config.layer_norm_epsilon,
    )
    ours = copied(theirs, MIXERS["mamba2"](config, 24))
    x = torch.randn(2, 33, 24)
    expected = theirs(x)
    for form in Form:
        assert error(ours(x, form), expected) < 1e-5
    assert error(ours(x.roll(1, 1)), expected) > 1e-2
