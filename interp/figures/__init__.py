"""Figures: each function returns a plotly Figure and shows or fetches nothing. `mode` is `light` or `dark`.

A function has the name of its module; `interp.figures.attention_map` is the function.
"""

from interp.figures.attention_map import attention_map
from interp.figures.head_grid import head_grid
from interp.figures.loss_by_position import loss_by_position
from interp.figures.offset_profile import offset_profile
from interp.figures.phase_plot import phase_plot
from interp.figures.run_comparison import run_comparison
from interp.figures.score_matrix import score_matrix
from interp.figures.theme import DARK, LIGHT, MODES, Theme, theme_of
from interp.figures.token_view import token_view

__all__ = [
    "DARK",
    "LIGHT",
    "MODES",
    "Theme",
    "attention_map",
    "head_grid",
    "loss_by_position",
    "offset_profile",
    "phase_plot",
    "run_comparison",
    "score_matrix",
    "theme_of",
    "token_view",
]
