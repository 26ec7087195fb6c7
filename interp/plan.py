"""What is measured at every checkpoint alike: the probes, and the text windows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from interp import corpus
from interp.errors import DetectionError
from interp.head_scores import OFFSETS
from interp.in_context_learning import CONTEXT, bigram_hits, icl_positions
from interp.records import ProbeRecord
from interp.sequences import RepeatedTokens, candidates, repeated_tokens
from interp.subject import Subject

# Olsson's shapes: tokens x repeats, for scores and for loss curves.
PERIOD, REPEATS = 25, 4
LOSS_PERIOD, LOSS_REPEATS = 50, 2
N_SEQUENCES, N_LOSS_SEQUENCES = 16, 32
# Models above this many weights read fewer loss sequences and fewer windows by default.
LARGE_WEIGHTS = 20_000_000
# Two copies of fewer tokens have no row that could look at the last of `OFFSETS`.
MIN_PERIOD = OFFSETS[-1]
_SHORT_PERIOD = 8
# Below this many ids a vocabulary is a toy task's: all its ids are drawn from.
_TOY_VOCABULARY = 200
_SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The probes and windows, and notes on what was shrunk or left out to fit the model.

    `loss_in_order` and `loss_shuffled` have the same first copies; `windows` is natural text, each window one
    sequence, or None.
    """

    probe: RepeatedTokens
    loss_in_order: RepeatedTokens
    loss_shuffled: RepeatedTokens
    windows: Int[Tensor, "window seq"] | None
    windows_from: str | None
    icl_positions: tuple[int, int] | None
    d_candidates: int
    notes: tuple[str, ...]
    causal: bool = False

    @cached_property
    def hits(self) -> tuple[tuple[Tensor, ...], float]:
        """Where a bigram of the windows has occurred before, and the share of such places."""
        hits = bigram_hits(self.windows)
        return hits.nonzero(as_tuple=True), float(hits.double().mean())

    @cached_property
    def loss_tokens(self) -> Int[Tensor, "sequence seq"]:
        """The sequences of `loss_in_order`, then those of `loss_shuffled`."""
        return torch.cat([self.loss_in_order.tokens, self.loss_shuffled.tokens])

    @property
    def record(self) -> ProbeRecord:
        """The probe as it stands in the JSON."""
        probe, loss = self.probe, self.loss_in_order
        return ProbeRecord(
            period=probe.period,
            repeats=probe.repeats,
            n_sequences=len(probe.tokens),
            seed=probe.seed or 0,
            bos=probe.bos,
            loss_period=loss.period,
            loss_repeats=loss.repeats,
            d_candidates=self.d_candidates,
        )


def make_plan(
    subject: Subject,
    *,
    period: int | None = None,
    repeats: int | None = None,
    n_sequences: int | None = None,
    seed: int = 0,
    windows: Int[Tensor, "window seq"] | None = None,
    windows_from: str | None = None,
    trained: int | None = None,
) -> Plan:
    """Choose probes that the model's vocabulary and context hold.

    Args:
        period, repeats: None for the defaults, which shrink where they must (and a note says so). A number
            that is given is met or refused; the loss curves then use the same shape.
        trained: Length of the sequences that the model was trained on, where it is known: the defaults stay
            within it, since learned positions beyond it were never trained.

    Raises:
        DetectionError: the vocabulary is too small or the context too short for the probe.
    """
    notes: list[str] = []
    bos = subject.bos
    if bos is not None and not (isinstance(bos, int) and 0 <= bos < subject.d_vocab):
        raise DetectionError(f"BOS {bos!r}; accepted: auto, none, or an id in 0..{subject.d_vocab - 1}")
    ids = _usable_ids(subject, windows)
    given = period is not None or repeats is not None
    context = subject.n_ctx if given else min(subject.n_ctx, trained or subject.n_ctx)
    shape = _fit(subject, len(ids), context, period, repeats, notes)
    loss_shape = (LOSS_PERIOD, LOSS_REPEATS)
    start = int(subject.bos is not None)
    fits = LOSS_PERIOD <= len(ids) and start + LOSS_PERIOD * LOSS_REPEATS <= context
    if given or not fits:
        loss_shape = shape
    options = {"ids": ids, "bos": subject.bos}
    count = n_sequences or N_SEQUENCES
    if count == 1:
        notes.append("one sequence: standard errors read 0, and the causal test rests on the effect alone")
    loss_count = n_sequences or (N_SEQUENCES if subject.n_weights > LARGE_WEIGHTS else N_LOSS_SEQUENCES)
    late_early = _positions(windows, notes)
    return Plan(
        probe=repeated_tokens(count, *shape, seed=seed, **options).to(subject.device),
        loss_in_order=repeated_tokens(loss_count, *loss_shape, seed=seed + 1, **options).to(subject.device),
        loss_shuffled=repeated_tokens(loss_count, *loss_shape, seed=seed + 1, shuffled=True, **options).to(
            subject.device
        ),
        windows=windows.to(subject.device) if late_early else None,
        windows_from=windows_from if late_early else None,
        icl_positions=late_early,
        d_candidates=len(ids),
        notes=tuple(notes),
    )


def corpus_windows(
    subject: Subject, *, n_windows: int, seq: int = CONTEXT, source: str | None = None
) -> Int[Tensor, "window seq"] | None:
    """Text windows for a model that brings none: the beginnings of documents, tokenised with the model's
    tokenizer.

    `source` as in `corpus.documents`; documents too short for a window are passed over. None where the model
    has no tokenizer or the text has no document long enough.
    """
    if subject.tokenizer is None:
        return None
    seq = min(seq, subject.n_ctx)
    kept = corpus.in_hash_order(corpus.documents(source), _SPLIT_SEED)
    start = [] if subject.bos is None else [subject.bos]
    windows: list[list[int]] = []
    for document in kept:
        # Far more characters than a window's tokens, far less than the longest documents.
        ids = start + encode(subject.tokenizer, document.text[: 12 * seq])
        if len(ids) >= seq:
            windows.append(ids[:seq])
        if len(windows) == n_windows:
            break
    return torch.tensor(windows, dtype=torch.int64) if windows else None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, no special tokens added; for tokenizers of `transformers` and of `tokenizers`."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(ids, "ids", ids))


def _usable_ids(subject: Subject, windows: Tensor | None) -> Int[Tensor, " candidate"]:
    special = set(subject.special)
    if windows is None:
        return candidates(subject.d_vocab, excluded=special)
    tokens = windows.flatten().long().cpu()
    for token in (int(end) for end in torch.aminmax(tokens)):
        if not 0 <= token < subject.d_vocab:
            raise DetectionError(
                f"the evaluation windows hold token {token}, the model's vocabulary ends at "
                f"{subject.d_vocab - 1}; accepted: 0..{subject.d_vocab - 1}"
            )
    counts = torch.bincount(tokens, minlength=subject.d_vocab)
    order = counts.argsort(descending=True, stable=True)
    seen = order[counts[order] > 0].tolist()
    if subject.d_vocab < _TOY_VOCABULARY:
        return candidates(subject.d_vocab, excluded=special | (set(range(subject.d_vocab)) - set(seen)))
    found = candidates(subject.d_vocab, excluded=special, ranked=seen)
    # Too little text to rank by: fall back on the order of the ids.
    return found if len(found) >= 2 * LOSS_PERIOD else candidates(subject.d_vocab, excluded=special)


def _fit(
    subject: Subject, n_ids: int, context: int, period: int | None, repeats: int | None, notes: list[str]
) -> tuple[int, int]:
    start = int(subject.bos is not None)
    room = context - start
    whole = context == subject.n_ctx
    holds = "the context holds" if whole else "the training sequences hold"
    if period is not None and period > n_ids:
        raise DetectionError(
            f"vocabulary too small: it has {n_ids} usable tokens of {subject.d_vocab}, --period "
            f"{period} needs "
            f"{period} distinct ones"
        )
    wanted = (period or PERIOD, repeats or REPEATS)
    if period is not None and period * (wanted[1] - 1) < OFFSETS[-1]:
        raise DetectionError(
            f"a probe of {period} x {wanted[1]} tokens is too short: scores look up to {OFFSETS[-1]} tokens "
            f"after an earlier copy; accepted: period x (repeats - 1) of {OFFSETS[-1]} or more"
        )
    for copies in [wanted[1]] if repeats is not None else range(wanted[1], 1, -1):
        length = period or min(PERIOD, n_ids, room // copies)
        # Fewer copies rather than very short ones.
        least = min(wanted[0], _SHORT_PERIOD if copies > 2 else MIN_PERIOD)
        if length * copies <= room and length >= least and length * (copies - 1) >= OFFSETS[-1]:
            if (length, copies) != wanted:
                notes.append(
                    f"probe shrunk from {wanted[0]} x {wanted[1]} to {length} x {copies} tokens: the "
                    "vocabulary has "
                    f"{n_ids} usable tokens, {holds} {context}"
                )
            return length, copies
    if n_ids < MIN_PERIOD:
        raise DetectionError(
            f"vocabulary too small for a probe: {n_ids} usable tokens of {subject.d_vocab} (not special, and "
            f"of few those that the evaluation windows hold); {MIN_PERIOD} are the least"
        )
    shortest = (period or MIN_PERIOD) * (repeats or 2) + start
    raise DetectionError(
        f"context shorter than the probe: the {'model holds' if whole else 'evaluation windows hold'} "
        f"{context} tokens, a probe of {period or MIN_PERIOD} x {repeats or 2} tokens needs {shortest}"
        f"{'' if whole else ' (--period and --repeats look beyond them)'}"
    )


def _positions(windows: Tensor | None, notes: list[str]) -> tuple[int, int] | None:
    if windows is None:
        notes.append("no text windows: loss, in-context learning and hit loss are not measured")
        return None
    seq = windows.shape[1]
    try:
        late, early = icl_positions(seq)
    except ValueError as error:
        notes.append(f"in-context learning is not measured: {error}")
        return None
    if (late, early) != (500, 50):
        notes.append(
            f"in-context learning read at tokens {late} and {early} of windows of {seq} (500 and 50 of "
            "512 scaled)"
        )
    return late, early
