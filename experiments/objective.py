"""The training loss, and what a model's losses are on held-out windows."""

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from experiments.data.batch import Batch
from kernels.cross_entropy import cross_entropy
from models.next_token import next_tokens


def token_losses(
    logits: Float[Tensor, "batch seq d_vocab"], tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq-1"]:
    """Loss of each token after the first, in nats, float32; entry i is about the token at place i + 1."""
    flat = cross_entropy(logits.flatten(0, 1), next_tokens(tokens).flatten())
    return flat.view(tokens.shape)[:, :-1]


def model_losses(
    model: Callable[..., Tensor], tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq-1"]:
    """`token_losses` of a model, or of a clamped one, at `tokens`.

    On a GPU the model gives them itself, without keeping logits and their gradient both. On a CPU they come
    from its logits, so that runs begun before are resumed bit for bit.
    """
    if tokens.is_cuda and isinstance(model, nn.Module):
        return model(tokens, return_type="loss", loss_per_token=True)
    return token_losses(model(tokens, return_type="logits"), tokens)


def loss_weights(batch: Batch) -> Float[np.ndarray, "batch seq-1"]:
    """Weights that sum to 1 over the whole batch: equal over the scored tokens, 0 elsewhere."""
    if batch.scored is None:
        rows, seq = batch.tokens.shape
        return np.full((rows, seq - 1), 1 / (rows * (seq - 1)), dtype=np.float32)
    scored = batch.scored[:, 1:].astype(np.float32)
    return scored / max(scored.sum(), 1)


def autocast(
    device: torch.device, precision: str, *, cached: bool = True
) -> contextlib.AbstractContextManager:
    """bfloat16 autocast where `precision` asks for it ("auto": on CUDA), else nothing."""
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=cached)
    return contextlib.nullcontext()


@torch.no_grad()
def evaluate(
    model: nn.Module, held_out: Batch, *, device: torch.device, precision: str, batch: int
) -> dict[str, float]:
    """Losses on held-out windows, in nats.

    Returns:
        `held_out_loss_nats` over the scored tokens · `held_out_repeat_loss_nats` over the repeated ones
        (tasks that mark them) · `held_out_in_context_learning_nats`, mean loss over the last tenth of places
        minus that over the tenth around place 0.1 seq (negative: the context helps).
    """
    parts = []
    for start in range(0, len(held_out.tokens), batch):
        tokens = torch.from_numpy(held_out.tokens[start : start + batch]).to(device)
        with autocast(device, precision):
            parts.append(model_losses(model, tokens).cpu().numpy())
    losses = np.concatenate(parts).astype(np.float64)
    values = {"held_out_loss_nats": float((losses * loss_weights(held_out)).sum())}
    if held_out.repeated is not None and held_out.repeated[:, 1:].any():
        values["held_out_repeat_loss_nats"] = float(losses[held_out.repeated[:, 1:]].mean())
    seq = held_out.tokens.shape[1]
    tenth = max(1, seq // 10)
    early = losses[:, tenth // 2 : tenth // 2 + tenth]
    values["held_out_in_context_learning_nats"] = float(losses[:, -tenth:].mean() - early.mean())
    return values
