"""Figures: each function returns a plotly Figure and shows or fetches nothing. `mode` is `light` or `dark`.

A function has the name of its module; `interp.figures.attention_map` is the function.

attention_map         one unit's weights on one sequence       token_view      one row of them, as text
checkpoint_animation  the same over training                   score_matrix    by layer and head, over time
head_grid             many maps, layers down, heads across     phase_plot      scores and losses over training
composition_graph     which heads read which, above the null   run_comparison  several runs on one axis
effect_matrix         a patching sweep: layer by head         effect_bars     any effects, by name
loss_by_position      loss along the sequence                  offset_profile  weight or effect by offset
"""

from interp.figures.attention_map import attention_map
from interp.figures.checkpoint_animation import checkpoint_animation
from interp.figures.composition_graph import composition_graph
from interp.figures.effect_bars import effect_bars
from interp.figures.effect_matrix import effect_matrix
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
    "checkpoint_animation",
    "composition_graph",
    "effect_bars",
    "effect_matrix",
    "head_grid",
    "loss_by_position",
    "offset_profile",
    "phase_plot",
    "run_comparison",
    "score_matrix",
    "theme_of",
    "token_view",
]
