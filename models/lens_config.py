"""A model's configuration under the attribute names that TransformerLens's tools read (`model.cfg`)."""

from typing import Any

import torch


class LensConfig:
    """What TransformerLens's caches, sweeps and tools ask a model's `cfg` for.

    Where layers differ in their number of heads, `n_heads` is the largest; sweeps over (layer, head) then
    need an `index_df` (see `LanguageModel.head_index`).
    """

    def __init__(self, model: Any):
        self._model = model
        config = model.config
        mixers = [block.attn for block in model.blocks]
        self.n_layers, self.d_model, self.n_ctx = config.n_layers, config.d_model, config.n_ctx
        self.d_vocab = self.d_vocab_out = config.d_vocab
        self.n_heads = max(m.n_heads for m in mixers)
        self.d_head = max(m.d_head for m in mixers)
        n_kv = max(getattr(m, "n_kv_heads", None) or m.n_heads for m in mixers)
        self.n_key_value_heads = None if n_kv == self.n_heads else n_kv
        self.ungroup_grouped_query_attention = False
        self.attn_only = config.mlp is None
        self.parallel_attn_mlp = config.parallel_residual
        self.d_mlp = config.mlp.d_mlp if config.mlp else None
        self.act_fn = config.mlp.act if config.mlp else None
        self.gated_mlp = bool(config.mlp and config.mlp.gated)
        self.normalization_type = {"rms": "RMS", "layer": "LN", "none": None}[config.norm]
        self.final_rms = config.norm == "rms"
        self.eps = config.norm_eps
        names = {"learned": "standard", "rope": "rotary", "none": "none"}
        self.positional_embedding_type = names[config.positions]
        self.default_prepend_bos = config.bos is not None
        self.seed, self.init_range = config.seed, config.init_std
        self.model_name = "-".join(dict.fromkeys(m.kind for m in mixers)) + f"-{config.n_layers}L"
        self.tokenizer_name = None
        self.use_attn_result = self.use_split_qkv_input = self.use_hook_mlp_in = self.use_attn_in = False

    @property
    def device(self) -> torch.device:
        """Where the model's weights are now."""
        return self._model.embed.W_E.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights now."""
        return self._model.embed.W_E.dtype
