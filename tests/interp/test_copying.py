"""Copying scores of circuits that copy, that do not, and that do the opposite."""

import pytest
import torch

from interp import copying
from interp.sequences import repeated_tokens
from interp.table_entries import from_pattern
from models.mixers.reading import Reading

D = 12
PERIOD = 6


def _uniform(seq):
    lower = torch.ones(seq, seq, dtype=torch.float64).tril()
    return (lower / lower.sum(-1, keepdim=True))[None, None]


def _reading(pattern, values, W_out):
    batch, seq = values.shape[:2]
    return Reading(
        name="pattern",
        unit="head",
        normalisation="none",
        W_out=W_out,
        constant=torch.zeros(batch, seq, W_out.shape[-1], dtype=values.dtype),
        z_index=torch.arange(values.shape[-1])[None],
        entries=from_pattern(pattern),
        taps=values[None],
        make_pattern=lambda: pattern,
    )


def _one_hot_head(sign=1.0, order=None):
    """Tokens are unit vectors; the head's value is the token it reads, or a permutation of it, times
    `sign`.
    """
    probe = repeated_tokens(2, PERIOD, 3, ids=torch.arange(D), seed=0)
    embedding = torch.eye(D, dtype=torch.float64)
    read = probe.tokens if order is None else order[probe.tokens]
    seq = probe.tokens.shape[1]
    pattern = _uniform(seq).expand(2, 1, -1, -1)
    reading = _reading(pattern, sign * embedding[read][:, :, None], embedding[None])
    directions = embedding[copying.sample_tokens(probe)]
    return probe, reading, directions - directions.mean(-1, keepdim=True)


def _logit(reading, directions, **options):
    outputs = copying.unit_outputs(reading, PERIOD)
    weights = reading.weights()[:, :, :PERIOD, :PERIOD]
    return copying.logit_copying(outputs, reading.W_out, weights, directions, bos=False, **options)


def test_edge_copying_of_a_copying_head_is_one():
    probe, reading, directions = _one_hot_head()
    found = copying.edge_copying(reading, probe, directions)
    assert float(found.raises.score) == pytest.approx(1.0, abs=1e-12)
    assert float(found.raises.score_2r) == pytest.approx(1.0, abs=1e-12)
    assert float(found.argmax_share) == 1.0


def test_edge_copying_of_an_anti_copying_head_is_minus_one():
    probe, reading, directions = _one_hot_head(sign=-1.0)
    found = copying.edge_copying(reading, probe, directions)
    assert float(found.raises.score) == pytest.approx(-1.0, abs=1e-12)
    assert float(found.argmax_share) == 0.0


def test_edge_copying_of_a_head_that_names_another_token_is_minus_one():
    probe, reading, directions = _one_hot_head(order=(torch.arange(D) + 1) % D)
    # Where the named token is in the sample it is raised instead; where it is not, nothing is.
    score = copying.edge_copying(reading, probe, directions).raises.ratio
    raised = score[score.isfinite()]
    assert raised.numel() and float(raised.max()) < 1e-12


def test_logit_copying_by_hand():
    # At position t the head holds the mean of t + 1 unit vectors: each attended token is raised by the same
    # amount, so a = u, S = (t + 1) u, r = 1 / (t + 2).
    _, reading, directions = _one_hot_head()
    found = _logit(reading, directions)
    expected = sum(4 / (t + 2) - 1 for t in range(PERIOD)) / PERIOD
    assert float(found.score) == pytest.approx(expected, abs=1e-12)
    assert float(_logit(reading, directions, attended="argmax").score) == pytest.approx(expected, abs=1e-12)
    expected_2r = sum(2 / (t + 1) - 1 for t in range(PERIOD)) / PERIOD
    assert float(found.score_2r) == pytest.approx(expected_2r, abs=1e-12)


def test_a_head_that_writes_nothing_has_no_logit_copying():
    _, reading, directions = _one_hot_head(sign=0.0)
    assert _logit(reading, directions).score.isnan().all()
    with pytest.raises(ValueError, match="weighted, argmax"):
        _logit(reading, directions, attended="all")


def test_bos_among_the_sources_counts_only_where_asked():
    # Almost all attention on BOS, whose value raises nothing in the sample.
    seq = PERIOD + 1
    embedding = torch.eye(D, dtype=torch.float64)
    tokens = torch.arange(seq)[None]
    pattern = torch.zeros(1, 1, seq, seq, dtype=torch.float64)
    pattern[..., 0] = 0.9
    pattern += 0.1 * torch.eye(seq, dtype=torch.float64)
    values = embedding[tokens][:, :, None].clone()
    values[:, 0] = 0
    reading = _reading(pattern, values, embedding[None])
    directions = embedding[tokens] - 1 / D
    options = {"outputs": copying.unit_outputs(reading), "W_out": reading.W_out, "weights": pattern}
    without = copying.logit_copying(**options, directions=directions, bos=True)
    with_bos = copying.logit_copying(**options, directions=directions, bos=True, with_bos=True)
    assert float(without.score) == pytest.approx(1.0, abs=1e-12)
    assert float(with_bos.score) == pytest.approx(4 * 0.1 / 1.1 - 1, abs=1e-12)


def test_eigenvalues_of_copying_anti_copying_and_rotating_circuits():
    draw = torch.Generator().manual_seed(0)
    W_E = torch.randn(40, D, generator=draw, dtype=torch.float64)
    gram = W_E.T @ W_E
    W_V = torch.randn(D, 3, generator=draw, dtype=torch.float64)
    turn = torch.tensor([[0.0, 1, 0], [-1, 0, 0], [0, 0, 1e-9]], dtype=torch.float64)
    # With W_O = M (W_E^T W_E W_V)^+ the d_head x d_head product is M itself.
    inverse = torch.linalg.pinv(gram @ W_V)
    heads = torch.stack([inverse, -inverse, turn @ inverse])
    scores = copying.eigenvalue_copying(W_V.expand(3, -1, -1), heads, gram)
    assert scores.tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-6)


def test_eigenvalues_equal_those_of_the_whole_circuit():
    from transformer_lens import FactoredMatrix

    draw = torch.Generator().manual_seed(1)
    W_E, W_U = torch.randn(2, 30, D, generator=draw, dtype=torch.float64)
    W_V = torch.randn(1, D, 4, generator=draw, dtype=torch.float64)
    W_O = torch.randn(1, 4, D, generator=draw, dtype=torch.float64)
    found = copying.eigenvalue_copying(W_V, W_O, W_U.T @ W_E)
    whole = FactoredMatrix(W_E @ W_V[0], W_O[0] @ W_U.T)
    values = whole.eigenvalues
    assert float(found) == pytest.approx(float(values.real.sum() / values.abs().sum()), abs=1e-9)


def test_random_heads_have_eigenvalue_scores_around_zero():
    null = copying.eigenvalue_null(4, torch.eye(D, dtype=torch.float64), n_draws=200)
    assert abs(float(null.mean())) < 4 * float(null.std()) / 200**0.5
    assert 0.1 < float(null.std()) < 0.7
