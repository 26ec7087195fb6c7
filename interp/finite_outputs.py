"""Models whose numbers overflow: refused by name, before and after they are measured."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import DetectionError
from interp.host import begin_to_host
from interp.records import CheckpointScores, to_plain
from interp.subject import Subject, next_token_losses


def check_finite_outputs(subject: Subject, tokens: Int[Tensor, "batch seq"], where: str) -> None:
    """Run the first sequence (the first batch on a GPU).

    Raises:
        DetectionError: one of its logits is NaN or infinite; `where` (a step) begins the message.
    """
    begin_check_outputs(subject, tokens, where)[1]()


def begin_check_outputs(
    subject: Subject, tokens: Int[Tensor, "batch seq"], where: str
) -> tuple[Float[Tensor, "first_batch seq_minus_1"], Callable[[], None]]:
    """`check_finite_outputs` in two steps: the losses of what was run, and what raises its error.

    The first does not wait for a GPU, the second does.
    """
    # On a GPU the shape of the losses that follow: kernels are compiled for no other one.
    on_gpu = torch.device(subject.device).type == "cuda"
    rows = next(subject.batches(*tokens.shape)) if on_gpu else slice(1)
    first = tokens[rows].to(subject.device)
    with torch.no_grad():
        logits = subject.logits(first)
        losses = next_token_losses(logits, first)
    # A token may be ruled out by a logit of minus infinity.
    arrived, n_logits = begin_to_host([(logits.isnan() | logits.isposinf()).sum()]), logits.numel()

    def check() -> None:
        bad = int(arrived()[0])
        if bad:
            raise DetectionError(
                f"{where}: the model's outputs are not finite ({bad:,} of {n_logits:,} logits are NaN or "
                "infinite), so nothing can be read from it; its weights are too large, or overflow in its "
                "dtype"
            )

    return losses, check


def check_finite_scores(scores: CheckpointScores) -> None:
    """Refuse scores of which one is NaN or infinite.

    Raises:
        DetectionError: names the first of them.
    """
    try:
        to_plain(scores, samples=True)
    except ValueError as error:
        raise DetectionError(f"step {scores.step}: the model's outputs are not finite: {error}") from None
