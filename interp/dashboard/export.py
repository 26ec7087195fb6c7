"""The dashboard as one self-contained page: chosen prompts, checkpoints and heads, without a server.

What the dashboard computes when asked is computed beforehand for every choice that the page offers; the same
view functions draw it. The page loads nothing, and is written whole or not at all.
"""

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from plotly.offline import get_plotlyjs

from interp.dashboard.choices import KIND_LABELS, READING_LABELS
from interp.dashboard.desk import Desk
from interp.dashboard.export_choice import MOST_STEPS, Choice, choose, kind_of_units
from interp.dashboard.export_figures import (
    cut_figure,
    map_figure,
    state_figure,
    training_figures,
    weight_figure,
    weight_values,
)
from interp.dashboard.export_numbers import LEVELS, cuts, n_maps, packed, places, states
from interp.dashboard.prompt import Prompt, PromptSpec
from interp.dashboard.scoring import scored
from interp.errors import DetectionError
from interp.figures.theme import MODES, theme_of
from interp.figures.token_text import visible
from interp.finite_outputs import check_finite_outputs
from interp.records import write_text
from interp.report import POLICY
from interp.report_figures import FigureSet
from interp.report_sections import escaped
from interp.unit_name import UNIT_LETTERS

MOST_BYTES = 15_000_000
# Kept for everything but weights: plotly.js, the script, figures, norms.
_REST = 5_500_000
# The same without plotly.js, of a second model.
_REST_OF_MODEL = 800_000
# Checkpoints that are tried where they are not named, until the page is small enough.
FEWER_STEPS = (MOST_STEPS, 7, 5, 4, 3, 2)
Progress = Callable[[str], None]


def export_page(
    paths: str | Sequence[str],
    file: str | Path,
    *,
    prompts: Sequence[str] = (),
    heads: str | None = None,
    steps: str | None = None,
    progress: Progress = lambda said: None,
    warn: Progress = lambda said: None,
) -> int:
    """Write the page of a run or model, or of two; returns its size in bytes.

    Args:
        paths: One or two, as `attention-dashboard PATH PATH2`.
        file: What stands there is replaced by the finished page, and by nothing else.
        prompts, heads, steps: See `choose`. Steps that are not named are as many as there is room for.
        progress: Called with a short sentence now and then.
        warn: Called with a sentence for each checkpoint that the page lacks because it cannot be read; the
            page says it too.

    Raises:
        DetectionError: a choice that is not there, a model whose outputs are not finite, or a page of more
            than 15 MB (it says how to make it smaller).
        CheckpointError, ConfigError: a path cannot be read.
        OSError: the file cannot be written.
    """
    folder = Path(file).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
    paths = [paths] if isinstance(paths, str) else paths
    progress(f"opening {' and '.join(paths)} ...")
    desk = Desk(paths)
    named = {"prompts": prompts, "heads": heads, "steps": steps}
    for most_steps in FEWER_STEPS:
        choices = choose(desk, most_steps=most_steps, **named)
        if steps is not None or _estimate(desk, choices) <= MOST_BYTES:
            break
    _check_size(desk, choices)
    _check_outputs(desk, choices)
    figures = FigureSet()
    data = {
        "models": [_model(desk, choice, figures, progress) for choice in choices],
        "reading_labels": READING_LABELS,
        "themes": {mode: asdict(theme_of(mode)) for mode in MODES},
        "levels": LEVELS,
    }
    left_out = [said for model in data["models"] for said in model.pop("left_out")]
    for said in left_out:
        warn(said)
    text = _page(desk, data, figures, left_out)
    size = len(text.encode("utf-8"))
    if size > MOST_BYTES:
        raise _too_large(size)
    write_text(file, text)
    return size


def _model(desk: Desk, choice: Choice, figures: FigureSet, progress: Progress) -> dict[str, Any]:
    """All that the page has of one model; `left_out`: a sentence for each checkpoint that it lacks."""
    training, left_out = _training(desk, choice, figures, progress)
    return {
        **_facts(desk, choice),
        **_maps(desk, choice, figures, progress),
        "cuts": _cuts(desk, choice, figures, progress),
        "states": _states(desk, choice, figures, progress),
        "training": training,
        "left_out": left_out,
    }


def _estimate(desk: Desk, choices: Sequence[Choice]) -> int:
    """Bytes of the page, from the number of its weights: two bytes each, in base64."""
    size = _REST + _REST_OF_MODEL * (len(choices) - 1)
    for choice in choices:
        triangles = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in choice.prompts)
        size += n_maps(desk, choice) * triangles * 8 // 3
    return size


def _check_size(desk: Desk, choices: Sequence[Choice]) -> None:
    """Refuse a choice whose weights alone are too much, before anything is computed."""
    size = _estimate(desk, choices)
    if size > MOST_BYTES:
        raise _too_large(size)


def _check_outputs(desk: Desk, choices: Sequence[Choice]) -> None:
    """Refuse a checkpoint whose numbers overflow."""
    for choice in choices:
        run = desk.runs[choice.run]
        for index in choice.steps:
            ids = torch.tensor([choice.prompts[0].ids])
            check_finite_outputs(run.load(index).subject, ids, f"{run.name}, step {run.steps[index]:,}")


def _too_large(size: int) -> DetectionError:
    return DetectionError(
        f"the page would have about {size / 1e6:.1f} MB; accepted: {MOST_BYTES // 10**6} MB; choose fewer "
        "with --heads or --steps, or fewer or shorter ones with --prompt"
    )


def _facts(desk: Desk, choice: Choice) -> dict[str, Any]:
    """What can be chosen, and what a start looks like."""
    run = desk.runs[choice.run]
    layers = []
    for layer, units in choice.units.items():
        facts, kind = run.layers[layer], kind_of_units(run, layer)
        letter = UNIT_LETTERS.get(kind)
        names = [f"L{layer}" + ("" if letter is None else f"{letter}{unit}") for unit in units]
        label = f"{layer} · {KIND_LABELS.get(facts.kind, facts.kind)}"
        layers.append(
            {"layer": layer, "label": label, "units": units, "names": names, "n_units": facts.n_units[kind]}
        )
    return {
        "name": run.name,
        "steps": [run.steps[index] for index in choice.steps],
        "layers": layers,
        "first": choice.first,
        "prompts": [_prompt(s, p) for s, p in zip(choice.specs, choice.prompts, strict=True)],
    }


def _prompt(spec: PromptSpec, prompt: Prompt) -> dict[str, Any]:
    label = {
        "probe": f"random tokens, {spec.period} × {spec.repeats}",
        "sample": f"held-out sample {spec.sample}",
        "typed": visible(spec.text.strip(), limit=60).replace("␣", " ") or "typed",
    }[spec.kind]
    tokens = [visible(token) for token in prompt.tokens]
    return {"label": label, "ids": prompt.ids, "tokens": tokens, "notes": prompt.notes}


def _maps(desk: Desk, choice: Choice, figures: FigureSet, progress: Progress) -> dict[str, Any]:
    """Packed weights, bars of weight by offset, and the empty figures that they are put into."""
    maps: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for place, sheet in places(desk, choice):
        run = desk.runs[choice.run]
        progress(f"{run.name}, weights: step {run.steps[choice.steps[place.step]]:,}, layer {place.layer}")
        signed, units = bool(sheet.weights.min() < 0), choice.units[place.layer]
        maps[place.name] = {
            "quantity": sheet.quantity,
            "signed": signed,
            "units": {unit: packed(sheet.of(unit)) for unit in units},
        }
        name = f"map-{choice.run}-{place.prompt}-{'signed' if signed else 'plain'}"
        if name not in figures.figures:
            map_figure(figures, name, sheet)
        name = f"weight-{choice.run}-{place.prompt}"
        if name in figures.figures or weight_figure(figures, name, sheet):
            weights[place.name] = {unit: weight_values(sheet, unit) for unit in units}
    return {"maps": maps, "weights": weights}


def _cuts(desk: Desk, choice: Choice, figures: FigureSet, progress: Progress) -> dict[str, Any]:
    found = cuts(desk, choice, lambda done, total: progress(f"cuts: {done + 1} of {total}"))
    for key, entry in found.items():
        if key == "remark":
            continue
        name = f"cut-{choice.run}-{key.split('.')[1]}"
        profile = entry.pop("profile")
        if name not in figures.figures:
            cut_figure(figures, name, profile)
    return found


def _states(desk: Desk, choice: Choice, figures: FigureSet, progress: Progress) -> dict[str, Any]:
    progress("states")
    found = states(desk, choice)
    for key, entry in found.items():
        if key == "remark":
            continue
        prompt, _, layer = key.split(".")
        norms, name = entry.pop("norms"), f"state-{choice.run}-{prompt}-{layer}"
        if name not in figures.figures:
            state_figure(figures, name, norms, choice.prompts[int(prompt)].tokens)
    return found


def _training(
    desk: Desk, choice: Choice, figures: FigureSet, progress: Progress
) -> tuple[dict[str, Any] | None, list[str]]:
    """Scores of all checkpoints, not of the chosen ones alone (None for a single one); what is left out."""
    run = desk.runs[choice.run]
    if len(run.steps) < 2:
        return None, [f"{run.name}: left out, step {step:,}: {why}" for step, why in run.refused.items()]

    def said(done: int, total: int, _: int) -> None:
        progress(f"training: checkpoint {min(done + 1, total)} of {total}")

    report, left_out = scored(run, said)
    return training_figures(figures, report, choice.run), [f"{run.name}: left out, {why}" for why in left_out]


def _page(desk: Desk, data: dict[str, Any], figures: FigureSet, left_out: Sequence[str]) -> str:
    here = Path(__file__).parent
    shell, style, script = ((here / f"export.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    name, path = (" and ".join(getattr(run, part) for run in desk.runs) for part in ("name", "path"))
    plotly = get_plotlyjs().replace("</script", "<\\/script")
    parts = {
        "TITLE": escaped(f"Attention of {name}"),
        "PATH": escaped(path),
        "LEFT_OUT": "".join(f'<p class="note">{escaped(said)}</p>' for said in left_out),
        "POLICY": POLICY,
        "STYLE": style,
        "DATA": inert(data),
        "FIGURES": figures.to_script(),
        "PLOTLY": plotly,
        "VIEWS": (here / "export_views.js").read_text("utf-8"),
        "SCRIPT": script,
    }
    # In one pass: what is put in is not searched again.
    pieces = shell.split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def inert(data: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
