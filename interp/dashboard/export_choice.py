"""What an exported page holds: prompts, checkpoints, and units of layers, from the words of the command."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interp.dashboard.desk import Desk
from interp.dashboard.opening import default_prompt
from interp.dashboard.prompt import Prompt, PromptSpec, sample_windows
from interp.dashboard.selection import Selection
from interp.errors import DetectionError
from interp.figures.attention_map import induction_targets
from interp.sources import select_steps

# Units that are taken without being named: all of a small model, the strongest of a large one.
MOST_UNITS, N_STRONGEST = 24, 12
MOST_STEPS = 9
# Longest prompt: a map is drawn cell by cell.
MOST_TOKENS = 512
_UNIT = re.compile(r"L(\d+)(?:H(\d+))?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Specifications and tokens of the prompts, indices of checkpoints, units by layer, and the (layer, unit)
    that the page opens on."""

    specs: tuple[PromptSpec, ...]
    prompts: tuple[Prompt, ...]
    steps: tuple[int, ...]
    units: dict[int, tuple[int, ...]]
    first: tuple[int, int]


def choose(
    desk: Desk, *, prompts: Sequence[str] = (), heads: str | None = None, steps: str | None = None
) -> Choice:
    """The choice for the first run of a desk.

    Args:
        prompts: Texts (or ids, without a tokenizer); default a repeated probe and, where the run has held-out
            windows, the first of them.
        heads: `L0H1,L1H3,L2` (a layer alone is all of its units); default all up to 24 in all, else the 12
            that put most weight on induction targets.
        steps: As `detect-induction --steps`; default at most 9, spread evenly with the first and the last.

    Raises:
        DetectionError: a head, step or prompt that is not there, or a prompt above 512 tokens.
    """
    run = desk.runs[0]
    subject = run.load(len(run.steps) - 1).subject
    specs = tuple(PromptSpec(kind="typed", text=text) for text in prompts)
    if not specs:
        specs = (default_prompt(subject),)
        if run.source.windows is not None and sample_windows(run, subject) is not None:
            specs += (PromptSpec(kind="sample"),)
    last = Selection(step=len(run.steps) - 1, reading=run.layers[0].readings[0])
    made = tuple(desk.prompt(last, spec) for spec in specs)
    for prompt in made:
        if len(prompt) > MOST_TOKENS:
            raise DetectionError(f"a prompt has {len(prompt):,} tokens; an exported page takes {MOST_TOKENS}")
    named = {step: index for index, step in enumerate(run.steps)}
    chosen = _spread(run.steps) if steps is None else select_steps(run.steps, steps)
    indices = tuple(named[step] for step in chosen)
    units, first = _strongest(desk, specs[0]) if heads is None else _named(desk, heads)
    return Choice(specs=specs, prompts=made, steps=indices, units=units, first=first)


def _spread(steps: Sequence[int]) -> list[int]:
    if len(steps) <= MOST_STEPS:
        return list(steps)
    return [steps[round(place)] for place in np.linspace(0, len(steps) - 1, MOST_STEPS)]


def kind_of_units(desk: Desk, layer: int) -> str:
    """The kind of unit that is exported of a layer: heads, or the whole layer of Mamba-1."""
    return next(iter(desk.runs[0].layers[layer].n_units))


def _n_units(desk: Desk) -> list[int]:
    return [facts.n_units[kind_of_units(desk, n)] for n, facts in enumerate(desk.runs[0].layers)]


def _named(desk: Desk, heads: str) -> tuple[dict[int, tuple[int, ...]], tuple[int, int]]:
    """Units by layer, out of `L0H1,L1`, and the one to open on: the dashboard's, or the first named."""
    n_units, found, order = _n_units(desk), {}, []
    for word in heads.split(","):
        match = _UNIT.fullmatch(word.strip())
        if match is None:
            raise DetectionError(f"head {word.strip()!r}; accepted: L<layer>H<head> or L<layer>, with commas")
        layer = int(match[1])
        if layer >= len(n_units):
            raise DetectionError(f"head {word.strip()}: the model has layers 0 to {len(n_units) - 1}")
        units = range(n_units[layer]) if match[2] is None else [int(match[2])]
        if units[-1] >= n_units[layer]:
            raise DetectionError(f"head {word.strip()}: layer {layer} has heads 0 to {n_units[layer] - 1}")
        found.setdefault(layer, set()).update(units)
        order.append((layer, units[0]))
    opening = desk.opening(0)
    first = (opening["layer"], opening["head"])
    first = first if first[1] in found.get(first[0], ()) else order[0]
    return {layer: tuple(sorted(found[layer])) for layer in sorted(found)}, first


def _strongest(desk: Desk, spec: PromptSpec) -> tuple[dict[int, tuple[int, ...]], tuple[int, int]]:
    """All units where they are few, else those with most weight on the induction targets of a prompt."""
    n_units = _n_units(desk)
    if sum(n_units) <= MOST_UNITS:
        opening = desk.opening(0)
        every = {layer: tuple(range(n)) for layer, n in enumerate(n_units)}
        return every, (opening["layer"], opening["head"])
    last, scores = len(desk.runs[0].steps) - 1, {}
    for layer, facts in enumerate(desk.runs[0].layers):
        for reading in facts.readings:
            options = {"layer": layer, "reading": reading, "units": kind_of_units(desk, layer)}
            sheet = desk.sheet(Selection(step=last, **options), spec)
            dest, src = np.array(induction_targets(sheet.prompt.tokens), dtype=int).reshape(-1, 2).T
            means = np.abs(sheet.weights[:, dest, src]).sum(-1) / max(len(dest), 1)
            for unit, mean in enumerate(means.tolist()):
                scores[layer, unit] = max(mean, scores.get((layer, unit), 0.0))
    best = sorted(scores, key=lambda place: -scores[place])[:N_STRONGEST]
    layers = sorted({layer for layer, _ in best})
    return {layer: tuple(sorted(unit for at, unit in best if at == layer)) for layer in layers}, best[0]
