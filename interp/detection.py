"""Find induction heads: every instrument on one checkpoint or on a series of them, one in memory at a
time.
"""

import dataclasses
import hashlib
import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp import edge_scores
from interp import in_context_learning as icl
from interp.attention_maps import attention_maps
from interp.checkpoint_run import CheckpointRun, Progress, Work
from interp.errors import DetectionError
from interp.finished import FinishedFolder
from interp.measurement import begin_measuring
from interp.phase_transition import from_checkpoints
from interp.plan import LARGE_WEIGHTS, Plan, corpus_windows, make_plan
from interp.records import SCORES, CheckpointScores, DetectionReport
from interp.sources import Source, open_source
from interp.subject import LanguageModelSubject, Subject
from models.whole import is_whole

# Of sequences, windows, tokens in a period, repeats.
MOST = 100_000
# Most window tokens read at every checkpoint, by size of the model.
_WINDOW_TOKENS, _WINDOW_TOKENS_LARGE = 1 << 14, 1 << 12


def detect(
    target: Any,
    *,
    steps: Sequence[int] | int | str | None = None,
    scores: Sequence[str] | None = None,
    n_sequences: int | None = None,
    period: int | None = None,
    repeats: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    mamba_units: str | None = None,
    bos: int | None | str = "auto",
    text: str | None = None,
    via: str = "auto",
    n_windows: int | None = None,
    n_maps: int = 6,
    linear_memory: bool | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
) -> DetectionReport:
    """Score every head of every checkpoint, and date the phase transition of a series.

    Args:
        target: A path (checkpoint, run folder, Hugging Face folder, `.gguf`), a LanguageModel or a
            TransformerBridge.
        steps: Which checkpoints of a series; see `sources.select_steps`.
        scores: Some of `SCORES`; None for all, but `causal` only for our own models and for others up to 20 M
            weights. What is left out is None in the records.
        period, repeats, n_sequences, seed: The probe: `period` distinct random tokens, `repeats` times. By
            default 16 sequences of 25 x 4 (losses: 32 of 50 x 2), shrunk (and noted) where vocabulary or
            context demand it, and to the training sequences' length for a run's folder and for what
            `load_model` read from it. A model built in memory knows no such length, as a note says.
        mamba_units: `layer` (default), `state` or `cluster:K` as the units of Mamba-1 layers.
        bos: `auto` for the model's own; an id; or None for none.
        text: File or folder to take text windows from; by default the run's evaluation windows, and for
            models that bring a tokenizer but no windows the standard library.
        via: Models of other projects: `mixers` (read into our own mixers), `bridge` (TransformerLens's,
            softmax only), or `auto`: our mixers where there is a reader for the architecture, the bridge for
            the rest.
        n_windows: How many text windows; by default what fits 16,384 tokens (4,096 for models above 20 M
            weights).
        n_maps: Attention maps kept, of the strongest units of the last checkpoint.
        linear_memory: Score chosen edges instead of whole patterns, with the same numbers and no attention
            maps; None does so for probes longer than `edge_scores.LINEAR_MEMORY_ABOVE`.
        resume: A folder that keeps the scores of each finished checkpoint, and from which a detection with
            the same settings takes those of the same weights instead of computing them again.
        progress: Called as `progress(done, total, step)` before each checkpoint and at the end.

    Raises:
        DetectionError, models.CheckpointError, models.ConfigError: one line on what cannot be read, and why.
    """
    started = time.perf_counter()
    wanted = _checked_scores(scores)
    least = {"n_sequences": (n_sequences, 1), "period": (period, 1), "repeats": (repeats, 2)}
    for name, (value, lowest) in {**least, "n_windows": (n_windows, 1)}.items():
        if value is not None and not (is_whole(value) and lowest <= value <= MOST):
            raise DetectionError(
                f"{name} {value}; accepted: None or a whole number from {lowest} to {MOST:,}"
            )
    # The loss curves take the next seed.
    if not is_whole(seed) or not 0 <= seed < (1 << 63) - 1:
        raise DetectionError(f"seed {seed}; accepted: 0 or a positive number below 2^63 - 1, a whole one")
    if not is_whole(n_maps) or n_maps < 0:
        raise DetectionError(f"n_maps {n_maps}; accepted: 0 or a positive whole number")
    source = open_source(target, device=_checked_device(device), bos=bos, steps=steps, via=via)
    missing: list[int] = []
    chosen = list(source.at_steps(steps, missing if source.lenient else None))
    trained = None if source.windows is None else source.windows.shape[1]
    probe = {
        "period": period,
        "repeats": repeats,
        "n_sequences": n_sequences,
        "seed": seed,
        "trained": trained,
    }
    settings = {
        "scores": sorted(wanted),
        "probe": [n_sequences, period, repeats, seed, bos],
        "via": via,
        "text": [text, n_windows, _window_hash(source.windows)],
        "units": mamba_units,
        "maps": n_maps,
    }
    run = CheckpointRun(
        work=Work(
            plan=lambda subject: _with_memory_note(
                _with_causal_choice(
                    subject,
                    _planned(
                        subject, _windows(subject, source, text, n_windows, wanted), probe, mamba_units
                    ),
                    wanted,
                    asked=scores is not None,
                ),
                linear_memory,
            ),
            measure=lambda subject, plan, checkpoint: begin_measuring(
                subject, plan, checkpoint, wanted, mamba_units, linear_memory
            ),
            maps=lambda subject, plan, scored: attention_maps(
                subject,
                plan,
                scored,
                0 if edge_scores.chosen(plan.probe, linear_memory) else n_maps,
                mamba_units,
            ),
            overlap=torch.device(device).type == "cuda" and all(c.prepare is not None for c in chosen),
        ),
        finished=None if resume is None else FinishedFolder(resume, settings),
        lenient=source.lenient,
        progress=progress,
    )
    found = run(chosen)
    done, facts = [finished.scores for finished in found], found[-1].facts
    transition = from_checkpoints(done)
    left_out = [f"left out: {reason}" for reason in run.left_out]
    absent = [f"missing steps: {', '.join(map(str, missing))}"] if missing else []
    return DetectionReport(
        path=source.path,
        mixers=facts.mixers,
        n_layers=facts.n_layers,
        n_heads=facts.n_heads,
        probe=facts.probe,
        checkpoints=tuple(done),
        phase_transition=transition,
        attention_maps=found[-1].maps or (),
        notes=(
            *_reading(facts.origin),
            *facts.notes,
            *_notes(wanted, done, facts.probe.bos),
            *absent,
            *left_out,
            *source.notes,
        ),
        text=facts.text,
        model=facts.origin,
        missing_steps=tuple(missing),
        wall_s=time.perf_counter() - started,
        versions=_versions(),
    )


def _planned(
    subject: Subject,
    windows: tuple[Tensor | None, str | None],
    probe: dict[str, int | None],
    mamba_units: str | None,
) -> Plan:
    if mamba_units not in (None, "layer") and "mamba1" not in subject.mixers:
        kinds = ", ".join(dict.fromkeys(subject.mixers))
        raise DetectionError(
            f"mamba_units {mamba_units!r} for layers of {kinds}; accepted: only with Mamba-1 layers"
        )
    plan = make_plan(subject, windows=windows[0], windows_from=windows[1], **probe)
    if getattr(subject, "narrow", None):
        note = f"weights are {subject.narrow}, read in float32"
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    chosen = any(probe[name] is not None for name in ("period", "repeats", "trained"))
    if chosen or not isinstance(subject, LanguageModelSubject) or subject.origin is not None:
        return plan
    note = (
        f"probe of {plan.probe.tokens.shape[1]} tokens, as the context allows: the length of the training "
        "sequences is not known here (a run folder tells it), and positions beyond it were not trained"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def _with_causal_choice(subject: Subject, plan: Plan, wanted: frozenset[str], *, asked: bool) -> Plan:
    """The plan with the causal test on or off; a note says why where it was wanted and is off."""
    if "causal" not in wanted:
        return plan
    if not isinstance(subject, LanguageModelSubject):
        why = "the model is not read in our own mixers"
    elif not asked and subject.n_weights > LARGE_WEIGHTS:
        why = f"off by default above {LARGE_WEIGHTS:,} weights; --scores ...,causal makes it"
    else:
        return dataclasses.replace(plan, causal=True)
    note = f"causal test not made ({why}): is_induction rests on prefix matching and copying"
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def _with_memory_note(plan: Plan, linear_memory: bool | None) -> Plan:
    """The plan with a note where its probe is scored on edges."""
    if not edge_scores.chosen(plan.probe, linear_memory):
        return plan
    note = "scored on edges, in memory linear in length (same numbers): no attention maps"
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def _reading(origin: dict[str, Any] | None) -> list[str]:
    """How a model of another project was read, and what its files say."""
    if origin is None:
        return []
    if origin["reader"] != "own":
        return [f"read through {origin['reader']}, softmax instruments only: {origin['reason']}"]
    tied = "tied" if origin["tied"] else "untied"
    said = (
        f"read into our own mixers: {origin['architecture']}, weights {origin['stored_dtype']}, computed in "
        f"{origin['dtype']}, BOS {origin['bos']}, {len(origin['special'])} special tokens, embeddings "
        f"{tied}, norms not folded"
    )
    return [said, *origin["notes"]]


def _window_hash(windows: Tensor | None) -> str | None:
    return None if windows is None else hashlib.sha256(windows.contiguous().numpy().tobytes()).hexdigest()


def _checked_scores(scores: Sequence[str] | None) -> frozenset[str]:
    unknown = set(scores or ()) - set(SCORES)
    if unknown:
        named = ", ".join(map(repr, sorted(unknown)))
        raise DetectionError(f"unknown scores {named}; accepted: {', '.join(SCORES)}")
    return frozenset(scores or SCORES) | {"prefix_matching", "previous_token"}


def _checked_device(device: str) -> str:
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda"):
        raise DetectionError(f"device {device!r}; accepted: cpu, cuda, cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DetectionError(f"device {device!r}: this machine has no CUDA device; accepted: cpu")
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise DetectionError(f"device {device!r}; accepted: cpu, cuda:0..{torch.cuda.device_count() - 1}")
    return device


def _windows(
    subject: Subject, source: Source, text: str | None, n_windows: int | None, wanted: frozenset[str]
) -> tuple[Tensor | None, str | None]:
    if "in_context_learning" not in wanted:
        return source.windows, source.windows_from
    large = subject.n_weights > LARGE_WEIGHTS
    budget = _WINDOW_TOKENS_LARGE if large else _WINDOW_TOKENS
    if source.windows is not None and text is None:
        windows = source.windows[:, : subject.n_ctx]
        return windows[: n_windows or max(8, budget // windows.shape[1])], source.windows_from
    count = n_windows or max(8, budget // min(icl.CONTEXT, subject.n_ctx))
    if text is not None and subject.tokenizer is None:
        raise DetectionError(f"text {text!r} cannot be read: the model has no tokenizer; accepted: no text")
    windows = corpus_windows(subject, n_windows=count, source=text)
    return windows, None if windows is None else (text or "Python standard library")


def _notes(wanted: frozenset[str], done: list[CheckpointScores], bos: int | None) -> list[str]:
    notes = []
    if "copying" not in wanted:
        notes.append(
            "copying is not measured: without the causal test is_induction rests on prefix matching alone"
        )
    if bos is not None and "copying" in wanted:
        notes.append("copying: 4r-1 without BOS among the sources; copying_with_bos has it with BOS")
    same = [(c.step, c.same_weights_as_step) for c in done if c.same_weights_as_step is not None]
    notes += [f"step {step} has the same weights as step {first}" for step, first in same]
    return notes


def _versions() -> dict[str, str]:
    found = {}
    for name in ("beyond-softmax", "torch", "transformer_lens", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
