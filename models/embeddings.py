"""From tokens to the residual stream, and from the residual stream to logits."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from kernels.embedding import embedding
from kernels.linear_cross_entropy import linear_cross_entropy
from models.config import LanguageModelConfig


class Embed(nn.Module):
    """Token embedding, `W_E` [d_vocab d_model]."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(config.d_vocab, config.d_model))

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        return embedding(tokens, self.W_E)


class PosEmbed(nn.Module):
    """Learned position embedding, `W_pos` [n_ctx d_model]."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(config.n_ctx, config.d_model))

    def forward(self, batch: int, start: int, stop: int) -> Float[Tensor, "batch seq d_model"]:
        # A copy for every sequence: a hook may edit it in place without touching the weights.
        return self.W_pos[start:stop].repeat(batch, 1, 1)


class Unembed(nn.Module):
    """Logits, `x W_U + b_U`. Stored is `weight` [d_vocab d_model]; tied, the embedding takes its place."""

    def __init__(self, config: LanguageModelConfig, embed: Embed):
        super().__init__()
        # In a list, so that the embedding is not registered here a second time.
        self._tied = [embed] if config.tied else []
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.d_vocab, config.d_model))
        self.b_U = nn.Parameter(torch.zeros(config.d_vocab)) if config.unembed_bias else None

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The matrix in TransformerLens's layout: a view of what is stored."""
        return (self._tied[0].W_E if self._tied else self.weight).T

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
        return F.linear(x, self.W_U.T, self.b_U)

    def losses(
        self, x: Float[Tensor, "*batch d_model"], target: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Cross entropy of the logits, in nats; 0 where the target is -1. This module's hooks do not fire."""
        flat = linear_cross_entropy(x.flatten(0, -2), self.W_U.T, target.flatten(), bias=self.b_U)
        return flat.view(target.shape)
