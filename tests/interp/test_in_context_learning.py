"""Losses by position, in-context learning, order gain and hit loss on values known by hand."""

import pytest
import torch

from interp import in_context_learning as icl
from interp.sequences import repeated_tokens


def test_positions_are_olssons_or_the_same_fractions():
    assert icl.icl_positions(512) == (500, 50)
    assert icl.icl_positions(501) == (500, 50)
    assert icl.icl_positions(64) == (62, 6)
    with pytest.raises(ValueError, match="too short"):
        icl.icl_positions(2)


def test_score_is_late_minus_early():
    losses = torch.arange(511, 0, -1, dtype=torch.float64).expand(3, -1).clone()
    losses[2] += 1
    found = icl.in_context_learning_score(losses)
    assert (found.late, found.early) == (500, 50)
    assert found.score == pytest.approx(-450)
    assert float(found.window_by_sequence.mean()) == pytest.approx(-450, abs=10)
    assert found.standard_error == pytest.approx(0)
    flat = icl.in_context_learning_score(torch.ones(3, 511))
    assert flat.score == 0.0
    with pytest.raises(ValueError, match="early < late"):
        icl.in_context_learning_score(losses, (50, 500))


@pytest.mark.parametrize("bos", [None, 0])
def test_repeat_losses_leave_out_the_first_token_of_the_second_copy(bos):
    probe = repeated_tokens(2, 5, 3, ids=torch.arange(1, 20), bos=bos, seed=0)
    start = probe.first
    in_order = torch.full((2, probe.tokens.shape[1] - 1), 1.0)
    # Entry p - 1 belongs to the token at p.
    in_order[:, : start + 4] = 7.0
    in_order[:, start + 4] = 1000.0
    found = icl.repeat_losses(in_order, torch.full_like(in_order, 3.0), probe)
    assert found.first_copy.tolist() == [7.0, 7.0]
    assert found.later_copies.tolist() == [1.0, 1.0]
    assert found.repeat_gain.tolist() == [6.0, 6.0]
    assert found.order_gain.tolist() == [2.0, 2.0]


def test_hits_are_bigrams_seen_before_in_the_same_window():
    tokens = torch.tensor([[1, 2, 3, 1, 2, 2, 3], [5, 5, 5, 1, 2, 3, 4]])
    hits = icl.bigram_hits(tokens)
    assert hits.tolist() == [
        [False, False, False, True, False, True],
        [False, True, False, False, False, False],
    ]
    losses = torch.arange(12, dtype=torch.float64).view(2, 6)
    assert icl.hit_loss(losses, tokens) == (pytest.approx((3 + 5 + 7) / 3), pytest.approx(3 / 12))
    assert icl.hit_loss(losses[:1], torch.arange(7)[None]) == (None, 0.0)
