"""Kernels compile for GPUs that are not here, without spilling registers and within their shared memory."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels_compile_only import SHARED_LIMIT, Usage, compile_only

from kernels.triton import (
    causal_conv,
    config_table,
    decode,
    decode_attention,
    gated_linear_attention,
    linear_attention_launch,
    linear_matches,
    packed_linear_attention,
    selective_scan,
    softmax_attention,
    softmax_matches,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Every width and dtype for the GPU of the benchmarks; the ends of the table, and the usual width, for the
# other two.
WIDTHS = [(90, BF16, w) for w in (16, 32, 64, 128, 256)] + [(90, F32, w) for w in (16, 32, 64, 128, 256)]
WIDTHS += [(90, F16, w) for w in (64, 256)]
WIDTHS += [(c, t, w) for c in (80, 100) for t in (BF16, F32) for w in (64, 256)] + [(80, BF16, 128)]
# Linear attention takes longest to compile: of widths with one entry in the table the widest alone, and of
# float16, whose entries are bfloat16's, the usual one.
LINEAR = [(c, t, w) for c, t, w in WIDTHS if w > {BF16: 16, F32: 32, F16: 0}[t] and (t, w) != (F16, 256)]
STATES = [(90, t, n) for t in (BF16, F32) for n in (4, 16, 32, 64, 128, 256)] + [(90, F16, 16)]
STATES += [(c, t, n) for c in (80, 100) for t in (BF16, F32) for n in (16, 256)]
# Kernels that may spill, with the bytes of stack allowed. Linear attention: pattern, decays, state and
# outputs of a chunk are live at once. Float32 at 256: the operands of three-term products of a whole row are
# held by every warp.
SPILLS = {"_linear_output_kernel": 320, "_linear_gradient_kernel": 320, "_linear_state_kernel": 64,
          "_linear_decay_gradient_kernel": 16}  # fmt: skip
# From 128 columns on, the gradient with decays spills more: states and weighted rows are two numbers each.
WIDE_HALF = SPILLS | {"_linear_gradient_kernel": 600}
WIDE_FLOAT32 = SPILLS | {
    "_linear_output_kernel": 10_000,
    "_linear_gradient_kernel": 10_000,
    "_attention_fwd_kernel": 200,
    "_attention_bwd_query_kernel": 180,
    "_attention_bwd_key_kernel": 250,
    "_match_kernel": 220,
    "_attention_step_kernel": 110,
}
# The scan's backward holds five states for each of its channels, and what the next ones read (152 bytes in
# float32 with 16 states on sm_90, elsewhere 72 and less); the outputs need 24 bytes on sm_100 alone.
SCAN_SPILLS = {"_scan_bwd_kernel": 152, "_scan_bwd_parameter_kernel": 16, "_scan_fwd_output_kernel": 24}


@pytest.fixture(autouse=True)
def many_processors(monkeypatch):
    """Sequences are cut into segments, as on a GPU."""
    for module in (linear_attention_launch, linear_matches, selective_scan, decode_attention):
        monkeypatch.setattr(module, "processors", lambda device: 132)


def attention(q: Tensor) -> None:
    """Softmax attention and its matching sums with and without a ragged last tile, its step."""
    for x in (q, q[:, 1:]):
        o, lse = softmax_attention._forward(x, x, x, None, 0.1, 0)
        softmax_attention._backward(x, None, x, x, x, o, lse, None, 0.1, 0)
        tokens = torch.zeros(x.shape[:2], dtype=torch.int32)
        softmax_matches._softmax_matches(x, x, None, tokens, tokens, 0.1, 0)
    decode_attention._softmax_step(q[:, 0], q, q, None, 0.1, 0)


def linear(q: Tensor) -> None:
    """Linear attention with shared keys, decays, weights and skip, and normalised; its step."""
    g, skip = torch.empty(q.shape[:3]), torch.empty(q.shape[2])
    b = q[:, :, :1]
    for kind in ((b, g, g, skip, False), (q, None, None, None, True)):
        k, *given, normalise = kind
        found = gated_linear_attention._forward(k, k, q, *given, None, None, 1.0, normalise, 0.0)
        gated_linear_attention._backward(q, None, None, k, k, q, *given, None, None, *found, 1.0, normalise)
    s = torch.empty(8, 2, q.shape[3], q.shape[3])
    decode._linear_step(q[0, :8], q[0, :8], q[0, :8], None, None, s, None, 1.0, False, 0.0)


def scan(u: Tensor, d_state: int) -> None:
    """The selective scan with its gate and skip, its step."""
    b, a = torch.empty(*u.shape[:2], d_state, dtype=u.dtype), torch.empty(u.shape[2], d_state)
    skip = torch.empty(u.shape[2])
    _, _, kept, total = selective_scan._forward(u, u, a, b, b, skip, u, None, True)
    selective_scan._backward(u, None, u, u, a, b, b, skip, u, kept, total)
    decode._scan_step(u[0], u[0], a, b[0], b[0], None, None, torch.empty(*u.shape[1:], d_state))


def allowed(dtype: torch.dtype, width: int) -> dict[str, int]:
    """Bytes of stack by kernel of attention.

    In half precision the keys' kernel is capped so that three or four programs fit a multiprocessor: measured
    faster with 16 bytes of stack than uncapped without.
    """
    if dtype == F32 and width == 256:
        return WIDE_FLOAT32
    wide = dtype != F32 and width >= 128
    return (WIDE_HALF if wide else SPILLS) | {"_attention_bwd_key_kernel": 16}


def over_limits(found: list[Usage], capability: int, allowed: dict[str, int]) -> list[Usage]:
    """Kernels beyond the shared memory of a GPU or the stack that is allowed."""
    limit = SHARED_LIMIT[capability]
    return [u for u in found if u.shared > limit or u.stack > allowed.get(u.kernel, 0)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "dtype", "width"), WIDTHS)
def test_attention_compiles_without_spills(capability, dtype, width):
    with compile_only(capability) as found:
        attention(torch.empty(1, 4096, 2, width, dtype=dtype))
    assert len({u.kernel for u in found}) == 7
    assert over_limits(found, capability, allowed(dtype, width)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "dtype", "width"), LINEAR)
def test_linear_attention_compiles_without_spills(capability, dtype, width):
    with compile_only(capability) as found:
        linear(torch.empty(1, 4096, 2, width, dtype=dtype))
    assert len({u.kernel for u in found}) >= 6
    assert over_limits(found, capability, allowed(dtype, width)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "width"), [(80, 64), (90, 64), (90, 21), (100, 64)])
def test_packed_linear_attention_compiles_without_spills(capability, width):
    qkv = torch.empty(1, 4096, 3 * 2 * width, dtype=BF16)
    with compile_only(capability) as found:
        kept = packed_linear_attention._forward(qkv, 2, True, 0.1)
        packed_linear_attention._backward(kept[0], None, None, qkv, *kept, True)
    kernels = {u.kernel for u in found}
    own = {"_packed_elu_plus_one_fwd_kernel", "_packed_elu_plus_one_bwd_kernel"}
    assert own < kernels and len(kernels) == 6
    assert over_limits(found, capability, SPILLS) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "width"),
    [(90, BF16, 64), (90, BF16, 256), (90, F32, 64), (90, F32, 128), (90, F32, 256), (80, F32, 256)],
)
def test_linear_matching_sums_compile_without_spills(capability, dtype, width):
    k, g = torch.empty(1, 4096, 2, width, dtype=dtype), torch.empty(1, 4096, 2)
    order, labels = (torch.empty(1, 8192, dtype=t) for t in (torch.int64, torch.int32))
    with compile_only(capability) as found:
        linear_matches._matches(k, k, g, linear_matches._elapsed(g), order, labels, 2, 1.0)
    assert {u.kernel for u in found} == {"_elapsed_kernel", "_match_state_kernel", "_match_output_kernel"}
    # With decays, blocks of 64 events spill and are faster than smaller ones all the same.
    spills = {"_match_output_kernel": 96} if dtype == BF16 and width == 64 else {}
    assert over_limits(found, capability, spills) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "dtype", "d_state"), STATES)
def test_the_scan_compiles_without_spills(capability, dtype, d_state):
    with compile_only(capability) as found:
        scan(torch.empty(1, 4096, 64, dtype=dtype), d_state)
    assert len({u.kernel for u in found}) == 9
    assert over_limits(found, capability, SCAN_SPILLS) == []


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_convolution_compiles_without_spills(capability, dtype):
    x, weight = torch.empty(1, 4096, 512, dtype=dtype), torch.empty(512, 4)
    with compile_only(capability) as found:
        causal_conv._forward(x, weight, weight[:, 0].contiguous(), None, True)
        causal_conv._backward(x, None, x, weight, weight[:, 0].contiguous(), None, True)
        decode._conv_step(x[:, 0], weight, None, x[:, :3], True)
    assert len({u.kernel for u in found}) == 4
    assert over_limits(found, capability, {}) == []


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("seq", [1, 100])
def test_the_convolution_of_short_sequences_compiles_without_spills(seq, width):
    """With states, and channels that do not fill a program; a length of 1 is a constant to the compiler."""
    x, weight, state = torch.empty(2, seq, 150), torch.empty(150, width), torch.empty(2, width - 1, 150)
    bias = weight[:, 0].contiguous()
    with compile_only(90) as found:
        causal_conv._forward(x, weight, bias, state, True)
        causal_conv._backward(x, state, x, weight, bias, state, True)
    assert len(found) == 3 and over_limits(found, 90, {}) == []


def test_the_gate_sees_a_spill():
    """Negative control: a tile far too large for its warps has a stack."""
    config_table.overrides["attention_fwd", 64, 2] = config_table.Config(block_m=128, block_n=64, warps=1,
        stages=1)
    try:
        with compile_only(80) as found:
            q = torch.empty(1, 4096, 2, 64, dtype=torch.bfloat16)
            softmax_attention._forward(q, q, q, None, 0.1, 0)
    finally:
        config_table.overrides.clear()
    assert isinstance(found[0], Usage) and found[0].stack > 0
