"""Schema, shapes and gradient of every custom operator, as torch checks them; in Triton's interpreter.

Run by ../test_interpreter.py, as test_operators.py is.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernel_operator_inputs import CHECKS, differentiable, every_operator


def test_every_operator():
    arguments = every_operator("cpu", torch.float32)
    assert len(arguments) == 25
    for name, given in arguments.items():
        operator = getattr(torch.ops.beyond_softmax, name).default
        own = differentiable(given) if name in ("softmax_attention", "linear_attention", "selective_scan",
            "causal_conv", "linear_cross_entropy", "embedding", "embedding_backward",
            "add_rms_norm", "ssd_block", "packed_linear_attention", "packed_gated_silu") else given
        torch.library.opcheck(operator, own, test_utils=CHECKS)
