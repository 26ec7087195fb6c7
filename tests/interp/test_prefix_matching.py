"""Prefix matching and previous token on patterns whose score is known."""

import pytest
import torch

from interp import prefix_matching, previous_token
from interp.prefix_matching import prefix_matching_score
from interp.sequences import RepeatedTokens, repeated_tokens

PERIOD, REPEATS = 7, 4


@pytest.fixture(params=[None, 0], ids=["no BOS", "BOS 0"])
def probe(request):
    return repeated_tokens(3, PERIOD, REPEATS, ids=torch.arange(1, 30), bos=request.param, seed=2)


def _uniform(seq):
    lower = torch.ones(seq, seq, dtype=torch.float64).tril()
    return (lower / lower.sum(-1, keepdim=True))[None, None]


def _induction(probe, spread):
    """Attention on the followers of earlier copies, on all alike or on the latest; row 0 where there are
    none.
    """
    source, filled = probe.earlier
    batch, seq, _ = source.shape
    pattern = torch.zeros(batch, 1, seq, seq, dtype=torch.float64)
    for b in range(batch):
        for i in range(seq):
            targets = (source[b, i][filled[b, i]] + 1).tolist()
            targets = targets if spread else targets[:1]
            for j in targets or [0]:
                pattern[b, 0, i, j] = 1 / max(len(targets), 1)
    return pattern


def _previous(seq):
    return torch.diag(torch.ones(seq - 1, dtype=torch.float64), -1)[None, None]


def test_a_perfect_head_is_one(probe):
    for spread in (True, False):
        assert prefix_matching_score(_induction(probe, spread), probe) == pytest.approx(1.0, abs=1e-12)
    assert prefix_matching_score(_induction(probe, False), probe, "latest") == pytest.approx(1.0, abs=1e-12)
    # Three targets in the last copy, two in the one before: (7 x 1 + 7 x 1 + 7 x 1) / (7 x 1 + 7 x 2 + 7 x
    # 3).
    assert prefix_matching_score(_induction(probe, True), probe, "pairs") == pytest.approx(0.5, abs=1e-12)


def test_a_previous_token_head_is_zero_on_prefix_matching_and_one_on_its_own(probe):
    seq = probe.tokens.shape[1]
    pattern = _previous(seq).expand(len(probe.tokens), 1, -1, -1)
    for aggregation in prefix_matching.AGGREGATIONS:
        assert float(prefix_matching_score(pattern, probe, aggregation)) == 0.0
    assert float(previous_token.previous_token_score(pattern)) == 1.0
    assert float(previous_token.previous_token_score(_induction(probe, True))) < 0.05


def test_uniform_attention_is_the_analytic_chance(probe):
    seq, start = probe.tokens.shape[1], probe.first
    harmonic = [0.0]
    for n in range(1, seq + 1):
        harmonic.append(harmonic[-1] + 1 / n)
    expected = sum(
        copies * (harmonic[start + PERIOD * (copies + 1)] - harmonic[start + PERIOD * copies])
        for copies in range(1, REPEATS)
    ) / (PERIOD * (REPEATS - 1))
    pattern = _uniform(seq).expand(len(probe.tokens), 1, -1, -1)
    assert prefix_matching.uniform_chance(probe) == pytest.approx(expected, abs=1e-12)
    assert float(prefix_matching_score(pattern, probe)) == pytest.approx(expected, abs=1e-12)
    chance = (harmonic[seq] - 1) / (seq - 1)
    assert previous_token.uniform_chance(seq) == pytest.approx(chance, abs=1e-12)
    assert float(previous_token.previous_token_score(pattern)) == pytest.approx(chance, abs=1e-12)


def test_the_offset_moves_the_target(probe):
    shifted = torch.roll(_induction(probe, False), 1, dims=-1)
    assert float(prefix_matching_score(shifted, probe, "latest", offset=2)) > 0.9
    assert float(prefix_matching_score(shifted, probe)) < 0.1


def test_a_block_of_rows_gives_the_same_weights(probe):
    pattern = torch.rand(len(probe.tokens), 2, *(2 * [probe.tokens.shape[1]]), dtype=torch.float64).tril()
    whole = prefix_matching.target_weights(pattern, probe)
    part = prefix_matching.target_weights(pattern[:, :, 9:15], probe, rows=slice(9, 15))
    assert torch.equal(whole[:, :, 9:15], part)


def test_random_tokens_that_do_not_repeat_are_refused():
    probe = RepeatedTokens(tokens=torch.arange(6)[None], period=6, repeats=1)
    with pytest.raises(ValueError, match="nothing to match"):
        prefix_matching_score(_uniform(6), probe)


def test_a_pattern_of_another_length_is_refused(probe):
    with pytest.raises(ValueError, match=r"the probe has 3 sequences"):
        prefix_matching_score(_uniform(5).expand(3, 1, 5, 5), probe)
    seq = probe.tokens.shape[1]
    with pytest.raises(ValueError, match=rf"the probe has 3 sequences, {seq} rows and {seq} sources"):
        prefix_matching_score(_uniform(seq).expand(3, 1, -1, -1)[..., :-1], probe)
    with pytest.raises(ValueError, match="rowsum, latest, pairs"):
        pattern = _uniform(probe.tokens.shape[1]).expand(3, 1, -1, -1)
        prefix_matching_score(pattern, probe, "sum")


def test_standard_error_is_that_of_the_mean():
    values = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    expected = (((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2 / 3) ** 0.5
    assert float(prefix_matching.standard_error(values)) == pytest.approx(expected, abs=1e-12)
    assert float(prefix_matching.standard_error(values[:1])) == 0.0
