"""What the server holds for all windows: the open runs, and what was computed from them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from interp.dashboard import choices
from interp.dashboard.ahead import Ahead
from interp.dashboard.cache import BoundedCache
from interp.dashboard.causal import CutProfile, cut_profile
from interp.dashboard.messages import attempt
from interp.dashboard.mixer_inputs import MixerInputs
from interp.dashboard.opening import opening
from interp.dashboard.prompt import Prompt, PromptSpec, make_prompt, shared_ids
from interp.dashboard.quotation import shortened
from interp.dashboard.run import Loaded, Run, model_cache
from interp.dashboard.scoring import Scoring
from interp.dashboard.selection import Selection
from interp.dashboard.sheet import Sheet, read_sheet
from interp.dashboard.states import StateNorms, state_norms
from interp.errors import DetectionError
from interp.plan import LARGE_WEIGHTS
from interp.subject import LanguageModelSubject, Subject
from interp.unit_name import UNIT_LETTERS

MOST_SHEET_BYTES = 256 << 20
MOST_INPUT_BYTES = 128 << 20


class Desk:
    """Open runs. Every method is a function of its arguments and of the files on disk.

    Args:
        ahead: Read the checkpoints beside a chosen one in the background (small models).

    Raises:
        DetectionError, CheckpointError, ConfigError: a path that cannot be read; its newest checkpoint that
            can be is loaded at once, so that this is said before the page opens.
    """

    def __init__(self, paths: Sequence[str], *, ahead: bool = False):
        models = model_cache()
        self.runs = tuple(Run(path, models=models) for path in paths)
        for run in self.runs:
            _ = run.layers
        self.scoring = Scoring()
        self.ahead = Ahead() if ahead else None
        self._sheets = BoundedCache(MOST_SHEET_BYTES, lambda sheet: sheet.n_bytes)
        self._inputs = BoundedCache(MOST_INPUT_BYTES, lambda inputs: inputs.n_bytes)
        self._small = BoundedCache(512)

    def look_again(self) -> None:
        """Take in checkpoints that were written since; a folder that cannot be listed stays as it was."""
        for run in self.runs:
            attempt(run.look_again)

    @cached_property
    def drawable(self) -> tuple[int, ...] | None:
        """What probes draw from where two models are open and mean the same by an id; else None."""
        last = [run.load(run.newest()).subject for run in self.runs]
        return shared_ids(*last) if len(last) == 2 else None

    def run(self, selection: Selection) -> Run:
        """The run that is chosen, which offers all the rest that is."""
        found = self.run_at(selection.run)
        choices.check(found, selection)
        return found

    def run_at(self, index: int) -> Run:
        """The run at a place.

        Raises:
            DetectionError: there is none.
        """
        if not 0 <= index < len(self.runs):
            raise DetectionError(f"model {shortened(str(index))}; open are 0..{len(self.runs) - 1}")
        return self.runs[index]

    def load(self, selection: Selection) -> Loaded:
        """The chosen checkpoint's model."""
        return self.run(selection).load(selection.step)

    def prompt(self, selection: Selection, spec: PromptSpec) -> Prompt:
        """The prompt's tokens for the chosen model."""
        loaded = self.load(selection)
        key = ("prompt", self.run(selection).path, spec)

        def make(subject: Subject) -> Prompt:
            return make_prompt(self.run(selection), subject, spec, drawable=self.drawable)

        return self._small.get(key, lambda: make(loaded.subject))

    def sheet(self, selection: Selection, spec: PromptSpec) -> Sheet:
        """Weights of all units of the chosen layer."""
        prompt, key = self.prompt(selection, spec), self._key(selection, spec)
        options = {name: getattr(selection, name) for name in ("layer", "reading", "units", "values")}

        def make() -> Sheet:
            loaded = self.load(selection)
            inputs = self._inputs_of(selection, spec, prompt, loaded)
            if isinstance(loaded.subject, LanguageModelSubject):
                # A mixer's reading takes no hooks: it need not wait for the cuts of another window.
                return read_sheet(loaded.subject, prompt, inputs=inputs, **options)
            with loaded.lock:
                return read_sheet(loaded.subject, prompt, **options)

        return self._sheets.get((*key, *options.values()), make)

    def prepare(self, chosen: Sequence[Selection], spec: PromptSpec) -> None:
        """Have the next and the former checkpoint of each side read before they are asked for."""
        if self.ahead is None:
            return
        beside = [
            replace(one, step=one.step + side)
            for side in (1, -1)
            for one in chosen
            if 0 <= one.step + side < len(self.run(one).steps)
            and self.load(one).subject.n_weights <= LARGE_WEIGHTS
        ]
        # An error is said when the checkpoint is asked for.
        self.ahead.wish([lambda one=one: attempt(lambda: self.sheet(one, spec)) for one in beside])

    def cuts(self, selection: Selection, spec: PromptSpec, measured_on: str) -> CutProfile:
        """The causal offset profile of the chosen unit."""
        prompt = self.prompt(selection, spec)
        options = {**_cut_options(selection), "measured_on": measured_on}
        key = self._cut_key(selection, spec, measured_on)

        def make() -> CutProfile:
            loaded = self.load(selection)
            with loaded.lock:
                return cut_profile(self.run(selection), loaded.subject, prompt, **options)

        return self._small.get(key, make)

    def waits_for_cuts(self, selection: Selection, spec: PromptSpec, measured_on: str) -> int | None:
        """The number of weights of a model whose cuts would take long and are not begun; else None."""
        n_weights = self.load(selection).subject.n_weights
        begun = self._small.begun(self._cut_key(selection, spec, measured_on))
        return n_weights if n_weights > LARGE_WEIGHTS and not begun else None

    def states(self, selection: Selection, spec: PromptSpec) -> StateNorms:
        """Norms of the chosen layer's recurrent state."""
        prompt = self.prompt(selection, spec)
        key = ("states", *self._key(selection, spec), selection.layer, selection.units)

        def make() -> StateNorms:
            loaded = self.load(selection)
            options = {"layer": selection.layer, "units": selection.units}
            options["inputs"] = self._inputs_of(selection, spec, prompt, loaded)
            with loaded.lock:
                return state_norms(loaded.subject, prompt, **options)

        return self._small.get(key, make)

    def opening(self, index: int) -> dict[str, Any]:
        """What a new window shows of a run: the unit that reads most at an offset from earlier copies."""
        run = self.runs[index]
        newest = run.newest()
        loaded = run.load(newest)
        with loaded.lock:
            return self._small.get(("opening", *run.key(newest)), lambda: opening(run, loaded.subject))

    def unread(self) -> list[str]:
        """A sentence for each checkpoint that windows do not open on because it cannot be read."""
        return [
            f"{run.name}: step {step:,} cannot be read: {why}"
            for run in self.runs
            for step, why in run.unreadable(run.newest() + 1).items()
        ]

    def heading(self, selection: Selection) -> str:
        """`demo-softmax · step 750 · L1H0 · pattern`."""
        run = self.run(selection)
        unit = {"layer": "layer", "state": "state"}.get(selection.units, selection.units.split(":")[0])
        letter = UNIT_LETTERS.get(unit)
        name = f"L{selection.layer}" + ("" if letter is None else f"{letter}{selection.head}")
        step = [f"step {run.steps[selection.step]:,}"] if len(run.steps) > 1 else []
        return " · ".join([run.name, *step, name, selection.reading])

    def _inputs_of(
        self, selection: Selection, spec: PromptSpec, prompt: Prompt, loaded: Loaded
    ) -> MixerInputs:
        """Inputs of the layers' mixers, so that another layer does not run those below it again."""
        return self._inputs.get(self._key(selection, spec), lambda: MixerInputs(prompt.ids, loaded.lock))

    def _cut_key(self, selection: Selection, spec: PromptSpec, measured_on: str) -> tuple:
        of_prompt = self._key(selection, spec if measured_on == "prompt" else None)
        return ("cuts", *of_prompt, *_cut_options(selection).values(), measured_on)

    def _key(self, selection: Selection, spec: PromptSpec | None) -> tuple:
        return (*self.run(selection).key(selection.step), None if spec is None else json.dumps(vars(spec)))


def _cut_options(selection: Selection) -> dict[str, Any]:
    names = {"layer": "layer", "head": "unit", "reading": "reading", "units": "units"}
    return {theirs: getattr(selection, ours) for ours, theirs in names.items()}
