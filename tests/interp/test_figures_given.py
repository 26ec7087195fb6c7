"""Figures draw numbers, leave gaps where they say so, and name what cannot be drawn."""

import numpy as np
import pytest
import torch

from interp import figures

MATRIX, TOKENS = np.tril(np.ones((3, 3)) / 3), ["a", "b", "c"]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "matrix",
    [
        torch.tensor(MATRIX, requires_grad=True),
        torch.tensor(MATRIX).float(),
        (MATRIX > 0).astype(int),
        torch.eye(3).bfloat16(),
        torch.eye(3, dtype=torch.bool),
        MATRIX.tolist(),
    ],
)
def test_numbers_of_any_kind_are_drawn(matrix):
    as_numbers = matrix.detach().double().numpy() if isinstance(matrix, torch.Tensor) else np.array(matrix)
    z = figures.attention_map(matrix, TOKENS).data[0].z
    np.testing.assert_array_equal(np.nan_to_num(np.array(z, dtype=float)), as_numbers)
    assert len(figures.token_view(matrix[2], TOKENS).data) == 3
    assert len(figures.head_grid({(0, 0): matrix}).data) == 1


@pytest.mark.parametrize(
    "draw, said",
    [
        (lambda: figures.attention_map(MATRIX, TOKENS, limit=0), "limit 0; accepted: None or a positive"),
        (lambda: figures.attention_map(MATRIX, TOKENS, limit=-1), "limit -1"),
        (lambda: figures.attention_map(MATRIX, TOKENS, limit=NAN), "limit nan"),
        (lambda: figures.attention_map(MATRIX, TOKENS, limit=INF), "limit inf"),
        (lambda: figures.attention_map(MATRIX, TOKENS, most=0), "most 0; accepted: a whole number from 1"),
        (lambda: figures.attention_map(MATRIX, TOKENS, most=1.5), "most 1.5"),
        (lambda: figures.attention_map(MATRIX + 0j, TOKENS), "matrix holds what is no real number"),
        (lambda: figures.attention_map(torch.tensor(MATRIX + 0j), TOKENS), "no real number"),
        (lambda: figures.attention_map([["a"]], ["a"]), "no real number"),
        (lambda: figures.attention_map([[1.0], [1.0, 2.0]], ["a", "b"]), "rows of equal length"),
        (lambda: figures.attention_map(MATRIX, [1, 2, 3]), r"tokens hold 1; accepted: text \(str or bytes\)"),
        (lambda: figures.head_grid({(0, 0): MATRIX}, limit=0), "limit 0"),
        (lambda: figures.checkpoint_animation({0: MATRIX}, TOKENS, limit=-1), "limit -1"),
        (lambda: figures.token_view(MATRIX[2], TOKENS, n_columns=0), "n_columns 0; accepted"),
        (lambda: figures.token_view(MATRIX[2], TOKENS, n_columns=1.5), "n_columns 1.5; accepted"),
        (lambda: figures.token_view(MATRIX[2], TOKENS, limit=-1), "limit -1; accepted"),
        (lambda: figures.token_view(MATRIX[2], TOKENS, selected=1.5), "selected 1.5; accepted: 0 to 2"),
        (lambda: figures.effect_bars({"a": INF}), "values holds inf; accepted: finite values, and NaN"),
        (lambda: figures.effect_bars({"a": 1.0}, errors={}), "errors have none of 'a'"),
        (lambda: figures.effect_matrix({(0, 0): INF, (0, 1): 1.0}), "values holds inf"),
        (lambda: figures.loss_by_position([[1.0, INF]], [0]), "losses holds inf"),
        (lambda: figures.loss_by_position([[NAN, NAN]], [0]), "gaps alone; accepted: at least one finite"),
        (lambda: figures.loss_by_position([[]], [0]), "gaps alone"),
        (lambda: figures.loss_by_position([[1.0, 2.0]], [0], n_lines=0), "n_lines 0; accepted"),
        (lambda: figures.run_comparison({"a": ([0, 1], [1.0, INF])}, quantity="q"), "run 'a' holds inf"),
        (lambda: figures.run_comparison({"a": ([0, 1], [NAN, NAN])}, quantity="q"), "gaps alone"),
    ],
)
def test_what_cannot_be_drawn_is_named(draw, said):
    with pytest.raises(ValueError, match=said) as caught:
        draw()
    assert "\n" not in str(caught.value)


def test_gaps_stay_gaps():
    bars = figures.effect_bars({"a": NAN, "b": 1.0})
    np.testing.assert_array_equal(bars.data[0].y, [NAN, 1.0])
    cells = figures.effect_matrix({(0, 0): NAN, (0, 1): -2.0}).data[0]
    np.testing.assert_array_equal(cells.z, [[NAN, -2.0]])
    assert (cells.zmin, cells.zmax) == (-2.0, 2.0)
    assert figures.effect_matrix({(0, 0): NAN}).data[0].zmax == 1.0
    lines = figures.loss_by_position([[3.0, NAN, 1.0], [2.0, 1.0, NAN]], [0, 10])
    np.testing.assert_array_equal(lines.data[1].y, [2.0, 1.0, NAN])
    low, high = lines.layout.yaxis.range
    assert low < 1.0 < 3.0 < high
    curves = {"a": ([0, 1, 2], [0.5, NAN, 2.0]), "b": ([0, 1], [1.0, NAN])}
    runs = figures.run_comparison(curves, quantity="q")
    np.testing.assert_array_equal(runs.data[0].y, [0.5, NAN, 2.0])
    places = [note.y for note in runs.layout.annotations]
    assert np.isfinite(places).all() and runs.layout.yaxis.range[1] > 2.0
