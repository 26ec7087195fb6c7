"""Notebooks, each from a trained model to what it does, in under two minutes on two cores.

| notebook | what it shows |
| --- | --- |
| `induction_in_softmax.ipynb` | an induction circuit: two heads, how they compose, what they are worth |
| `induction_without_attention.ipynb` | linear attention and Mamba-2: where the previous-token step went |
| `phase_transition.ipynb` | how the circuit appears over the checkpoints of a run |
| `pretrained_model.ipynb` | a model of another project: SmolLM2's file, a folder, or one written here |

They use the runs of `make demo` where these are there, and train them where they are not (`finished_runs`).
"""
