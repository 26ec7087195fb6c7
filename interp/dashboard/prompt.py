"""The tokens that are read: typed text or ids, a repeated random probe, or a held-out sample of the run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interp.dashboard.quotation import quoted, shortened, whole_number
from interp.dashboard.run import Run
from interp.dashboard.token_pieces import BLANK, spelling
from interp.errors import DetectionError
from interp.plan import corpus_windows, encode
from interp.sequences import candidates, repeated_tokens
from interp.subject import LanguageModelSubject, Subject

KINDS = ("probe", "sample", "typed")
# Longest prompt of models whose positions are not learned: maps grow with its square.
MOST_TOKENS = 2048
# Longest text that is given to a tokenizer: far more than the tokens that may come out.
MOST_CHARACTERS = 64 * MOST_TOKENS
# Windows of the standard library, for models that bring a tokenizer and no held-out windows.
N_LIBRARY_WINDOWS = 16
_MOST_NAMED = 5


class PromptError(DetectionError):
    """A prompt that cannot be read, in one sentence for the page."""


@dataclass(frozen=True, kw_only=True)
class PromptSpec:
    """What the page asks for; the same for all models compared, each of which makes its own tokens of it."""

    kind: str = "probe"
    text: str = ""
    period: int = 25
    repeats: int = 4
    seed: int = 0
    sample: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> "PromptSpec":
        """From the page's store; an empty number field takes its default."""
        given = {key: value for key, value in (values or {}).items() if value is not None}
        spec = cls(**{key: given[key] for key in cls.__dataclass_fields__ if key in given})
        if spec.kind not in KINDS:
            raise PromptError(f"prompt of kind {quoted(spec.kind)}; accepted: {', '.join(KINDS)}")
        if not isinstance(spec.text, str):
            raise PromptError(f"text is {quoted(spec.text)}; accepted: text")
        if any("\ud800" <= character <= "\udfff" for character in spec.text):
            raise PromptError("The text holds half a character (a lone surrogate); type it anew.")
        for name, least in (("period", 1), ("repeats", 1), ("seed", 0), ("sample", 0)):
            value = getattr(spec, name)
            if type(value) is not int or not least <= value < 1 << 31:
                raise PromptError(f"{name} is {quoted(value)}; accepted: a whole number from {least} up")
        return spec


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids, their spelling, and remarks for the reader of the page."""

    ids: tuple[int, ...]
    tokens: tuple[str | bytes, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def most_tokens(subject: Subject) -> int:
    """The longest prompt that a model takes here."""
    learned = isinstance(subject, LanguageModelSubject) and subject.model.config.positions == "learned"
    return subject.n_ctx if learned else max(subject.n_ctx, MOST_TOKENS)


def shared_ids(one: Subject, other: Subject) -> tuple[int, ...] | None:
    """The ids that probes of both models may draw; None where an id does not mean the same to both."""
    both = [set(candidates(x.d_vocab, excluded=set(x.special)).tolist()) for x in (one, other)]
    ids = tuple(sorted(both[0] & both[1]))
    pieces = [_pieces(x.tokenizer, ids) for x in (one, other)]
    return ids if ids and pieces[0] == pieces[1] else None


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str] | None:
    if tokenizer is None:
        return None
    by_id = {token: piece for piece, token in tokenizer.get_vocab().items()}
    return [by_id.get(token, "") for token in ids]


def make_prompt(
    run: Run, subject: Subject, spec: PromptSpec, *, drawable: Sequence[int] | None = None
) -> Prompt:
    """The tokens of a specification for one model.

    Args:
        drawable: Ids that a probe may draw, where it is also for another model; else all of this model's.

    Raises:
        PromptError: empty, too long, an id that the vocabulary lacks, no such sample.
    """
    if spec.kind == "probe":
        ids, notes = _probe(subject, spec, drawable)
    else:
        ids, notes = {"sample": _sample, "typed": _typed}[spec.kind](run, subject, spec)
    if not ids:
        raise PromptError(f"The prompt is empty: {_what_to_type(subject)}.")
    limit = most_tokens(subject)
    if len(ids) > limit:
        why = "positions that the model has learned" if limit == subject.n_ctx else "limit of this page"
        raise PromptError(f"The prompt has {len(ids):,} tokens; the {why}: {limit:,}.")
    if len(ids) > subject.n_ctx:
        notes = [*notes, f"longer than the context of {subject.n_ctx:,} tokens that the model was made for"]
    pieces = {token: spelling(subject.tokenizer, token) for token in set(ids)}
    return Prompt(ids=tuple(ids), tokens=tuple(pieces[token] for token in ids), notes=tuple(notes))


def _what_to_type(subject: Subject) -> str:
    return "type some text" if subject.tokenizer is not None else f"type ids from 0 to {subject.d_vocab - 1}"


def _probe(subject: Subject, spec: PromptSpec, drawable: Sequence[int] | None) -> tuple[list[int], list[str]]:
    own = candidates(subject.d_vocab, excluded=set(subject.special))
    usable = own if drawable is None else torch.tensor(drawable)
    start = 0 if subject.bos is None else 1
    length = start + spec.period * spec.repeats
    if length > most_tokens(subject):
        raise PromptError(
            f"A probe of {spec.period} tokens, {spec.repeats} times, has {length:,} tokens; "
            f"this model takes {most_tokens(subject):,}."
        )
    period = min(spec.period, len(usable))
    notes = [] if period == spec.period else [f"only {period} different tokens are there to draw from"]
    if len(usable) < len(own):
        notes.append(f"drawn from the {len(usable):,} tokens that both models have")
    probe = repeated_tokens(1, period, spec.repeats, ids=usable, bos=subject.bos, seed=spec.seed)
    return probe.tokens[0].tolist(), notes


def _sample(run: Run, subject: Subject, spec: PromptSpec) -> tuple[list[int], list[str]]:
    windows = sample_windows(run, subject)
    if windows is None:
        raise PromptError(f"{run.name} has neither held-out windows nor a tokenizer; choose another prompt.")
    if spec.sample >= len(windows):
        raise PromptError(f"Sample {spec.sample}: {run.name} has samples 0 to {len(windows) - 1}.")
    return windows[spec.sample].tolist(), []


def sample_windows(run: Run, subject: Subject) -> torch.Tensor | None:
    """The run's held-out windows; for models with a tokenizer and none, beginnings of library files."""
    if run.source.windows is not None:
        return run.source.windows
    if run.library_windows is None and subject.tokenizer is not None:
        run.library_windows = corpus_windows(subject, n_windows=N_LIBRARY_WINDOWS, seq=256)
    return run.library_windows


def _typed(run: Run, subject: Subject, spec: PromptSpec) -> tuple[list[int], list[str]]:
    if len(spec.text) > MOST_CHARACTERS:
        raise PromptError(f"The text has more than {MOST_CHARACTERS:,} characters, the most accepted.")
    if subject.tokenizer is None:
        return _typed_ids(spec.text, subject), []
    ids = encode(subject.tokenizer, spec.text)
    if not ids:
        return [], []
    start = [] if subject.bos is None else [subject.bos]
    return start + ids, _unknown(subject, spec.text, ids)


def _typed_ids(text: str, subject: Subject) -> list[int]:
    words = text.replace(",", " ").split()
    wrong = [word for word in words if not (word.isascii() and word.isdecimal())]
    if wrong:
        named = ", ".join(quoted(word) for word in wrong[:_MOST_NAMED])
        raise PromptError(
            f"This run has no tokenizer: type token ids from 0 to {subject.d_vocab - 1}, with blanks or "
            f"commas between; not {named}{_more(len(wrong))}."
        )
    ids = [whole_number(word, subject.d_vocab) for word in words]
    outside = [word for word, token in zip(words, ids, strict=True) if token >= subject.d_vocab]
    if outside:
        named = ", ".join(shortened(word) for word in outside[:_MOST_NAMED])
        raise PromptError(
            f"Unknown token {named}{_more(len(outside))}: the vocabulary has ids 0 to {subject.d_vocab - 1}."
        )
    return ids


def _more(n: int) -> str:
    return f" and {n - _MOST_NAMED} more" if n > _MOST_NAMED else ""


def _unknown(subject: Subject, text: str, ids: list[int]) -> list[str]:
    """A note where the vocabulary lacks something in the text: it was replaced, or left out."""
    backend = getattr(subject.tokenizer, "backend_tokenizer", subject.tokenizer)
    if not hasattr(backend, "id_to_token"):
        return []
    unknown = getattr(backend.model, "unk_token", None)
    n_unknown = sum(backend.id_to_token(token) == unknown for token in ids) if unknown else 0
    if n_unknown:
        return [f"{n_unknown} unknown to the vocabulary, shown as {unknown}"]
    normalizer = getattr(backend, "normalizer", None)
    plain = text if normalizer is None else normalizer.normalize_str(text)
    lost = [
        one for one in Counter(plain) - Counter(backend.decode(ids)) if not one.isspace() and one != BLANK
    ]
    if not lost:
        return []
    named = ", ".join(repr(character) for character in lost[:_MOST_NAMED])
    return [f"left out, unknown to the vocabulary: {named}{_more(len(lost))}"]
