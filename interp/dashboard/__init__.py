"""The interactive attention dashboard: `attention-dashboard PATH [PATH2]`.

| file | noun |
| --- | --- |
| `run.py` | a model series on disk, its choices and its loaded checkpoints |
| `cache.py`, `ahead.py` | what was computed, bounded in size, and what will be |
| `quotation.py` | what someone typed, as messages quote it |
| `prompt.py`, `token_pieces.py` | the tokens that are read, and how each is spelt |
| `sheet.py` | one layer's weights on one prompt |
| `causal.py`, `states.py`, `scoring.py` | cuts, recurrent states, scores over training |
| `mixer_inputs.py` | what the mixers are given on one prompt |
| `views.py`, `token_cells.py` | pure functions from these to figures and plain data |
| `map_frame.py` | the map of `views.py`, drawn once for a prompt and filled quickly |
| `captions.py` | the sentence under each view |
| `layout.py`, `controls.py`, `choices.py` | the page |
| `callbacks.py`, `*_callbacks.py`, `request.py`, `desk.py` | what happens on it |
| `incoming.py` | what a browser sends, checked before any callback |
| `app.py`, `server.py`, `cli.py` | the app, its guard, the command |
| `export.py`, `export_*` | the same as one self-contained page, `--export FILE` |

The server keeps no state of a window: what is chosen stands in the page and comes with every request.
"""
