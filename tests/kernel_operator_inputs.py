"""Arguments of every custom operator, small, for `torch.library.opcheck`."""

import importlib
from typing import Any

import torch

# Importing them registers their operators.
for _name in ("softmax_attention", "gated_linear_attention", "selective_scan", "causal_conv", "decode",
              "decode_attention", "edges", "rms_norm", "ssd_block", "linear_cross_entropy", "embedding",
              "packed_linear_attention", "packed_gated_silu"):  # fmt: skip
    importlib.import_module(f"kernels.triton.{_name}")

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def every_operator(device: str, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Operator to its arguments; outputs that backward operators take are those of the forward ones."""
    ops = torch.ops.beyond_softmax
    torch.manual_seed(0)

    def randn(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=of)

    q, u = randn(1, 70, 2, 16), torch.rand(1, 70, 8, device=device).to(dtype)
    g = -torch.rand(1, 70, 2, device=device)
    a, b, weight = randn(8, 4, of=torch.float32), randn(1, 70, 4), randn(8, 4)
    labels = torch.randint(0, 5, (1, 70), device=device, dtype=torch.int32)
    s = randn(1, 2, 16, 16, of=torch.float32)
    o, lse = ops.softmax_attention(q, q, q, None, 0.3, 0)
    found = ops.linear_attention(q, q, q, g, None, None, None, None, 1.0, False, 0.0)
    target, rows, classes = labels[0].long(), q[0, :, 0], randn(5, 16)
    _, pull = ops.linear_cross_entropy(rows, classes, None, target, True)
    qkv = q.flatten(2).repeat(1, 1, 3)
    kept_packed = ops.packed_linear_attention(qkv, 2, True, 0.1)
    _, _, kept, total = ops.selective_scan(u, u, a, b, b, None, u, None, True)
    # Two heads of 16, one group of 4 states: a gate of 32 columns, 40 channels, 2 steps.
    packed, rates, gain = randn(1, 70, 74), randn(2, of=torch.float32), randn(32, of=torch.float32)
    block = (packed, randn(40, 4, of=torch.float32), None, rates, rates, rates, gain)
    y, last, _, *saved = ops.ssd_block(*block, 1, 1e-5, dtype)
    wide = randn(70, 16, of=torch.float32)
    total_norm = ops.add_rms_norm(wide, packed[0, :, :16], gain[:16].contiguous(), 1e-5, dtype)
    return {
        "softmax_attention": (q, q, q, randn(2), 0.3, 9),
        "softmax_attention_backward": (q, None, q, q, q, o, lse, None, 0.3, 0),
        "linear_attention": (q, q, q, g, g.abs(), None, s, None, 1.0, False, 0.0),
        "linear_attention_backward": (
            q, None, None, q, q, q, g, None, None, None, None, *found, 1.0, False,
        ),
        "packed_linear_attention": (qkv, 2, True, 0.1),
        "packed_linear_attention_backward": (q, None, None, qkv, *kept_packed, True),
        "packed_gated_silu": (u[0],),
        "packed_gated_silu_backward": (u[0, :, :4], u[0]),
        "selective_scan": (u, u, a, b, b, None, u, None, True),
        "selective_scan_backward": (u, None, u, u, a, b, b, None, u, kept, total),
        "causal_conv": (u, weight, weight[:, 0].contiguous(), None, True),
        "causal_conv_backward": (u, None, u, weight, None, None, True),
        "embedding": (target, wide),
        "embedding_backward": (wide, target, 5),
        "add_rms_norm": (wide, packed[0, :, :16], gain[:16].contiguous(), 1e-5, dtype),
        "add_rms_norm_backward": (
            total_norm[1], wide, total_norm[0], gain[:16].contiguous(), total_norm[2], torch.float32, dtype,
        ),
        "ssd_block": (*block, 1, 1e-5, dtype),
        "ssd_block_backward": (y, None, None, *block, last, *saved, 1),
        "linear_cross_entropy": (rows, classes, classes[:, 0].contiguous(), target, True),
        "linear_cross_entropy_backward": (g[0, :, 0], rows, classes, None, pull, True, True, False),
        "linear_step": (q[:, 0], q[:, 0], q[:, 0], g[:, 0], None, s, None, 1.0, False, 0.0),
        "scan_step": (u[:, 0], u[:, 0], a, b[:, 0], b[:, 0], None, None, randn(1, 8, 4, of=torch.float32)),
        "conv_step": (u[:, 0], weight, None, u[:, :3], True),
        "softmax_step": (q[:, 0], q, q, None, 0.3, 0),
        "softmax_matches": (q, q, None, labels, labels, 0.3, 0),
    }  # fmt: skip


def differentiable(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with tensors of numbers that ask for a gradient."""
    return tuple(
        x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in arguments
    )
