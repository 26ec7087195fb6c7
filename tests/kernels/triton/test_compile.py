"""Kernels compile for GPUs that are not here, without spilling registers and within their shared memory."""

import pytest
import torch

pytest.importorskip("triton")

from kernels_compile_only import SHARED_LIMIT, Usage, compile_only

from kernels.triton import (
    causal_conv,
    decode,
    decode_attention,
    edges,
    gated_linear_attention,
    linear_attention_launch,
    selective_scan,
    softmax_attention,
)

# Kernels that may spill, with the bytes of stack allowed: pattern, decays, state and outputs of a chunk are
# live at once.
# The scan holds five states for each of its channels at once.
SPILLS = {"_linear_output_kernel": 160, "_scan_bwd_kernel": 16}


def start_all(monkeypatch) -> None:
    """Call every launcher at the width of the benchmark's shapes; nothing runs."""
    for module in (linear_attention_launch, selective_scan, decode_attention):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    q = torch.empty(1, 4096, 2, 64, dtype=torch.bfloat16)
    o, lse = softmax_attention._forward(q, q, q, None, 0.1, 0)
    softmax_attention._backward(q, None, q, q, q, o, lse, None, 0.1, 0)
    g = torch.empty(1, 4096, 2)
    found = gated_linear_attention._forward(q, q, q, g, g, None, None, None, 1.0, False, 0.0)
    gated_linear_attention._backward(q, None, None, q, q, q, g, g, None, None, None, *found, 1.0, False)
    u, b, a = q[:, :, 0], torch.empty(1, 4096, 16, dtype=torch.bfloat16), torch.empty(64, 16)
    _, _, kept, total = selective_scan._forward(u, u, a, b, b, None, u, None, True)
    selective_scan._backward(u, None, u, u, a, b, b, None, u, kept, total)
    weight, bias = torch.empty(64, 4), torch.empty(64)
    causal_conv._forward(u, weight, bias, None, True)
    causal_conv._backward(u, None, u, weight, bias, None, True)
    tokens = torch.zeros(1, 4096, dtype=torch.int32)
    edges._softmax_matches(q, q, None, tokens, tokens, 0.1, 0)
    decode._linear_step(q[0, :8], q[0, :8], q[0, :8], None, None, torch.empty(8, 2, 64, 64), None, 1.0, False,
        0.0)
    decode._scan_step(u[0], u[0], a, b[0], b[0], None, None, torch.empty(4096, 64, 16))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spills(capability, monkeypatch):
    with compile_only(capability) as found:
        start_all(monkeypatch)
    assert len({u.kernel for u in found}) >= 14
    over = [u for u in found if u.stack > SPILLS.get(u.kernel, 0) or u.shared > SHARED_LIMIT[capability]]
    assert over == [], over


def test_the_gate_sees_a_spill():
    """Negative control: a tile far too large for its warps has a stack."""
    from kernels.triton import config_table

    config_table.overrides["attention_fwd", 64, 2] = config_table.Config(block_m=128, block_n=64, warps=1,
        stages=1)
    try:
        with compile_only(80) as found:
            q = torch.empty(1, 4096, 2, 64, dtype=torch.bfloat16)
            softmax_attention._forward(q, q, q, None, 0.1, 0)
    finally:
        config_table.overrides.clear()
    assert isinstance(found[0], Usage) and found[0].stack > 0
