"""The models that are compared: ours and peers of the same shape, each as loss(tokens)."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.kernels.tuning import shorten_tuning

D_VOCAB, SEQ, ROPE_BASE = 8192, 512, 10_000.0
KINDS = ("softmax", "linear", "mamba1", "mamba2")
PEERS = {
    "softmax": "SDPA, torch.compile",
    "linear": "fla LinearAttention",
    "mamba1": "fla Mamba",
    "mamba2": "fla Mamba2",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a model; heads are 64 wide, MLPs (softmax and linear) as wide as fla's."""

    n_layers: int
    d_model: int
    batch: int

    @property
    def n_heads(self) -> int:
        return self.d_model // 64

    @property
    def d_mlp(self) -> int:
        return 256 * -(-int(self.d_model * 8 / 3) // 256)


SHAPES = {
    "small": Shape(n_layers=2, d_model=256, batch=128),
    "middle": Shape(n_layers=2, d_model=512, batch=128),
    "large": Shape(n_layers=12, d_model=768, batch=32),
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model and its loss of a batch of tokens, a mean in nats."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def ours(kind: str, shape: Shape) -> Contender:
    """Our language model, its loss as `train-lm` computes it."""
    from experiments.objective import model_losses
    from models import LanguageModel, LanguageModelConfig
    from models.config import (
        LinearAttentionConfig,
        Mamba1Config,
        Mamba2Config,
        MLPConfig,
        RopeConfig,
        SoftmaxAttentionConfig,
    )

    mixer = {
        "softmax": SoftmaxAttentionConfig(n_heads=shape.n_heads),
        "linear": LinearAttentionConfig(n_heads=shape.n_heads),
        "mamba1": Mamba1Config(d_state=16),
        "mamba2": Mamba2Config(d_state=128, d_head=64),
    }[kind]
    options = {}
    if kind in ("softmax", "linear"):
        options["mlp"] = MLPConfig(d_mlp=shape.d_mlp, act="silu", gated=True, bias=False)
    if kind == "softmax":
        options |= {"positions": "rope", "rope": RopeConfig(base=ROPE_BASE)}
    model = LanguageModel(
        LanguageModelConfig(
            d_model=shape.d_model,
            n_layers=shape.n_layers,
            d_vocab=D_VOCAB,
            n_ctx=SEQ,
            mixers=(mixer,) * shape.n_layers,
            **options,
        )
    )
    return Contender(model=model, loss=lambda x: model_losses(model, x).mean())


def peer_name(kind: str) -> str:
    """The peer, and whether its Mamba layers have mamba_ssm's kernels."""
    if not kind.startswith("mamba"):
        return PEERS[kind]
    return f"{PEERS[kind]} ({'mamba_ssm kernels' if _has_mamba_ssm() else 'no mamba_ssm: its torch path'})"


def _has_mamba_ssm() -> bool:
    return importlib.util.find_spec("mamba_ssm") is not None


def peer(kind: str, shape: Shape, *, like_ours: bool = False) -> Contender:
    """The peer of the same shape; `like_ours`: with options under which it computes our function."""
    if kind == "softmax":
        model = PlainTransformer(shape)
        return Contender(model=model, loss=torch.compile(model, dynamic=False))
    model = _fla(kind, shape, like_ours=like_ours)
    # The whole search takes minutes on an empty cache.
    shorten_tuning()
    return Contender(model=model, loss=lambda x: model(input_ids=x, labels=x, use_cache=False).loss)


def _fla(kind: str, shape: Shape, *, like_ours: bool) -> nn.Module:
    from fla import models as fla

    common = {
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "vocab_size": D_VOCAB,
        "use_cache": False,
    }
    if kind == "linear":
        options = {"norm_feature_map": True, "norm_eps": 1e-5} if like_ours else {}
        config = fla.LinearAttentionConfig(
            **common, num_heads=shape.n_heads, feature_map="elu", intermediate_size=shape.d_mlp, **options
        )
        model = fla.LinearAttentionForCausalLM(config)
        if like_ours:
            # What the layer's output_norm="identity" makes; the model's configuration does not pass it on.
            for layer in model.model.layers:
                layer.attn.norm = nn.Identity()
        return model
    if kind == "mamba1":
        return fla.MambaForCausalLM(fla.MambaConfig(**common, state_size=16))
    # With the kernels' default chunk of 256 the torch path takes hundreds of GB at batch 128.
    chunk = 256 if _has_mamba_ssm() else 64
    return fla.Mamba2ForCausalLM(fla.Mamba2Config(**common, state_size=128, head_dim=64, chunk_size=chunk))


class PlainTransformer(nn.Module):
    """Written by hand: fused projections, RoPE, scaled_dot_product_attention, a gated MLP, RMSNorm."""

    def __init__(self, shape: Shape):
        super().__init__()
        width = shape.d_model
        self.embed = nn.Embedding(D_VOCAB, width)
        self.blocks = nn.ModuleList(_PlainBlock(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.unembed = nn.Linear(width, D_VOCAB, bias=False)
        for weight in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(weight, std=0.02)
        angle = torch.arange(SEQ)[:, None] * ROPE_BASE ** (-torch.arange(0, 64, 2) / 64)
        self.register_buffer("cos", angle.cos().repeat(1, 2)[:, None], persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2)[:, None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.unembed(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class _PlainBlock(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        width, self.n_heads = shape.d_model, shape.n_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * shape.d_mlp, bias=False)
        self.down = nn.Linear(shape.d_mlp, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.n_heads, 64)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (_rotated(q, cos, sin), _rotated(k, cos, sin), v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        gate, inner = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * inner)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
