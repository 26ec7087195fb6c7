"""One checkpoint's scores on the probes and windows of a plan: a GPU has all its work before any is read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interp import in_context_learning as icl
from interp.finite_outputs import begin_check_outputs
from interp.head_scores import HeadScores
from interp.host import begin_to_host
from interp.induction_test import KEPT_TOKENS, N_SEQUENCES, CausalScore, begin_causal_scores, with_causal
from interp.layer_inputs import Visited
from interp.plan import Plan
from interp.records import CheckpointScores
from interp.sources import Checkpoint
from interp.subject import Subject


def begin_measuring(
    subject: Subject,
    plan: Plan,
    checkpoint: Checkpoint,
    wanted: frozenset[str],
    units: str | None,
    linear_memory: bool | None,
) -> Callable[[], CheckpointScores]:
    """Does everything that needs the model; what is returned waits for the numbers and puts them together.

    Args:
        wanted: Which of `records.SCORES`. `units`, `linear_memory`: as `detect`'s.
    """
    known, check_outputs = begin_check_outputs(subject, plan.loss_tokens, f"step {checkpoint.step}")
    if torch.device(subject.device).type != "cuda":
        check_outputs()
    with_copying = "copying" in wanted
    heads = HeadScores(subject, plan.probe, with_copying=with_copying, linear_memory=linear_memory)
    visited = Visited() if plan.causal and plan.probe.tokens.numel() <= KEPT_TOKENS else None
    with torch.no_grad():
        heads.visit(units=units, visited=visited)
        behaviour = _repeats(subject, plan, known) if "repeats" in wanted else lambda: _NO_REPEATS
        learning = _learning(subject, plan) if "in_context_learning" in wanted else lambda: _NO_LEARNING
    causal: Callable[[], tuple[CausalScore, ...]] = tuple
    if plan.causal:
        # Clusters of channels are made from the whole probe.
        n_sequences = None if (units or "").startswith("cluster") else N_SEQUENCES
        options = {"units": units, "n_sequences": n_sequences, "visited": visited}
        causal = begin_causal_scores(subject, plan.probe, **options)

    @torch.no_grad()
    def scores() -> CheckpointScores:
        check_outputs()
        records = with_causal(heads.records(), causal())
        return CheckpointScores(
            step=checkpoint.step, tokens=checkpoint.tokens, heads=records, **behaviour(), **learning()
        )

    return scores


_NO_REPEATS = dict.fromkeys(
    ("repeat_loss_nats", "first_copy_loss_nats", "repeat_gain_nats", "order_gain_nats"), None
)
_NO_LEARNING = dict.fromkeys(
    ("loss_nats", "in_context_learning_nats", "icl_positions", "hit_loss_nats"), None
)


def _repeats(subject: Subject, plan: Plan, known: Tensor) -> Callable[[], dict[str, Any]]:
    """Begins with the losses on repeated tokens, of which the first are `known`; what is returned reads
    them.
    """
    losses = subject.losses(plan.loss_tokens, known=known)
    losses = icl.repeat_losses(*losses.chunk(2), plan.loss_in_order)
    order_gain = losses.order_gain
    names = ("repeat_loss_nats", "first_copy_loss_nats", "repeat_gain_nats", "order_gain_nats")
    means = (part.mean() for part in (losses.later_copies, losses.first_copy, losses.repeat_gain, order_gain))
    arrived = begin_to_host([*means, icl.standard_error(order_gain), order_gain])

    def read() -> dict[str, Any]:
        *found, error, by_sequence = (part.tolist() for part in arrived())
        return {
            **dict(zip(names, found, strict=True)),
            "order_gain_se_nats": error,
            "order_gain_by_sequence": tuple(by_sequence),
        }

    return read


def _learning(subject: Subject, plan: Plan) -> Callable[[], dict[str, Any]]:
    """Begins with the losses on the windows; what is returned reads them."""
    if plan.windows is None:
        return lambda: _NO_LEARNING
    losses = subject.losses(plan.windows)
    learned = icl.in_context_learning_score(losses, plan.icl_positions)
    places, share = plan.hits
    losses, by_window = losses.double(), learned.window_by_sequence
    values = [losses.mean(), learned.by_sequence.mean(), icl.standard_error(learned.by_sequence)]
    values += [by_window.mean(), by_window, losses.mean(0)]
    # Where no bigram comes again there is no loss to take the mean of.
    values += [losses[places].mean()] if share else []
    arrived = begin_to_host(values)

    def read() -> dict[str, Any]:
        loss, score, error, window, by_window, by_position, *hits = (part.tolist() for part in arrived())
        return {
            "loss_nats": loss,
            "in_context_learning_nats": score,
            "in_context_learning_se_nats": error,
            "in_context_learning_window_nats": window,
            "icl_positions": (learned.late, learned.early),
            "hit_loss_nats": hits[0] if hits else None,
            "hit_share": share,
            "in_context_learning_by_window": tuple(by_window),
            "loss_by_position_nats": tuple(by_position),
        }

    return read
