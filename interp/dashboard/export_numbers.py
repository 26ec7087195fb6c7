"""The numbers of an exported page: weights as packed integers, costs, norms, and where they were measured."""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from interp.dashboard.captions import cut_caption, state_caption
from interp.dashboard.causal import cut_profiles
from interp.dashboard.desk import Desk
from interp.dashboard.export_choice import Choice, kind_of_units
from interp.dashboard.selection import Selection
from interp.dashboard.sheet import Sheet
from interp.errors import DetectionError
from interp.plan import LARGE_WEIGHTS

# Steps of a packed weight in the largest size of its map.
LEVELS = 32767
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One map's place; `signed` is the signed form of the reading's values."""

    prompt: int
    step: int
    layer: int
    reading: str
    signed: bool

    @property
    def name(self) -> str:
        return f"{self.prompt}.{self.step}.{self.layer}.{reading_name(self.reading, signed=self.signed)}"


def reading_name(reading: str, *, signed: bool) -> str:
    """A reading as the page offers it: the signed form of the values counts as one more."""
    return f"{reading}, signed" if signed else reading


def places(desk: Desk, choice: Choice) -> Iterator[tuple[Place, Sheet]]:
    """Every sheet of a choice; the signed form too where a reading has one."""
    for prompt, spec in enumerate(choice.specs):
        for step, index in enumerate(choice.steps):
            for layer in choice.units:
                for reading in desk.runs[choice.run].layers[layer].readings:
                    options = {
                        "layer": layer,
                        "reading": reading,
                        "units": kind_of_units(desk.runs[choice.run], layer),
                    }
                    at = {"prompt": prompt, "step": step, "layer": layer, "reading": reading}
                    sheet = desk.sheet(Selection(run=choice.run, step=index, **options), spec)
                    yield Place(**at, signed=False), sheet
                    if sheet.signed_possible:
                        signed = Selection(run=choice.run, step=index, values="signed", **options)
                        yield Place(**at, signed=True), desk.sheet(signed, spec)


def n_maps(desk: Desk, choice: Choice) -> int:
    """An upper bound on the maps of one prompt."""
    readings = {layer: len(desk.runs[choice.run].layers[layer].readings) for layer in choice.units}
    forms = {
        layer: n + ("ssm" in desk.runs[choice.run].layers[layer].readings) for layer, n in readings.items()
    }
    return len(choice.steps) * sum(forms[layer] * len(units) for layer, units in choice.units.items())


def packed(weights: Float[np.ndarray, "dest src"]) -> dict[str, Any]:
    """The lower triangle, row by row, as 16-bit integers in base64: weight = integer / 32767 * `limit`."""
    limit = float(np.abs(weights).max()) or 1.0
    below = weights[np.tril_indices(len(weights))]
    whole = np.rint(below / limit * LEVELS).astype("<i2")
    return {"limit": limit, "bytes": base64.b64encode(whole.tobytes()).decode("ascii")}


def cuts(desk: Desk, choice: Choice, progress: Progress) -> dict[str, Any]:
    """Costs of cutting each unit's edges on the standard probe, by checkpoint, layer, reading and unit.

    Empty with a remark for models that are too large or not in our own mixers.
    """
    run = desk.runs[choice.run]
    if run.load(choice.steps[-1]).subject.n_weights > LARGE_WEIGHTS:
        return {"remark": f"Cuts are left out: the model has more than {LARGE_WEIGHTS:,} weights."}
    wanted = [
        (step, index, layer, reading)
        for step, index in enumerate(choice.steps)
        for layer in choice.units
        for reading in run.layers[layer].readings
    ]
    found: dict[str, Any] = {}
    for done, (step, index, layer, reading) in enumerate(wanted):
        progress(done, len(wanted))
        options = {"layer": layer, "reading": reading, "units": kind_of_units(run, layer)}
        subject, units = run.load(index).subject, choice.units[layer]
        try:
            profiles = cut_profiles(run, subject, choice.prompts[0], cut_units=units, **options)
        except DetectionError as error:
            return {"remark": str(error)}
        for unit, profile in profiles.items():
            found[f"{step}.{layer}.{reading}.{unit}"] = {
                "profile": profile,
                "values": [_short(values) for values in profile.cut.values()],
                "errors": _short(profile.cut_se),
                "control": profile.random,
                "caption": cut_caption(profile),
            }
    return found


def states(desk: Desk, choice: Choice) -> dict[str, Any]:
    """Norms of the recurrent state after each token, by prompt, checkpoint and layer."""
    found: dict[str, Any] = {}
    for prompt, spec in enumerate(choice.specs):
        for step, index in enumerate(choice.steps):
            for layer in choice.units:
                reading = desk.runs[choice.run].layers[layer].readings[0]
                options = {
                    "layer": layer,
                    "reading": reading,
                    "units": kind_of_units(desk.runs[choice.run], layer),
                }
                try:
                    norms = desk.states(Selection(run=choice.run, step=index, **options), spec)
                except DetectionError as error:
                    return {"remark": str(error)}
                found[f"{prompt}.{step}.{layer}"] = {
                    "norms": norms,
                    "values": [_short(row) for row in norms.norms.tolist()],
                    "caption": state_caption(norms),
                }
    return found


def _short(values: Any) -> list[float]:
    """Five significant digits: what a picture can show."""
    return [float(f"{value:.5g}") for value in values]
