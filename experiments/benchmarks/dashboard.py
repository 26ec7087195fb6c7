"""Time of the dashboard's answers on models of the demo's shapes, at T = 256, after the page has opened.

Random checkpoints of the four demo models are opened as a run folder. What a browser sends when something is
chosen is sent to the app, request after request, and the sum of their times is one answer.

    python -m experiments.benchmarks.dashboard [--answers 20] [--threads 1]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.contest import markdown_table, write_results
from experiments.runs import load_run
from interp.dashboard.app import make_app
from interp.dashboard.desk import Desk
from models import LanguageModel, save_model

MIXERS = ("softmax", "linear", "mamba1", "mamba2")
# Tokens of the prompt: a probe of `PERIOD` tokens, repeated.
PERIOD, REPEATS = 32, 8
KINDS = ("new checkpoint", "new head", "new prompt", "seen before", "token click")
HEADINGS, STATUS, MAPS, TEXTS = "view", "prompt-status", "a-map", "strips"
NOTES = """\
Milliseconds, median of {answers} answers: by the clock (of processor time); T = {tokens}. An answer is
everything that the server computes and sends after one choice, request after request on one thread,
through the app's own client; what a browser adds is not in it. New checkpoint: read from disk, run,
drawn. New head: another unit of the layer (the other layer where it has one unit: the softmax demo, and
Mamba-1, whose map is of the whole layer). New prompt: tokens that were not read before. Seen before: a
checkpoint of those. Token click: the text alone. No answer was prepared in the background. Models of the
demo's shapes with random weights, the reading that the page opens on; dash {dash}, plotly {plotly}. Load
of the machine over the minute before and after: {before:.2f}, {after:.2f}."""


def write_run(folder: Path, mixer: str, n: int) -> None:
    """n checkpoints of a demo model, each with weights of its own."""
    config = load_run(f"demo-{mixer}").model
    for step in range(n):
        model = LanguageModel(config)
        model.reset_parameters(torch.Generator().manual_seed(step))
        save_model(folder / f"step_{step:08d}", model)


class Cost(NamedTuple):
    """Milliseconds of one answer: by the clock, and of processor time, which other programs hardly change."""

    wall: float
    processor: float


class Window:
    """A window of the app: what is chosen in it, and the requests that a choice makes."""

    def __init__(self, folder: Path):
        desk = Desk([str(folder)])
        self._app = make_app(desk)
        self._client = self._app.server.test_client()
        opening = desk.opening(0)
        facts = desk.runs[0].layers[opening["layer"]]
        self.units = next(iter(facts.n_units))
        self.n_heads, self.n_layers = facts.n_units[self.units], len(desk.runs[0].layers)
        self.last = len(desk.runs[0].steps) - 1
        self._selection = {**opening, "run": 0, "step": self.last, "units": self.units, "values": "scored"}
        self._prompt = {"kind": "probe", "period": PERIOD, "repeats": REPEATS, "seed": 0, "sample": 0}
        self._selected: int | None = None
        for path in ("/", "/_dash-layout", "/_dash-dependencies"):
            self._client.get(path)
        self.choose()

    def choose(self, **changed: int) -> Cost:
        """Choose another checkpoint, layer or head; what it took until all of it was answered."""
        self._selection |= changed
        return self._answer(HEADINGS, STATUS, MAPS, TEXTS)

    def read(self, seed: int) -> Cost:
        """Another prompt."""
        self._prompt, self._selected = {**self._prompt, "seed": seed}, None
        return self._answer(STATUS, MAPS, TEXTS)

    def click(self, position: int) -> Cost:
        """A click on a token."""
        self._selected = position
        return self._answer(TEXTS)

    def _answer(self, *wanted: str) -> Cost:
        values = {
            "a-selection.data": self._selection,
            "prompt.data": self._prompt,
            "attention-request.data": {"a": self._selection, "prompt": self._prompt, "mode": "light"},
            "targets.value": ["on"],
            "contrast.value": "largest",
            "room.data": 900,
            "selected.data": self._selected,
        }
        start, spent = time.perf_counter(), time.process_time()
        for name in wanted:
            answer = self._client.post("/_dash-update-component", json=self._body(name, values))
            if answer.status_code != 200 or not answer.get_data():
                raise SystemExit(f"{name}: status {answer.status_code}")
        return Cost(1000 * (time.perf_counter() - start), 1000 * (time.process_time() - spent))

    def _body(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """The request of the callback whose first output belongs to a component of that name."""
        output, found = next(
            (key, entry) for key, entry in self._app.callback_map.items()
            if _first(entry) == name and "@" not in key
        )  # fmt: skip
        inputs = [{**one, "value": values.get(f"{one['id']}.{one['property']}")} for one in found["inputs"]]
        outputs = [{"id": one.component_id, "property": one.component_property} for one in _outputs(found)]
        changed = [f"{inputs[0]['id']}.{inputs[0]['property']}"]
        return {"output": output, "outputs": outputs, "inputs": inputs, "changedPropIds": changed}


def _outputs(entry: dict[str, Any]) -> list[Any]:
    return entry["output"] if isinstance(entry["output"], list) else [entry["output"]]


def _first(entry: dict[str, Any]) -> str:
    """What the callback draws: the view of a heading, else the component."""
    component = _outputs(entry)[0].component_id
    return "view" if isinstance(component, dict) else component


def answers(window: Window, n: int) -> Iterator[tuple[str, Cost]]:
    """Kind and cost of n answers of each kind."""
    for step in range(n):
        yield "new checkpoint", window.choose(step=step)
    for step in range(n):
        yield "seen before", window.choose(step=step)
    window.choose(step=window.last)
    for k in range(n):
        # A demo of one unit a layer: the other layer, whose map is there after the first time.
        place = {"head": k % window.n_heads} if window.n_heads > 1 else {"layer": k % window.n_layers}
        yield "new head", window.choose(**place)
    for seed in range(1, n + 1):
        yield "new prompt", window.read(seed)
    for position in range(100, 100 + n):
        yield "token click", window.click(position)


def measure(mixer: str, n: int) -> dict[str, list[Cost]]:
    """Costs by kind of answer."""
    found: dict[str, list[Cost]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), mixer, n + 1)
        for kind, cost in answers(Window(Path(folder)), n):
            found[kind].append(cost)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure all four and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    before = os.getloadavg()[0]
    rows = []
    for mixer in MIXERS:
        found = measure(mixer, options.answers)
        medians = [[statistics.median(part) for part in zip(*found[kind], strict=True)] for kind in KINDS]
        cells = [f"{wall:.0f} ({processor:.0f})" for wall, processor in medians]
        rows.append([mixer, *cells])
        print(mixer, *cells, sep="  ", flush=True)
    table = markdown_table(["mixer", *KINDS], rows)
    used: dict[str, Any] = {name: version(name) for name in ("dash", "plotly")}
    used |= {"before": before, "after": os.getloadavg()[0], "answers": options.answers}
    notes = NOTES.format(tokens=PERIOD * REPEATS, **used)
    write_results("dashboard-cpu", "Answers of the dashboard", table, notes)
    print(table, notes, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
