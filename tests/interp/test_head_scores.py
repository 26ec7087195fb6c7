"""Eigenvalues beside the rest: the same numbers, errors where they are collected, threads as before."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from experiments.recipes import attention_only
from interp import copying, head_scores
from interp.head_scores import HeadScores
from interp.sequences import repeated_tokens
from interp.subject import LanguageModelSubject
from models import LanguageModel
from models.config import Mamba1Config, SoftmaxAttentionConfig


def _scores(mixer, d_model=16, **options):
    config = attention_only((mixer, mixer), d_model=d_model, d_vocab=32, n_ctx=16, init_std=0.1)
    model = LanguageModel(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    probe = repeated_tokens(2, 5, 3, ids=torch.arange(32), seed=0)
    return HeadScores(LanguageModelSubject(model), probe, **options)


def _seen_by_others():
    """The number of threads that a new thread finds."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def _assert_ended(threads):
    """A pool that nobody waits for ends a moment after its last result; those that LAPACK runs in stay."""
    stay = {thread for thread in threads if thread.name.startswith("eigenvalues")}
    assert len(stay) <= torch.get_num_threads()
    for thread in threads - stay:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads - stay)


# 16 x 16 matrices of one head in one call; 128 x 128 ones side by side.
@pytest.mark.parametrize(
    ("mixer", "d_model"), [(SoftmaxAttentionConfig(n_heads=2), 16), (Mamba1Config(), 128)]
)
def test_eigenvalues_in_a_thread_are_those_computed_directly(mixer, d_model):
    before, running = (torch.get_num_threads(), _seen_by_others()), set(threading.enumerate())
    found = []
    for in_thread in (False, True):
        scores = _scores(mixer, d_model, in_thread=in_thread)
        scores.visit()
        found.append(scores.records())
    assert found[0] == found[1]
    assert all(record.copying_eigenvalue is not None for record in found[1] if record.reading != "block")
    assert (torch.get_num_threads(), _seen_by_others()) == before
    _assert_ended(set(threading.enumerate()) - running)


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_the_null_in_float32_scatters_as_in_float64(scale):
    scores = _scores(Mamba1Config(), 64)
    with torch.no_grad():
        scores.subject.model.unembed.W_U.mul_(scale)
    scores.visit()
    found = {record.layer: record.copying_eigenvalue_null_sd for record in scores.records()}
    for layer in range(2):
        gram = scores.subject.gram(layer)
        expected = copying.eigenvalue_null(128, gram, n_draws=head_scores.NULL_DRAWS).std()
        assert found[layer] == pytest.approx(float(expected), rel=1e-5)


def test_a_matrix_that_is_not_finite_has_no_score_and_spoils_no_other():
    matrices = torch.randn(4, 40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = copying.eigenvalue_ratio(matrices)
    for dtype in (torch.float64, torch.float32):
        damaged = matrices.to(dtype).clone()
        damaged[1, 0, 0], damaged[3, 2, 1] = torch.nan, torch.inf
        found = copying.eigenvalue_ratio(damaged)
        assert found.isnan().tolist() == [False, True, False, True]
        assert torch.allclose(found[::2].double(), expected[::2], atol=1e-5)


def test_an_error_in_the_thread_is_raised_with_the_records(monkeypatch):
    def fail(product):
        raise RuntimeError("no eigenvalues today")

    monkeypatch.setattr(copying, "eigenvalue_ratio", fail)
    scores = _scores(SoftmaxAttentionConfig(n_heads=2), in_thread=True)
    scores.visit()
    with pytest.raises(RuntimeError, match="no eigenvalues today"):
        scores.records()


def test_no_thread_is_left_when_a_visit_fails(monkeypatch):
    before = set(threading.enumerate())
    measure, calls = head_scores.measure_reading, []

    def fail_later(reading, *args, **options):
        calls.append(reading)
        if len(calls) == 2:
            raise RuntimeError("the second reading")
        return measure(reading, *args, **options)

    monkeypatch.setattr(head_scores, "measure_reading", fail_later)
    scores = _scores(SoftmaxAttentionConfig(n_heads=2), in_thread=True)
    with pytest.raises(RuntimeError, match="the second reading"):
        scores.visit()
    _assert_ended(set(threading.enumerate()) - before)


@pytest.fixture
def three_threads():
    """More than one thread in torch, whatever the environment says."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    copying._solvers.cache_clear()
    yield
    torch.set_num_threads(before)
    copying._solvers.cache_clear()


@pytest.mark.parametrize("n", [32, 128])
def test_the_number_of_threads_comes_back_from_several_callers_and_errors(n, monkeypatch, three_threads):
    before = torch.get_num_threads(), _seen_by_others()
    draw = torch.Generator().manual_seed(0)
    matrices = torch.randn(4, n, n, dtype=torch.float64, generator=draw)
    expected, eigvals, seen = copying.eigenvalue_ratio(matrices), torch.linalg.eigvals, []

    def watched(matrix):
        seen.append(torch.get_num_threads())
        if not matrix.any():
            raise RuntimeError("nothing in it")
        return eigvals(matrix)

    # Not those that the expected ones have begun.
    copying._solvers.cache_clear()
    monkeypatch.setattr(torch.linalg, "eigvals", watched)
    with ThreadPoolExecutor(4) as pool:
        begun = [pool.submit(copying.eigenvalue_ratio, matrices * (n % 3 != 2)) for n in range(6)]
    for n, future in enumerate(begun):
        if n % 3 == 2:
            with pytest.raises(RuntimeError, match="nothing in it"):
                future.result()
        else:
            assert torch.equal(future.result(), expected)
    assert set(seen) == {1}
    assert (torch.get_num_threads(), _seen_by_others()) == before


def test_records_do_not_read_the_model_again():
    scores, left = (_scores(Mamba1Config(), in_thread=True) for _ in range(2))
    for found in (scores, left):
        found.visit()
    with torch.no_grad():
        for parameter in left.subject.model.parameters():
            parameter.fill_(float("nan"))
    assert left.records() == scores.records()
