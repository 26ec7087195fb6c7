"""Loss of the next token."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kernels.cross_entropy import NO_TARGET
from models.errors import ConfigError


def next_tokens(tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """What each place is to predict: the token after it; NO_TARGET at the last.

    With it losses of all places are computed: leaving the last one's logits out would copy all the others.
    """
    return F.pad(tokens[:, 1:], (0, 1), value=NO_TARGET)


def next_token_loss(
    logits: Float[Tensor, "batch seq_less_1 d_vocab"],
    tokens: Int[Tensor, "batch seq"],
    *,
    per_token: bool = False,
) -> Tensor:
    """Cross entropy, in nats, of each token given those before it: the mean, or [batch seq-1] with
    `per_token`.

    Raises:
        ConfigError: a single token, of which nothing is predicted.
    """
    check_two(tokens)
    flat = logits.flatten(0, 1)
    flat = flat.float() if flat.dtype.itemsize < 4 else flat
    loss = F.cross_entropy(flat, tokens[:, 1:].flatten(), reduction="none" if per_token else "mean")
    return loss.view(tokens.shape[0], -1) if per_token else loss


def check_two(tokens: Int[Tensor, "batch seq"]) -> None:
    """Raise ConfigError for a single token, of which nothing is predicted."""
    if tokens.shape[1] < 2:
        raise ConfigError("a loss needs at least 2 tokens in each sequence")
