"""Readings on a table of their entries give what the readings themselves give."""

import pytest
import torch
from language_models import build, tokens

from interp.subject import LanguageModelSubject
from interp.table_entries import TableEntries, computed_once


@pytest.mark.parametrize("units", [None, "state", "cluster:2"])
@pytest.mark.parametrize("name", ["hybrid", "mamba1", "llama"])
def test_weights_edges_and_rows_are_the_same(name, units):
    views = []
    LanguageModelSubject(build(name)).visit(tokens(seq=9), views.append, units=units)
    batch, dest = (part.flatten() for part in torch.meshgrid(torch.arange(2), torch.arange(9), indexing="ij"))
    # Past ones, the row itself, and some that come after it.
    sources = [(dest - 3).clamp(min=0), dest, (dest + 1).clamp(max=8)]
    for view in views:
        for plain, table in zip(view.readings, computed_once(view.readings), strict=True):
            assert isinstance(table.entries, TableEntries) and not isinstance(plain.entries, TableEntries)
            assert torch.allclose(plain.weights(), table.weights(), atol=1e-10)
            assert torch.allclose(plain.rows(2, 7), table.rows(2, 7), atol=1e-10)
            for src in sources:
                assert torch.allclose(
                    plain.edges(batch, dest, src), table.edges(batch, dest, src), atol=1e-10
                )


def test_a_large_table_is_not_kept(monkeypatch):
    views = []
    LanguageModelSubject(build("softmax")).visit(tokens(), views.append)
    monkeypatch.setattr("interp.table_entries.MAX_BYTES", {"cpu": 100})
    assert computed_once(views[0].readings) is views[0].readings
