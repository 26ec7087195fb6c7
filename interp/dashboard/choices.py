"""What the controls of one side offer, given what is chosen: options, and values that stay where they can."""

from collections.abc import Sequence
from typing import Any

from interp.dashboard.quotation import quoted, shortened
from interp.dashboard.run import LayerFacts, Run
from interp.dashboard.selection import Selection
from interp.errors import DetectionError
from interp.figures.step_axis import short

READING_LABELS = {
    "pattern": "pattern: attention of the mixer",
    "ssm": "ssm: the recurrence alone",
    "block": "block: from the layer's input",
}
UNIT_LABELS = {"head": "heads", "layer": "the whole layer", "state": "state indices"}
KIND_LABELS = {"softmax": "softmax", "linear": "linear", "mamba1": "Mamba-1", "mamba2": "Mamba-2"}
_MOST_MARKS = 6


def layer_options(run: Run) -> list[dict[str, Any]]:
    """Layers with the kind of their mixer."""
    return [
        {"label": f"{n} · {KIND_LABELS.get(facts.kind, facts.kind)}", "value": n}
        for n, facts in enumerate(run.layers)
    ]


def reading_options(facts: LayerFacts) -> list[dict[str, str]]:
    """Readings of a layer."""
    return [{"label": READING_LABELS.get(name, name), "value": name} for name in facts.readings]


def unit_options(facts: LayerFacts) -> list[dict[str, str]]:
    """Kinds of unit of a layer: heads, or for Mamba-1 the layer, groups of channels and state indices."""
    return [{"label": _unit_label(name, n), "value": name} for name, n in facts.n_units.items()]


def head_options(facts: LayerFacts, units: str) -> list[dict[str, Any]]:
    """The units themselves."""
    kind = units.split(":")[0]
    name = {"head": "", "state": "state ", "cluster": "group "}.get(kind)
    return [
        {"label": "whole layer" if name is None else f"{name}{n}", "value": n}
        for n in range(facts.n_units[units])
    ]


def step_marks(steps: Sequence[int]) -> dict[int, str]:
    """A few places of the slider, by index, with their training steps; labels that do not collide."""
    last = len(steps) - 1
    stride = max(1, -(-last // (_MOST_MARKS - 1)))
    places = [*range(0, last - stride // 2, stride), last] if last else [0]
    return {place: short(steps[place]) for place in places}


def kept(value: Any, options: Sequence[dict[str, Any]]) -> Any:
    """The value where it is among the options, else the first."""
    return value if value in [option["value"] for option in options] else options[0]["value"]


def check(run: Run, selection: Selection) -> None:
    """Refuse what a run does not offer: it may be of another window, or made by hand.

    Raises:
        DetectionError: no such checkpoint, layer, reading, kind of units, or unit.
    """
    if not 0 <= selection.step < len(run.steps):
        raise DetectionError(
            f"{run.name} has checkpoints 0..{len(run.steps) - 1}; asked for {shortened(str(selection.step))}"
        )
    layers, layer = run.layers, selection.layer
    if not 0 <= layer < len(layers):
        raise DetectionError(f"layer {shortened(str(layer))}: the model has layers 0..{len(layers) - 1}")
    facts = layers[layer]
    for name, offered in (("reading", facts.readings), ("units", tuple(facts.n_units))):
        value = getattr(selection, name)
        if value not in offered:
            raise DetectionError(
                f"layer {layer} has no {name} {quoted(value)}; accepted: {', '.join(offered)}"
            )
    n_units = facts.n_units[selection.units]
    if not 0 <= selection.head < n_units:
        head = shortened(str(selection.head))
        raise DetectionError(f"layer {layer} has {selection.units}s 0..{n_units - 1}; asked for {head}")


def _unit_label(name: str, n: int) -> str:
    return UNIT_LABELS.get(name, f"{n} groups of channels")
