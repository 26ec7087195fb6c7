"""Models whose numbers overflow: refused by name, before and after they are measured."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import DetectionError
from interp.records import CheckpointScores, to_plain
from interp.subject import Subject, next_token_losses


def check_finite_outputs(
    subject: Subject, tokens: Int[Tensor, "batch seq"], where: str
) -> Float[Tensor, "first_batch seq_minus_1"]:
    """Run the first sequence (the first batch on a GPU); returns its losses.

    Raises:
        DetectionError: one of its logits is NaN or infinite; `where` (a step) begins the message.
    """
    # On a GPU the shape of the losses that follow: kernels are compiled for no other one.
    on_gpu = torch.device(subject.device).type == "cuda"
    rows = next(subject.batches(*tokens.shape)) if on_gpu else slice(1)
    first = tokens[rows].to(subject.device)
    with torch.no_grad():
        logits = subject.logits(first)
        losses = next_token_losses(logits, first)
    # A token may be ruled out by a logit of minus infinity.
    bad = int((logits.isnan() | logits.isposinf()).sum())
    if bad:
        raise DetectionError(
            f"{where}: the model's outputs are not finite ({bad:,} of {logits.numel():,} logits are NaN or "
            "infinite), so nothing can be read from it; its weights are too large, or overflow in its dtype"
        )
    return losses


def check_finite_scores(scores: CheckpointScores) -> None:
    """Refuse scores of which one is NaN or infinite.

    Raises:
        DetectionError: names the first of them.
    """
    try:
        to_plain(scores, samples=True)
    except ValueError as error:
        raise DetectionError(f"step {scores.step}: the model's outputs are not finite: {error}") from None
