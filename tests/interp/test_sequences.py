"""Probe sequences: what is drawn, what comes again, and what an earlier copy is."""

import pytest
import torch

from interp.errors import DetectionError
from interp.sequences import RepeatedTokens, candidates, repeated_tokens


def test_tokens_are_distinct_tiled_and_start_with_bos():
    probe = repeated_tokens(6, 5, 3, ids=torch.arange(10, 30), bos=0, seed=1)
    assert probe.tokens.shape == (6, 16)
    assert (probe.tokens[:, 0] == 0).all()
    first = probe.tokens[:, 1:6]
    assert all(len(set(row.tolist())) == 5 for row in first)
    assert (probe.tokens[:, 6:11] == first).all() and (probe.tokens[:, 11:] == first).all()
    assert int(first.min()) >= 10 and int(first.max()) < 30


def test_the_seed_decides():
    same = [repeated_tokens(3, 5, 2, ids=torch.arange(50), seed=seed).tokens for seed in (7, 7, 8)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_shuffled_keeps_the_first_copy_and_the_set_but_not_the_order():
    options = {"ids": torch.arange(40), "seed": 3}
    plain, shuffled = (
        repeated_tokens(4, 20, 3, **options),
        repeated_tokens(4, 20, 3, **options, shuffled=True),
    )
    assert torch.equal(plain.tokens[:, :20], shuffled.tokens[:, :20])
    second, third = shuffled.tokens[:, 20:40], shuffled.tokens[:, 40:]
    assert torch.equal(second.sort().values, plain.tokens[:, :20].sort().values)
    assert not torch.equal(second, plain.tokens[:, 20:40])
    assert not torch.equal(second, third)


def test_earlier_copies_are_found_by_equality_most_recent_first():
    probe = RepeatedTokens(tokens=torch.tensor([[9, 1, 2, 1, 1, 3]]), period=5, repeats=1, bos=9)
    source, filled = probe.earlier
    assert source[0, 4][filled[0, 4]].tolist() == [3, 1]
    assert source[0, 3][filled[0, 3]].tolist() == [1]
    assert not filled[0, 5].any()


def test_bos_is_no_copy_even_where_its_id_comes_again():
    probe = RepeatedTokens(tokens=torch.tensor([[1, 1, 2]]), period=2, repeats=1, bos=1)
    assert not probe.earlier[1].any()


def test_edges_are_padded_with_edges_that_carry_nothing():
    probe = RepeatedTokens(tokens=torch.tensor([[1, 2, 1, 2], [1, 2, 3, 1]]), period=2, repeats=2)
    dest, src = probe.edges
    pairs = [sorted(zip(d.tolist(), s.tolist(), strict=True)) for d, s in zip(dest, src, strict=True)]
    assert pairs[0] == [(2, 1), (3, 2)]
    assert (3, 1) in pairs[1]
    assert all(s > d for d, s in pairs[1] if (d, s) != (3, 1))


def test_a_small_vocabulary_is_refused_with_both_numbers():
    with pytest.raises(DetectionError, match=r"3 usable tokens.*needs 5"):
        repeated_tokens(1, 5, 2, ids=torch.arange(3))


def test_candidates_leave_out_special_and_rare_and_common_ids():
    assert candidates(5, excluded={0}).tolist() == [1, 2, 3, 4]
    assert candidates(20, ranked=list(range(20))).tolist() == list(range(2, 18))
    large = candidates(5000)
    assert int(large.min()) == 500 and int(large.max()) == 4499
