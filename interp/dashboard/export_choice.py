"""What an exported page holds: prompts, checkpoints, and units of layers, from the words of the command."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interp.dashboard.desk import Desk
from interp.dashboard.messages import attempt
from interp.dashboard.opening import default_prompt
from interp.dashboard.prompt import Prompt, PromptSpec, sample_windows
from interp.dashboard.quotation import MOST, quoted, shortened, whole_number
from interp.dashboard.run import Run
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
    """Of one model, the desk's `run`: specifications and tokens of the prompts, indices of checkpoints, units
    of layers, and the (layer, unit) that the page opens on."""

    run: int
    specs: tuple[PromptSpec, ...]
    prompts: tuple[Prompt, ...]
    steps: tuple[int, ...]
    units: dict[int, tuple[int, ...]]
    first: tuple[int, int]


def choose(
    desk: Desk,
    *,
    prompts: Sequence[str] = (),
    heads: str | None = None,
    steps: str | None = None,
    most_steps: int = MOST_STEPS,
) -> tuple[Choice, ...]:
    """The choice for each run of a desk.

    Args:
        prompts: Texts (or ids, without a tokenizer); default a repeated probe and, where all runs have
            held-out windows, the first of them.
        heads: `L0H1,L1H3,L2` (a layer alone is all of its units); default all up to 24 in all, else the 12
            that put most weight on induction targets. Holds for every run.
        steps: As `detect-induction --steps`; default at most `most_steps` of those that can be read, spread
            evenly with the first and the last. Holds for every run.

    Raises:
        DetectionError: a head, step or prompt that is not there, or a prompt above 512 tokens.
    """
    specs = tuple(PromptSpec(kind="typed", text=text) for text in prompts) or _default_specs(desk)
    return tuple(_of_run(desk, run, specs, heads, steps, most_steps) for run in range(len(desk.runs)))


def _default_specs(desk: Desk) -> tuple[PromptSpec, ...]:
    subjects = [run.load(run.newest()).subject for run in desk.runs]
    # The shortest fits all.
    probes = map(default_prompt, desk.runs, subjects)
    probe = min(probes, key=lambda spec: spec.period * spec.repeats)
    sampled = all(
        run.source.windows is not None and sample_windows(run, subject) is not None
        for run, subject in zip(desk.runs, subjects, strict=True)
    )
    return (probe, PromptSpec(kind="sample")) if sampled else (probe,)


def _of_run(
    desk: Desk,
    index: int,
    specs: tuple[PromptSpec, ...],
    heads: str | None,
    steps: str | None,
    most_steps: int,
) -> Choice:
    run = desk.runs[index]
    last = Selection(
        run=index,
        step=run.newest(),
        reading=run.layers[0].readings[0],
        units=kind_of_units(run, 0),
    )
    made = tuple(desk.prompt(last, spec) for spec in specs)
    for prompt in made:
        if len(prompt) > MOST_TOKENS:
            raise DetectionError(f"a prompt has {len(prompt):,} tokens; an exported page takes {MOST_TOKENS}")
    named = {step: place for place, step in enumerate(run.steps)}
    chosen = _spread_readable(run, most_steps) if steps is None else _selected(run, steps)
    places = tuple(named[step] for step in chosen)
    units, first = _strongest(desk, index, specs[0]) if heads is None else _named(desk, index, heads)
    return Choice(run=index, specs=specs, prompts=made, steps=places, units=units, first=first)


def _selected(run: Run, steps: str) -> list[int]:
    """As `select_steps`, whose messages quote a part whole."""
    for part in steps.split(","):
        if len(part.strip()) > MOST:
            raise DetectionError(
                f"steps {quoted(part.strip())}: accepted are all, last, numbers, and ranges low:high, with "
                f"commas between; {run.name} has {len(run.steps)}, up to {run.steps[-1]}"
            )
    return select_steps(run.steps, steps)


def _spread(steps: Sequence[int], most: int) -> list[int]:
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place)] for place in np.linspace(0, len(steps) - 1, most)]


def _spread_readable(run: Run, most: int) -> list[int]:
    """Steps spread evenly over those whose checkpoints can be read."""
    left = list(run.steps)
    while True:
        chosen = _spread(left, most)
        bad = [step for step in chosen if attempt(lambda step=step: run.load(run.steps.index(step)))[1]]
        if not bad:
            return chosen
        left = [step for step in left if step not in bad]


def kind_of_units(run: Run, layer: int) -> str:
    """The kind of unit that is exported of a layer: heads, or the whole layer of Mamba-1."""
    return next(iter(run.layers[layer].n_units))


def _n_units(run: Run) -> list[int]:
    return [facts.n_units[kind_of_units(run, n)] for n, facts in enumerate(run.layers)]


def _named(desk: Desk, index: int, heads: str) -> tuple[dict[int, tuple[int, ...]], tuple[int, int]]:
    """Units by layer, out of `L0H1,L1`, and the one to open on: the dashboard's, or the first named."""
    n_units, found, order = _n_units(desk.runs[index]), {}, []
    among = "" if len(desk.runs) == 1 else f" in {desk.runs[index].name}"
    for word in heads.split(","):
        match = _UNIT.fullmatch(word.strip())
        if match is None:
            raise DetectionError(
                f"head {quoted(word.strip())}; accepted: L<layer>H<head> or L<layer>, with commas"
            )
        layer, named = whole_number(match[1], len(n_units)), shortened(word.strip())
        if layer >= len(n_units):
            raise DetectionError(f"head {named}: the model has layers 0 to {len(n_units) - 1}{among}")
        units = range(n_units[layer]) if match[2] is None else [whole_number(match[2], n_units[layer])]
        if units[-1] >= n_units[layer]:
            there = f"layer {layer} has heads 0 to {n_units[layer] - 1}"
            raise DetectionError(f"head {named}: {there}{among}")
        found.setdefault(layer, set()).update(units)
        order.append((layer, units[0]))
    opening = desk.opening(index)
    first = (opening["layer"], opening["head"])
    first = first if first[1] in found.get(first[0], ()) else order[0]
    return {layer: tuple(sorted(found[layer])) for layer in sorted(found)}, first


def _strongest(
    desk: Desk, index: int, spec: PromptSpec
) -> tuple[dict[int, tuple[int, ...]], tuple[int, int]]:
    """All units where they are few, else those with most weight on the induction targets of a prompt."""
    run = desk.runs[index]
    n_units = _n_units(run)
    if sum(n_units) <= MOST_UNITS:
        opening = desk.opening(index)
        every = {layer: tuple(range(n)) for layer, n in enumerate(n_units)}
        return every, (opening["layer"], opening["head"])
    last, scores = run.newest(), {}
    for layer, facts in enumerate(run.layers):
        for reading in facts.readings:
            options = {"layer": layer, "reading": reading, "units": kind_of_units(run, layer)}
            sheet = desk.sheet(Selection(run=index, step=last, **options), spec)
            dest, src = np.array(induction_targets(sheet.prompt.tokens), dtype=int).reshape(-1, 2).T
            means = np.abs(sheet.weights[:, dest, src]).sum(-1) / max(len(dest), 1)
            for unit, mean in enumerate(means.tolist()):
                scores[layer, unit] = max(mean, scores.get((layer, unit), 0.0))
    best = sorted(scores, key=lambda place: -scores[place])[:N_STRONGEST]
    layers = sorted({layer for layer, _ in best})
    return {layer: tuple(sorted(unit for at, unit in best if at == layer)) for layer in layers}, best[0]
