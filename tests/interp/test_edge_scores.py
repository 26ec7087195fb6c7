"""Scores on chosen edges: the dense path's numbers without its T x T tensors."""

import pytest
import torch
from language_models import build
from torch.utils._python_dispatch import TorchDispatchMode

from interp import detect, edge_scores, head_scores
from interp.head_scores import measure_reading
from interp.sequences import RepeatedTokens, repeated_tokens
from interp.subject import LanguageModelSubject
from models.mixers import reading as reading_module

NAMES = ("softmax", "linear", "mamba1", "mamba2")


class LargestTensor(TorchDispatchMode):
    """Notes the most numbers in any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().size() // x.element_size())
        return result


def readings(name: str, probe: RepeatedTokens, units: str | None = None):
    subject = LanguageModelSubject(build(name))
    found = []
    subject.visit(probe.tokens, lambda view: found.extend(view.readings), units=units)
    width = probe.first + probe.period
    return found, subject.directions(probe.tokens[:, :width])


def probe_of(bos: int | None, n: int = 3) -> RepeatedTokens:
    return repeated_tokens(n, 5, 3, ids=torch.arange(1, 11), bos=bos, seed=3)


@torch.no_grad()
@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("name", NAMES)
def test_every_reading_gives_the_dense_numbers(name, bos, monkeypatch):
    probe = probe_of(bos)
    # Small blocks, so that several are put together.
    monkeypatch.setattr(edge_scores, "_EDGES_AT_ONCE", 20)
    monkeypatch.setattr(edge_scores, "_LOGITS_AT_ONCE", 100)
    for units in (None, "state", "cluster:2") if name == "mamba1" else (None,):
        found, directions = readings(name, probe, units)
        for reading in found:
            dense = head_scores._columns(measure_reading(reading, probe, directions, linear_memory=False))
            mine = head_scores._columns(measure_reading(reading, probe, directions, linear_memory=True))
            assert dense.keys() == mine.keys()
            for key in dense:
                close(mine[key], dense[key], key)


def close(actual: list, expected: list, key: str) -> None:
    """Columns of a table, one value, tuple or None for each unit."""
    for found, wanted in zip(actual, expected, strict=True):
        if wanted is None:
            assert found is None, key
        else:
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9), key


@torch.no_grad()
def test_a_changed_edge_shows():
    """Negative control: another offset is another number, so that agreement is not vacuous."""
    probe = probe_of(None)
    found, _ = readings("softmax", probe)
    scores = edge_scores.edge_scores(found[1], probe, offsets=(1, 2)).rowsum
    assert (scores[..., 0] - scores[..., 1]).abs().min() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_grows_with_the_square_of_the_length(name, monkeypatch):
    monkeypatch.setattr(reading_module, "BLOCK_BYTES", 2**16)
    largest = []
    for seq in (256, 1024):
        probe = repeated_tokens(1, 8, seq // 8, ids=torch.arange(8))
        subject = LanguageModelSubject(build(name, dtype=torch.float32))
        found = []
        subject.visit(probe.tokens, lambda view, found=found: found.extend(view.readings[:1]))
        # Only as many pairs as tokens come up here: the number of edges is no part of the claim.
        few = RepeatedTokens(tokens=torch.arange(seq).remainder(seq // 2)[None], period=seq // 2, repeats=2)
        with LargestTensor() as seen:
            edge_scores.edge_scores(found[0], few, offsets=(1, 2))
        largest.append(seen.numbers)
    assert largest[1] < 6 * largest[0] or largest[1] < 2**18
    assert largest[1] < 1024 * 1024 / 2


def test_detection_takes_edges_above_the_stated_length_and_when_told(monkeypatch):
    assert not edge_scores.chosen(probe_of(None), None)
    monkeypatch.setattr(edge_scores, "LINEAR_MEMORY_ABOVE", 10)
    assert edge_scores.chosen(probe_of(None), None)
    assert not edge_scores.chosen(probe_of(None), False)
    model = build("mamba2", dtype=torch.float64)
    options = {"scores": ["copying"], "period": 6, "repeats": 3}
    edges, dense = (detect(model, **options, linear_memory=choice) for choice in (None, False))
    for mine, reference in zip(edges.checkpoints[0].heads, dense.checkpoints[0].heads, strict=True):
        assert mine.prefix_matching == pytest.approx(reference.prefix_matching, rel=1e-6)
        assert mine.copying_edge == pytest.approx(reference.copying_edge, rel=1e-6)
    assert dense.attention_maps and not edges.attention_maps
    assert any("no attention maps" in note for note in edges.notes)


@torch.no_grad()
def test_nothing_to_match_is_refused():
    probe = RepeatedTokens(tokens=torch.arange(10)[None], period=5, repeats=2)
    found, _ = readings("softmax", probe)
    with pytest.raises(ValueError, match="no token that comes again"):
        edge_scores.edge_scores(found[0], probe)
