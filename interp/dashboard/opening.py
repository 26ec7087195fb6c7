"""What a new window shows first: the unit that looks most like one that reads after earlier copies."""

from typing import Any

import numpy as np
import torch

from interp.dashboard.messages import attempt
from interp.dashboard.prompt import PromptSpec, make_prompt, most_tokens
from interp.dashboard.run import Run
from interp.dashboard.sheet import Sheet, read_sheet
from interp.offset_edges import window_matches
from interp.plan import LARGE_WEIGHTS, make_plan
from interp.subject import Subject

# Offsets from the earlier copy at which a match may sit (a short convolution moves it by up to its width),
# and those beyond, where there is none.
_NEAR, _FAR = range(1, 5), range(6, 11)


def opening(run: Run, subject: Subject) -> dict[str, Any]:
    """Layer, head and reading to begin with; the last layer's first head for large models.

    Mamba layers begin with the reading that goes back to the layer's own input positions.
    """
    layers = range(len(run.layers))
    start = {"layer": layers[-1], "head": 0, "reading": _reading(run, layers[-1])}
    if subject.n_weights > LARGE_WEIGHTS:
        return start
    prompt = make_prompt(run, subject, default_prompt(run, subject))
    best, most = start, 0.0
    for layer in layers:
        units = next(iter(run.layers[layer].n_units))
        sheet = read_sheet(subject, prompt, layer=layer, reading=_reading(run, layer), units=units)
        weights = _after_copies(sheet)
        if weights.max() > most:
            most, best = float(weights.max()), {**start, "layer": layer, "head": int(weights.argmax())}
    return {**best, "reading": _reading(run, best["layer"])}


def trained_tokens(run: Run) -> int | None:
    """Length of the sequences that a run was trained on, as its held-out windows tell it."""
    return None if run.source.windows is None else run.source.windows.shape[1]


def detection_probe(run: Run, subject: Subject) -> PromptSpec | None:
    """The shape of detect-induction's probe of this run, within vocabulary, context and trained length.

    None where it refuses so small a model.
    """
    options = {"windows": run.source.windows, "trained": trained_tokens(run), "n_sequences": 1}
    plan, error = attempt(lambda: make_plan(subject, **options))
    return None if error else PromptSpec(period=plan.probe.period, repeats=plan.probe.repeats)


def default_prompt(run: Run, subject: Subject) -> PromptSpec:
    """The probe that detect-induction reads; for models too small for it a repeated one that fits."""
    found = detection_probe(run, subject)
    if found is not None:
        return found
    room = min(most_tokens(subject), subject.n_ctx, 128) - 1
    n_usable = subject.d_vocab - len(subject.special)
    repeats = 4 if room >= 16 else 2
    return PromptSpec(period=max(1, min(25, n_usable, room // repeats)), repeats=repeats)


def _reading(run: Run, layer: int) -> str:
    readings = run.layers[layer].readings
    return "block" if "pattern" not in readings and "block" in readings else readings[0]


def _after_copies(sheet: Sheet) -> np.ndarray:
    """For each unit how much its largest mean weight at a near offset exceeds that at far ones."""
    matches = window_matches(torch.tensor([sheet.prompt.ids]))

    def weights(offsets: range) -> list[np.ndarray]:
        found = [np.zeros(sheet.n_units)]
        for offset in (offset for offset in offsets if offset < len(sheet.prompt)):
            edges = matches.at(offset)
            if len(edges.dest):
                found.append(np.abs(sheet.weights[:, edges.dest.numpy(), edges.src.numpy()]).mean(-1))
        return found

    return np.max(weights(_NEAR), axis=0) - np.mean(weights(_FAR)[1:] or [0.0], axis=0)
