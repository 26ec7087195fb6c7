"""The patterns of ideal heads: the previous token, and what followed the latest earlier copy."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import InterventionError
from models.whole import is_whole


def previous_token_pattern(seq: int) -> Float[Tensor, "dest=seq src=seq"]:
    """Each position attends to the one before it, the first to itself."""
    pattern = torch.diag_embed(torch.ones(seq - 1), offset=-1)
    pattern[0, 0] = 1
    return pattern


def induction_pattern(
    tokens: Int[Tensor, "batch seq"], offset: int = 1
) -> Float[Tensor, "batch dest=seq src=seq"]:
    """Each position attends to `offset` places after the latest earlier copy of its token; rows without one
    are 0.

    Raises:
        InterventionError: an offset that is no whole number, or below 1.
    """
    if not is_whole(offset) or offset < 1:
        raise InterventionError(f"offset is {offset}; accepted: a whole number, 1 and up")
    seq = tokens.shape[1]
    # A copy less than `offset` places before would put the source after the destination.
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-offset)
    latest = torch.where(same, torch.arange(seq, device=tokens.device), -1).amax(-1)
    found = latest >= 0
    src = torch.where(found, latest + offset, 0)
    return F.one_hot(src, seq).float() * found[..., None]
