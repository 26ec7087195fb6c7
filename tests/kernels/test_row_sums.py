"""Sums of |A| by rows without A: against the readable pattern, with resets and with decays that underflow."""

import pytest
import torch

from kernels import edges, gated_linear_attention, row_sums
from kernels.edge_set import Placed


def inputs(seq: int, *, groups: int = 2, heads: int = 4, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seq)
    q, k = torch.randn(2, 2, seq, groups, 5, generator=g, dtype=dtype)
    log_decay = -torch.rand(2, seq, heads, generator=g, dtype=dtype)
    return q, k, log_decay, torch.rand(2, seq, heads, generator=g, dtype=dtype) - 0.3


@torch.no_grad()
@pytest.mark.parametrize("gates", ["none", "decay", "weight", "both", "resets", "all resets"])
@pytest.mark.parametrize("seq", [1, 7, 33, 65])
def test_equals_the_pattern(seq, gates, monkeypatch):
    monkeypatch.setattr(row_sums, "ROWS", 10)
    q, k, log_decay, weight = inputs(seq)
    if "resets" in gates:
        where = slice(None) if gates == "all resets" else slice(2, None, 5)
        log_decay[0, where, 1] = -torch.inf
        log_decay[1, where] = -torch.inf
    options = {
        "log_decay": None if gates in ("none", "weight") else log_decay,
        "k_weight": weight if gates in ("weight", "both", "resets") else None,
        "scale": 0.3,
    }
    if options["log_decay"] is None and options["k_weight"] is None:
        q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    expected = gated_linear_attention.pattern(q, k, **options).abs().sum(-1).transpose(1, 2)
    found = row_sums.linear_abs_row_sum(q, k, n_heads=4, **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_sources_that_have_underflowed_are_left_out_and_nothing_else(monkeypatch):
    monkeypatch.setattr(row_sums, "ROWS", 16)
    q, k, log_decay, weight = inputs(400, dtype=torch.float32)
    log_decay = log_decay * torch.tensor([4.0, 6.0, 8.0, 2.0])
    products = []
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: products.append(b.shape[-1]) or matmul(a, b))
    options = {"log_decay": log_decay, "k_weight": weight}
    found = row_sums.linear_abs_row_sum(q, k, n_heads=4, **options)
    monkeypatch.undo()
    expected = gated_linear_attention.pattern(q, k, **options).abs().sum(-1).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert max(products) < 300


@torch.no_grad()
def test_edges_of_linear_attention_with_resets_are_finite():
    q, k, log_decay, weight = inputs(20)
    log_decay[:, 8] = -torch.inf
    dest, src = torch.ones(20, 20).nonzero().unbind(1)
    at = Placed(batch=torch.zeros_like(dest), dest=dest, src=src)
    found = edges.linear_weights(q, k, at, n_heads=4, log_decay=log_decay, k_weight=weight)
    expected = gated_linear_attention.pattern(q, k, log_decay=log_decay, k_weight=weight)
    torch.testing.assert_close(found, expected[0, :, dest, src].T, rtol=1e-10, atol=1e-12)
