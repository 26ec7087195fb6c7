"""Readings are exact: all contributions and the constant sum to the mixer's output, in every unit."""

import pytest
import torch
from mixer_configs import D_MODEL, MIXER_CONFIGS, build, inputs

from models.config import Mamba1Config, Mamba2Config
from models.form import Form
from models.mixers import MIXERS
from models.mixers import reading as reading_module

NAMES = list(MIXER_CONFIGS)
SEQ = 17
TOLERANCE = 1e-10
MAMBA1_UNITS = ["layer", "state", "cluster:3"]


def readings(name: str, x: torch.Tensor):
    """Every reading of a mixer in every unit."""
    mixer = build(name)
    units = MAMBA1_UNITS if mixer.kind == "mamba1" else ["head"]
    return mixer, [mixer.read(x, r, units=u) for r in mixer.readings for u in units]


def all_edges(batch: int, seq: int):
    b, i, j = torch.meshgrid(torch.arange(batch), torch.arange(seq), torch.arange(seq), indexing="ij")
    return b.flatten(), i.flatten(), j.flatten()


@pytest.mark.parametrize("seq", [1, 2, SEQ])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_contributions_sum_to_the_output(name, seq):
    x = inputs(seq)
    mixer, every = readings(name, x)
    output = mixer(x, Form.RECURRENT)
    for reading in every:
        total = torch.einsum("bijus,usd->bid", reading.rows(0, seq), reading.W_out) + reading.constant
        assert (total - output).abs().max() < TOLERANCE, (reading.name, reading.unit)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_edges_are_the_rows(name):
    x = inputs(SEQ)
    for reading in readings(name, x)[1]:
        rows = reading.rows(0, SEQ)
        batch, dest, src = all_edges(2, SEQ)
        edges = reading.edges(batch, dest, src)
        assert edges.shape == (2 * SEQ * SEQ, reading.n_units, reading.W_out.shape[1])
        assert (edges - rows[batch, dest, src]).abs().max() < TOLERANCE
        # Blocks of rows are rows.
        assert (reading.rows(5, 9) - rows[:, 5:9]).abs().max() < TOLERANCE
        assert rows.permute(0, 3, 4, 1, 2).triu(1).abs().max() == 0
        contribution = reading.contribution(batch, dest, src)
        assert (contribution - torch.einsum("nus,usd->nud", edges, reading.W_out)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_weights_have_the_normalisation_they_state(name):
    x = inputs(SEQ)
    mixer, every = readings(name, x)
    for reading in every:
        weights = reading.weights()
        assert weights.shape == (2, reading.n_units, SEQ, SEQ)
        if reading.normalisation == "contribution":
            c = torch.einsum("bijus,usd->bijud", reading.rows(0, SEQ), reading.W_out)
            size = c.norm(dim=-1).permute(0, 3, 1, 2)
            expected = size / size.sum(-1, keepdim=True).clamp_min(1e-300)
        elif reading.normalisation == "abs_row":
            size = mixer.implied_attention(x).abs()
            expected = size / size.sum(-1, keepdim=True)
        else:
            expected = mixer.implied_attention(x)
        assert (weights - expected).abs().max() < 1e-9, (reading.name, reading.unit)
        assert (reading.weights(slice(4, 11)) - weights[:, :, 4:11]).abs().max() < 1e-12
        batch, dest, src = all_edges(2, SEQ)
        assert (reading.edge_weights(batch, dest, src) - weights[batch, :, dest, src]).abs().max() < 1e-9


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_normalisations_are_those_of_the_mixer(name):
    mixer = build(name)
    first = mixer.read(inputs(3)).normalisation
    expected = {"softmax": "none", "linear": "none", "mamba1": "contribution", "mamba2": "abs_row"}[
        mixer.kind
    ]
    assert first == ("abs_row" if name == "linear_raw" else expected)
    if "block" in mixer.readings:
        block = mixer.read(inputs(3), "block")
        assert block.normalisation == "contribution" and block.pattern is None
    has_scalar = mixer.kind != "mamba1"
    assert (mixer.read(inputs(3)).pattern is not None) == has_scalar
    if has_scalar:
        assert torch.equal(mixer.read(inputs(3)).pattern, mixer.implied_attention(inputs(3)))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_small_row_blocks_change_nothing(name, monkeypatch):
    x = inputs(SEQ)
    before = [reading.weights() for reading in readings(name, x)[1]]
    monkeypatch.setattr(reading_module, "BLOCK_BYTES", 1)
    every = readings(name, x)[1]
    assert max(b - a for a, b in every[0].row_blocks(0, SEQ)) == every[0].entries.least_rows
    for reading, weights in zip(every, before, strict=True):
        assert (reading.weights() - weights).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_cut_equals_the_pattern_with_those_entries_zeroed(name):
    """For readings whose sources are the values: cutting at hook_z is zeroing entries of hook_pattern."""
    x = inputs(SEQ)
    mixer = build(name)
    batch = torch.tensor([0, 0, 1, 1])
    dest, src = torch.tensor([5, 16, 9, 9]), torch.tensor([2, 0, 8, 3])

    def zero(pattern, hook):
        pattern = pattern.clone()
        pattern[batch, :, dest, src] = 0
        return pattern

    mixer.hook_pattern.add_hook(zero)
    expected = mixer(x, Form.PARALLEL)
    mixer.hook_pattern.remove_hooks()
    reading = mixer.read(x, mixer.readings[0])
    mixer.hook_z.add_hook(lambda z, hook: reading.cut(z, batch, dest, src))
    for form in Form:
        assert (mixer(x, form) - expected).abs().max() < TOLERANCE
    mixer.hook_z.remove_hooks()
    assert (mixer(x) - expected).abs().max() > 1e-5


@pytest.mark.parametrize("name", [n for n in NAMES if "conv" in n or "mamba" in n])
@torch.no_grad()
def test_cutting_every_block_edge_of_a_source_removes_its_value_path(name):
    """Equal to recomputing the scan with that source's convolution input zeroed, everything else frozen."""
    x = inputs(SEQ)
    mixer = build(name)
    reading = mixer.read(x, "block")
    at = 4
    dest = torch.arange(SEQ).repeat(2)
    batch = torch.arange(2).repeat_interleave(SEQ)
    edges = (batch, dest, torch.full_like(dest, at))
    z = {}
    mixer.hook_z.add_hook(lambda t, hook: z.setdefault("whole", t))
    mixer(x)
    mixer.hook_z.remove_hooks()
    expected = _z_without_source(mixer, x, at)
    assert (reading.cut(z["whole"], *edges) - expected).abs().max() < TOLERANCE
    assert (z["whole"] - expected).abs().max() > 1e-3


def _z_without_source(mixer, x, at):
    """hook_z when position `at` puts nothing into the values, gates of SiLU frozen: by the value hook."""
    projected = mixer.in_proj(x)
    if mixer.kind in ("softmax", "linear"):
        width = mixer._widths[2]
        inner, weight = projected[..., -width:], mixer.conv1d.weight[-width:, 0]
        slope = torch.ones_like(inner)
    else:
        start = 0 if mixer.kind == "mamba1" else mixer.d_inner
        inner = projected[..., start : start + mixer.d_inner]
        weight = mixer.conv1d.weight[: mixer.d_inner, 0]
        slope = torch.sigmoid(mixer._parts(x).pre)
    removed = torch.zeros_like(inner)
    for lag in range(weight.shape[1]):
        removed[:, at + lag] = slope[:, at + lag] * weight[:, -1 - lag] * inner[:, at]
    z = {}
    mixer.hook_v.add_hook(lambda v, hook: v - removed.view_as(v))
    mixer.hook_z.add_hook(lambda t, hook: z.setdefault("cut", t))
    mixer(x)
    mixer.hook_v.remove_hooks()
    mixer.hook_z.remove_hooks()
    return z["cut"]


@torch.no_grad()
def test_cut_of_one_unit_leaves_the_others():
    x = inputs(SEQ)
    mixer = build("mamba2")
    reading = mixer.read(x)
    z = torch.zeros(2, SEQ, 4, 4, dtype=torch.float64)
    edge = (torch.tensor([1]), torch.tensor([9]), torch.tensor([3]))
    cut = reading.cut(z, *edge, units=[2])
    assert (cut[1, 9, 2] + reading.z_edges(*edge)[0, 2]).abs().max() < 1e-12
    cut[1, 9, 2] = 0
    assert cut.abs().max() == 0 and z.abs().max() == 0


@torch.no_grad()
def test_units_of_mamba1_partition_the_layer():
    x = inputs(SEQ)
    mixer = build("mamba1")
    layer = mixer.read(x)
    states = mixer.read(x, units="state")
    clusters = mixer.read(x, units="cluster:3")
    assert (layer.n_units, states.n_units, clusters.n_units) == (1, 3, 3)
    channels = clusters.z_index[clusters.z_index >= 0]
    assert sorted(channels.tolist()) == list(range(10))
    assert torch.equal(clusters.z_index, mixer.read(x, units="cluster:3").z_index)
    # Off the diagonal the skip plays no part: the states' edges sum to the layer's.
    batch, dest, src = (t[all_edges(2, SEQ)[1] != all_edges(2, SEQ)[2]] for t in all_edges(2, SEQ))
    difference = states.edges(batch, dest, src).sum(1) - layer.edges(batch, dest, src)[:, 0]
    assert difference.abs().max() < TOLERANCE


@torch.no_grad()
def test_clusters_separate_channels_by_offset():
    """Half the channels forget within a token, half look far back: two clusters find the halves."""
    mixer = build("mamba1")
    mixer.A_log.fill_(-6.0)
    mixer.A_log[::2] = 5.0
    index = mixer.read(inputs(SEQ), units="cluster:2").z_index
    assert index.tolist() == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@torch.no_grad()
def test_reading_a_layer_makes_no_channel_by_time_by_time_tensor():
    """Peak of one tensor, seen by the allocator's own sizes: weights of 96 channels at 256 positions."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.size = max(self.size, out.untyped_storage().nbytes())
            return out

    seq, channels = 256, 96
    mixer = MIXERS["mamba1"](Mamba1Config(d_inner=channels, d_state=2), 16)
    mixer.reset_parameters(std=0.1, out_std=0.1, generator=torch.Generator().manual_seed(0))
    reading = mixer.read(torch.randn(1, seq, 16, generator=torch.Generator().manual_seed(1)))
    original, reading_module.BLOCK_BYTES = reading_module.BLOCK_BYTES, 2**20
    try:
        with Largest() as largest:
            reading.weights()
    finally:
        reading_module.BLOCK_BYTES = original
    assert largest.size <= 1.01 * 2**20 < 4 * channels * seq * seq


@pytest.mark.parametrize("name", ["softmax", "linear"])
@torch.no_grad()
def test_ov_factors_are_exact_without_a_convolution(name):
    mixer, x = build(name), inputs(1)
    factors = mixer.ov_factors(x)
    assert factors.approximation == "exact"
    moved = torch.einsum("btm,hmd,hdn->btn", x, factors.W_V, factors.W_O)
    bias = torch.einsum("hd,hdn->n", mixer.b_V, mixer.W_O) + mixer.b_O
    # At the first position all attention is on itself (but for linear attention's eps).
    assert (moved + bias - mixer(x)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@torch.no_grad()
def test_mean_gate_ov_is_exact_where_gate_and_slope_are_constant(kind):
    """On a constant input with one tap, and one decay for all channels, an edge is A[i,j] x W_V W_O."""
    config = {
        "mamba1": Mamba1Config(d_inner=6, d_state=1, d_conv=1, dt_rank=1),
        "mamba2": Mamba2Config(d_inner=6, d_head=3, d_state=2, d_conv=1, gated_norm=False),
    }[kind]
    mixer = MIXERS[kind](config, D_MODEL).double()
    mixer.reset_parameters(std=0.3, out_std=0.3, generator=torch.Generator().manual_seed(0))
    for weight in (mixer.in_proj.weight, mixer.out_proj.weight):
        weight.mul_(3)
    mixer.conv1d.bias.zero_()
    if kind == "mamba1":
        mixer.dt_proj.weight.zero_()
        mixer.dt_proj.bias.zero_()
    else:
        mixer.dt_bias.zero_()
    mixer.A_log.fill_(-2)
    x = inputs(1, batch=1).expand(1, 6, -1)
    factors = mixer.ov_factors(x)
    assert "mean gate" in factors.approximation
    moved = torch.einsum("m,umd,udn->un", x[0, 0], factors.W_V, factors.W_O)
    edge = (torch.tensor([0]), torch.tensor([5]), torch.tensor([2]))
    A = mixer.implied_attention(x)[0, :, 5, 2]
    A = A[:1] if kind == "mamba1" else A
    got = mixer.read(x, "block").contribution(*edge)[0]
    assert got.abs().max() > 1e-6
    assert (got - A[:, None] * moved).abs().max() < TOLERANCE
    # Negative control: an input that is not constant has no such product.
    other = mixer.read(inputs(6, batch=1), "block").contribution(*edge)[0]
    assert (other - A[:, None] * moved).abs().max() > 1e-6


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_output_follows_from_hook_z(name):
    x, mixer = inputs(SEQ), build(name)
    seen = []
    handle = mixer.hook_z.register_forward_hook(lambda _, args, out: seen.append(out))
    output = mixer(x)
    handle.remove()
    z = torch.cat([seen[0], 2 * seen[0]])
    once, twice = mixer.output_from_z(x, z).chunk(2)
    assert (once - output).abs().max() < TOLERANCE
    handle = mixer.hook_z.register_forward_hook(lambda _, args, out: 2 * out)
    assert (twice - mixer(x)).abs().max() < TOLERANCE
    handle.remove()
    assert (twice - once).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_all_readings_together_are_those_read_one_by_one(name):
    x, mixer = inputs(SEQ), build(name)
    every, factors = mixer.read_all(x)
    assert [reading.name for reading in every] == list(mixer.readings)
    for reading in every:
        assert torch.equal(reading.weights(), mixer.read(x, reading.name).weights())
    alone = mixer.ov_factors(x)
    assert torch.equal(factors.W_V, alone.W_V) and torch.equal(factors.W_O, alone.W_O)
    assert factors.approximation == alone.approximation
