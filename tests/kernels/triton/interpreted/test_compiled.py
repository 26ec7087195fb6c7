"""torch.compile takes every operator with backend "triton" in one graph, forward and backward.

Run by ../test_interpreter.py in a process of its own. What older versions of torch refuse to trace (look-ups
of packages, of the driver, behind a cache) newer ones warn of: no warning is let through.
"""

import os
import warnings

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from kernels.causal_conv import causal_conv
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embedding
from kernels.feature_maps import elu_plus_one
from kernels.gated_linear_attention import gated_linear_attention
from kernels.gated_silu import gated_silu, packed_gated_silu
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.packed_linear_attention import packed_linear_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotation import rotate
from kernels.selective_scan import selective_scan
from kernels.softmax_attention import softmax_attention
from kernels.step_size import step_size

TRITON = {"backend": "triton"}
X = torch.randn(1, 9, 2, 16, generator=torch.Generator().manual_seed(0))
WIDE, RATES = X[:, :, 0], torch.zeros(16, 4)
TARGET = torch.arange(9)
CALLS = {
    "softmax_attention": lambda x: softmax_attention(x, x, x, **TRITON),
    "gated_linear_attention": lambda x: gated_linear_attention(x, x, x, skip=x[0, 0, :, 0], **TRITON)[0],
    "selective_scan": lambda x: selective_scan(
        x[:, :, 0], x[:, :, 1].square(), RATES, x[:, :, 0, :4], x[:, :, 1, :4], **TRITON
    )[0],
    "causal_conv": lambda x: causal_conv(x[:, :, 0], x[0, :, 0, :4][:1].expand(16, 4), **TRITON)[0],
    "cross_entropy": lambda x: cross_entropy(x[0, :, 0], TARGET, **TRITON),
    "linear_cross_entropy": lambda x: linear_cross_entropy(
        x[0, :, 0], x[0, :, 1], TARGET, bias=x[0, :, 1, 0], **TRITON
    ),
    "elu_plus_one": lambda x: elu_plus_one(x, **TRITON),
    "embedding": lambda x: embedding(TARGET // 2, x[0, :, 0], **TRITON),
    "gated_silu": lambda x: gated_silu(x, x, **TRITON),
    "packed_gated_silu": lambda x: packed_gated_silu(x, **TRITON),
    "packed_linear_attention": lambda x: packed_linear_attention(
        torch.cat((x, x.square(), x), -1).flatten(2), 2, normalise=True, eps=0.1, **TRITON
    )[0],
    "rms_norm": lambda x: rms_norm(x, x[0, 0, 0], eps=1e-5, gate=x, **TRITON),
    "add_rms_norm": lambda x: sum(add_rms_norm(x, x.square(), x[0, 0, 0], eps=1e-5, **TRITON)),
    "rotation": lambda x: rotate(x, X[0, :, 0, :4], X[0, :, 1, :4], "half", **TRITON),
    "step_size": lambda x: step_size(x, x[0, 0, 0], **TRITON),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_without_warnings(name):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        call = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager") if compiled else CALLS[name]
        x = X.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            y = call(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y.detach(), gradient))
    for eager, traced in zip(*results, strict=True):
        assert eager.abs().max() > 1e-3
        torch.testing.assert_close(traced, eager)
