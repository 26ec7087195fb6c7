"""The kernel benchmark where no GPU is needed: floors by hand, layouts, references, the peers' sums."""

import dataclasses
import sys
import types

import pytest
import torch

pytest.importorskip("triton")

from experiments.benchmarks.kernels import (  # noqa: E402
    floors,  # noqa: E402
    peers,
    read_peers,
    tuning,
)
from experiments.benchmarks.kernels.contests import Contest, contests  # noqa: E402
from experiments.benchmarks.kernels.errors import entrant_errors, error_text  # noqa: E402
from experiments.benchmarks.kernels.peers import (  # noqa: E402
    CHANNEL_LAST,
    HEADS_FIRST,
    SCAN,
    Entrant,
    Layout,
)

SHAPES = {"S": (2, 4, 12, 16), "M": (2, 12, 16, 4)}
OPERATORS = ("softmax", "linear", "scan", "conv")
CONTESTS = ("softmax", "softmax, window 256", "linear", "linear, normalised", "scalar decay", "SSD",
            "SSD, 128 states", "scan", "conv")  # fmt: skip


@pytest.fixture
def small() -> dict[str, Contest]:
    return {c.operator: c for c in contests(OPERATORS, False, SHAPES, "cpu")}


def test_every_contest_has_ours_names_and_a_reference_of_its_inputs(small):
    assert tuple(small) == CONTESTS
    for contest in small.values():
        assert next(iter(contest.entrants)) == "ours"
        assert len(contest.names) == len(contest.inputs)
        o = contest.reference(*(x.double() for x in contest.inputs))
        assert o.dtype == torch.float64
        # The output is of the shape of v (attention), x (SSD, convolution) or u (scan).
        like = contest.inputs[2 if contest.names[0] == "q" else 0]
        assert o.shape == like.shape
        forward, both = contest.work
        assert 0 < forward.bytes < both.bytes
        assert forward.flops <= both.flops and forward.exps <= both.exps


@pytest.mark.parametrize(
    "operator, layout", [("softmax", HEADS_FIRST), ("scan", SCAN), ("conv", CHANNEL_LAST)]
)
def test_layouts_come_back_and_errors_are_measured_in_them(small, operator, layout):
    contest = small[operator]
    wide = [x.double() for x in contest.inputs]
    for x, again in zip(wide, layout.back(layout.own(wide)), strict=True):
        torch.testing.assert_close(again, x)

    def in_float32(*own: torch.Tensor) -> torch.Tensor:
        o = contest.reference(*layout.back([x.float() for x in own]))
        # All three layouts have the sequence elsewhere in the output.
        return o.transpose(1, 2)

    entrants = {"peer": Entrant(run=in_float32, layout=layout)}
    single = [x.float() for x in contest.inputs]
    errors = entrant_errors(dataclasses.replace(contest, entrants=entrants, inputs=single), "peer")
    assert list(errors) == ["o", *(f"d{name}" for name in contest.names)]
    assert max(errors.values()) < 2e-6


def test_an_error_is_seen(small):
    contest = small["softmax"]

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 1.01 * contest.reference(q, k, v)

    single = [x.float() for x in contest.inputs]
    entrants = {"peer": Entrant(run=wrong, layout=Layout())}
    errors = entrant_errors(dataclasses.replace(contest, entrants=entrants, inputs=single), "peer")
    assert errors["o"] == pytest.approx(0.01, rel=1e-3)
    assert error_text(errors) == "**10**: o 10 dq 10 dk 10 dv 10"


def test_floors_by_hand():
    # S1: 8 x 8 x 2048 x 2049 / 2 pairs, 128 flops a product; a tensor is 16.8 MB.
    forward, both = floors.softmax_work(8, 8, 2048, 64)
    assert forward == floors.Work(bytes=67_108_864, flops=34_376_515_584, exps=134_283_264)
    assert both == floors.Work(bytes=201_326_592, flops=120_317_804_544, exps=268_566_528)
    # A window of 3 over 5 tokens: 1 + 2 + 3 + 3 + 3 pairs.
    assert floors.softmax_work(1, 1, 5, 2, window=3)[0].exps == 12
    forward, both = floors.linear_work(2, 3, 5, 4, decay=True)
    assert forward == floors.Work(bytes=4 * 240 + 120, flops=2 * 960)
    assert both == floors.Work(bytes=11 * 240 + 360, flops=7 * 960)
    forward, both = floors.ssd_work(2, 3, 5, 4, 8)
    assert forward == floors.Work(bytes=2 * 240 + 2 * 160 + 120, flops=2 * 1920)
    assert both == floors.Work(bytes=5 * 240 + 6 * 160 + 360, flops=7 * 1920)
    forward, both = floors.scan_work(2, 5, 3, 4)
    assert forward == floors.Work(bytes=4 * 60 + 2 * 80, exps=120)
    assert both == floors.Work(bytes=11 * 60 + 6 * 80, exps=240)
    assert floors.conv_work(2, 5, 3) == (floors.Work(bytes=120), floors.Work(bytes=300))


def test_the_floor_is_the_largest_of_three():
    ceilings = floors.Ceilings(copy=4e12, matmul=8e14, exp2=4e12)
    assert ceilings.floor(floors.Work(bytes=4e6, flops=8e8, exps=8e6)) == 2.0
    assert ceilings.floor(floors.Work(bytes=4e7, flops=8e8, exps=8e6)) == 10.0
    assert ceilings.floor(floors.Work(bytes=4e6, flops=8e10, exps=8e6)) == 100.0


def test_a_peer_that_is_not_here_is_one_printed_line(capsys):
    peers.imported.cache_clear()
    assert peers.imported("no_such_peer") is None
    assert peers.imported("no_such_peer") is None
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "no_such_peer" in printed


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_matching_sums_of_the_peers_agree():
    torch.manual_seed(0)
    q, k = (torch.randn(1, 40, 2, 16) for _ in range(2))
    tokens = torch.randint(0, 5, (1, 40))
    source = torch.cat([torch.full_like(tokens[:, :1], -1), tokens[:, :-1]], 1)
    flex = read_peers.flex_matches(q, k, tokens, source, compiled=False)()
    pattern = read_peers.from_pattern(q, k, tokens, source)
    torch.testing.assert_close(flex, pattern, rtol=1e-4, atol=1e-6)
    assert pattern.max() > 0.5


def test_shortened_tuning_keeps_the_nearest_configurations_and_the_smallest(monkeypatch):
    import triton

    sizes = ((16, 1, 1), (128, 8, 4), (64, 4, 2), (256, 8, 5), (64, 8, 3))
    configs = [triton.Config({"BLOCK": b}, num_warps=w, num_stages=s) for b, w, s in sizes]
    tuned = triton.autotune(configs=configs, key=[])(triton.jit(_copy_kernel))
    module = types.ModuleType("fla.tuned")
    module.kernel = module.again = triton.heuristics({})(tuned)
    module.size = 64
    monkeypatch.setitem(sys.modules, "fla.tuned", module)
    assert tuned in list(tuning.tuners())
    assert sum(found is tuned for found in tuning.tuners()) == 1
    tuning.set_tuning("full")
    assert tuned.configs == configs and tuned._do_bench is None
    tuning.set_tuning("quick")
    assert tuned.configs == configs and tuned._do_bench.keywords == {"warmup": 5, "rep": 20}
    tuning.set_tuning("short")
    # Two near 64 with 4 warps, and the smallest; again changes nothing.
    assert tuned.configs == [configs[2], configs[4], configs[0]]
    tuning.set_tuning("short")
    assert tuned.configs == [configs[2], configs[4], configs[0]]


def test_every_candidate_is_compiled_by_some_process_and_none_alone():
    import triton

    for count in (1, 2, 5, 11, 48):
        configs = [triton.Config({"BLOCK": 16 * (i + 1)}) for i in range(count)]
        slices = [tuning.sliced_configs(configs[::-1], part, 14) for part in range(14)]
        assert {c.kwargs["BLOCK"] for found in slices for c in found} == {c.kwargs["BLOCK"] for c in configs}
        assert min(len(found) for found in slices) >= min(count, 2)


def _copy_kernel(x_ptr, y_ptr, BLOCK):
    pass
