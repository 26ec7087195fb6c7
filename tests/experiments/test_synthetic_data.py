"""Each task has the structure that it promises, and the i.i.d. control has none of it."""

import numpy as np
import pytest

from experiments.data import synthetic_task
from experiments.data.config import (
    DATA_CONFIGS,
    DataConfig,
    IIDConfig,
    MarkovConfig,
    PeriodicConfig,
    RecallConfig,
    SegmentCopyConfig,
    TextConfig,
)
from models.errors import ConfigError

CONFIGS = [
    PeriodicConfig(seq=40, d_vocab=32, period_min=5, period_max=12),
    SegmentCopyConfig(seq=64, d_vocab=64),
    MarkovConfig(seq=64, d_vocab=6),
    RecallConfig(seq=64, d_vocab=64, n_pairs=8),
    IIDConfig(seq=64, d_vocab=64),
]


def task_of(config, *, batch=16, data_seed=3, eval_seed=4):
    return synthetic_task(config, batch=batch, data_seed=data_seed, eval_seed=eval_seed)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_batches_are_functions_of_seed_and_step(config):
    task = task_of(config)
    again = task_of(config)
    # Out of order: nothing is kept between calls.
    late, early = again.batch(7).tokens, again.batch(2).tokens
    assert (task.batch(2).tokens == early).all() and (task.batch(7).tokens == late).all()
    assert (early != late).any()
    assert (task_of(config, data_seed=5).batch(2).tokens != early).any()
    assert (task.held_out(16).tokens != task.batch(0).tokens).any()
    assert (task.held_out(16).tokens == task_of(config, data_seed=9).held_out(16).tokens).all()
    assert (task_of(config, eval_seed=9).held_out(16).tokens != task.held_out(16).tokens).any()
    assert early.shape == (16, config.seq) and early.dtype == np.int64
    assert early.min() >= 0 and early.max() < config.d_vocab


def test_periodic_repeats_distinct_tokens_with_its_period():
    config = CONFIGS[0]
    batch = task_of(config).held_out(200)
    periods = []
    for row, repeated in zip(batch.tokens, batch.repeated, strict=True):
        period = next(p for p in range(1, config.seq) if (row[p:] == row[:-p]).all())
        periods.append(period)
        assert len(set(row[:period])) == period
        assert repeated.tolist() == [t > period for t in range(config.seq)]
    assert set(periods) == set(range(5, 13))


def test_segment_copy_has_two_copies_and_marks_the_second():
    config = CONFIGS[1]
    batch = task_of(config).held_out(300)
    starts, lengths = [], []
    for row, repeated in zip(batch.tokens, batch.repeated, strict=True):
        where = np.flatnonzero(repeated)
        # Marked: the second copy without its first token, in one piece.
        start, length = where[0] - 1, len(where) + 1
        assert (np.diff(where) == 1).all()
        segment = row[start : start + length]
        found = [s for s in range(start - length + 1) if (row[s : s + length] == segment).all()]
        assert found
        starts.append(start), lengths.append(length)
    assert min(lengths) == 14 and max(lengths) == 24
    assert min(starts) < 20 and max(starts) > 45


def test_iid_control_has_no_repeats_to_use():
    tokens = task_of(IIDConfig(seq=64, d_vocab=64)).held_out(400).tokens
    longest_match = max((row[shift:] == row[:-shift]).mean() for row in tokens[:50] for shift in range(5, 40))
    assert longest_match < 0.5
    assert np.bincount(tokens.ravel(), minlength=64).std() < 40
    zipf = task_of(IIDConfig(seq=64, d_vocab=8, exponent=1.0)).held_out(400).tokens
    share = np.bincount(zipf.ravel(), minlength=8) / zipf.size
    expected = (1 / np.arange(1, 9)) / (1 / np.arange(1, 9)).sum()
    np.testing.assert_allclose(share, expected, atol=0.01)


def test_markov_chains_differ_between_sequences_and_not_within():
    config = MarkovConfig(seq=4000, d_vocab=3, alpha=0.5)
    tokens = task_of(config).held_out(4).tokens
    matrices = []
    for row in tokens:
        halves = [_transitions(part, 3) for part in (row[:2000], row[2000:])]
        counted = np.minimum(*[_counts(part, 3) for part in (row[:2000], row[2000:])])
        often = counted.sum(-1) > 200
        np.testing.assert_allclose(halves[0][often], halves[1][often], atol=0.12)
        matrices.append(_transitions(row, 3))
    assert max(abs(matrices[0] - m).max() for m in matrices[1:]) > 0.3


def test_recall_answers_are_the_paired_values():
    config = RecallConfig(seq=64, d_vocab=64, n_pairs=8)
    batch = task_of(config).held_out(100)
    for row, scored in zip(batch.tokens, batch.scored, strict=True):
        book = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        assert len(book) == 8 and all(key < 32 for key in book)
        where = np.flatnonzero(scored)
        assert len(where) == 8 and where.min() >= 17
        assert {row[p - 1] for p in where} == set(book)
        assert all(row[p] == book[row[p - 1]] for p in where)


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="period_max"):
        PeriodicConfig(seq=40, d_vocab=8, period_max=12)
    with pytest.raises(ConfigError, match="segment_max"):
        SegmentCopyConfig(seq=40, d_vocab=8, segment_max=24)
    with pytest.raises(ConfigError, match="'periodik'; accepted: periodic, segment_copy"):
        DataConfig.from_dict({"kind": "periodik"})
    with pytest.raises(ConfigError, match="d_vocab.*256 with tokens 'bytes'"):
        TextConfig(seq=8, tokens="bytes", d_vocab=300)
    assert set(DATA_CONFIGS) == {"periodic", "segment_copy", "markov", "recall", "iid", "text"}


def _counts(row, n):
    counts = np.zeros((n, n))
    np.add.at(counts, (row[:-1], row[1:]), 1)
    return counts


def _transitions(row, n):
    counts = _counts(row, n)
    return counts / np.maximum(counts.sum(-1, keepdims=True), 1)
