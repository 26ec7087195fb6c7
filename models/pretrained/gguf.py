"""GGUF files: their header as Hugging Face keys, and their tensors, dequantised, under Hugging Face names.

llama.cpp's converter changes some tensors on the way in (llama: rows of q and k in the order for adjacent
rotary pairs; GPT-NeoX: q, k, v of all heads side by side; Mamba: A instead of its logarithm). Here each
change is undone; all but the last exactly.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.errors import CheckpointError, ConfigError
from models.pretrained.keys import UnsupportedArchitecture
from models.pretrained.weights import StoredTensor

PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class _Family:
    """Header keys and tensor names in Hugging Face's terms, and changes to undo by the ending of a name."""

    model_type: str
    keys: dict[str, str]
    outer: dict[str, str]
    inner: dict[str, str]
    layer: str
    undo: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]]


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], dict[str, Any]]:
    """Configuration (Hugging Face keys), weights (Hugging Face names) and the header's own fields.

    Raises:
        CheckpointError: not a GGUF file, or truncated.
        UnsupportedArchitecture: an architecture without a table here.
        ConfigError: a quantisation that is not read, or rotary frequencies by table.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    # The reader raises ValueError, IndexError or struct errors for a damaged file.
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({' '.join(str(error).split())})") from None
    architecture = fields.get("general.architecture")
    if architecture not in FAMILIES:
        raise UnsupportedArchitecture(
            f"{path}: GGUF architecture {architecture!r} is not read; accepted: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[architecture]
    config = _config(family, architecture, fields)
    embedding = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if "vocab_size" not in config and embedding is not None:
        config["vocab_size"] = int(embedding.shape[-1])
    weights = {}
    for tensor in reader.tensors:
        name = _name(family, tensor.name)
        if name is None:
            raise ConfigError(f"{path}: tensor {tensor.name!r} has no place in architecture {architecture!r}")
        weights[name] = _stored(tensor, name, family, config, path)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights and "embed_out.weight" not in weights
    return config, weights, fields


def _config(family: _Family, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": family.model_type}
    for theirs, ours in family.keys.items():
        value = fields.get(f"{architecture}.{theirs}")
        if value is not None:
            # float32 in the file: 1e-5 reads 9.999999747e-06, which is what the model was run with.
            config[ours] = value
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in fields:
            config[f"{name}_token_id"] = fields[f"tokenizer.ggml.{name}_token_id"]
    return config | _SPECIAL.get(architecture, lambda *_: {})(config, fields)


def _rope_scaling(architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    factor = fields.get(f"{architecture}.rope.scaling.factor")
    if kind == "none" or factor is None:
        return {}
    values = {"rope_type": kind, "factor": factor}
    length = fields.get(f"{architecture}.rope.scaling.original_context_length")
    return {
        "rope_scaling": values if length is None else {**values, "original_max_position_embeddings": length}
    }


def _llama(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in fields if name.startswith("llama.expert_count") and fields[name]]
    if names:
        raise UnsupportedArchitecture(
            f"a llama GGUF with experts ({names[0]} = {fields[names[0]]}) is not read"
        )
    return {"hidden_act": "silu", **_rope_scaling("llama", fields)}


def _neox(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    share = fields["gptneox.rope.dimension_count"] * config["num_attention_heads"] / config["hidden_size"]
    return {"hidden_act": "gelu", "rotary_pct": share, **_rope_scaling("gptneox", fields)}


def _mamba(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    return {"expand": config.pop("d_inner") / config["hidden_size"]}


def _mamba2(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    d_inner = config.pop("d_inner")
    return {"expand": d_inner / config["hidden_size"], "head_dim": d_inner // config["num_heads"]}


_SPECIAL = {"llama": _llama, "gptneox": _neox, "mamba": _mamba, "mamba2": _mamba2}


def _name(family: _Family, name: str) -> str | None:
    """The Hugging Face name; None where the table has no place for it."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(weight|bias))?", name)
    if match:
        layer, part, kind = match.groups()
        found = family.inner.get(part)
        if found is None:
            return None
        whole = f"{family.layer}.{layer}.{found}"
        # A_log, D and dt_bias carry no ending in Hugging Face's models.
        return whole if found.endswith((".A_log", ".D", ".dt_bias")) else f"{whole}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{family.outer[stem]}.{kind}" if stem in family.outer else None


def _stored(tensor: Any, name: str, family: _Family, config: dict[str, Any], path: Path) -> StoredTensor:
    from gguf import quants

    kind = tensor.tensor_type.name
    if kind not in PLAIN and not isinstance(getattr(quants, kind, None), type):
        raise ConfigError(
            f"{path}: tensor {tensor.name!r} is quantised as {kind}, which is not read; accepted: F32, F16, "
            f"BF16 and the "
            "quantisations that the gguf package can undo"
        )
    undo = next((change for ending, change in family.undo.items() if name.endswith(ending)), None)
    stored = tuple(int(size) for size in reversed(tensor.shape))

    def raw() -> Tensor:
        return torch.from_numpy(tensor.data.copy())

    def load() -> Tensor:
        # A plain array: views of a memory map are several times slower to slice. F32 and F16 come back as
        # they are.
        values = quants.dequantize(np.asarray(tensor.data).view(np.ndarray), tensor.tensor_type)
        whole = torch.from_numpy(values.copy()).float().reshape(stored)
        return whole if undo is None else undo(whole, config)

    shape = stored if undo is None else tuple(undo(torch.empty(stored, device="meta"), config).shape)
    return StoredTensor(shape=shape, dtype=PLAIN.get(kind, kind), raw=raw, load=load)


def _halves(n_heads_key: str) -> Callable[[Tensor, dict[str, Any]], Tensor]:
    """Rows of each head from (pair, member) order to (member, pair) order: adjacent pairs to halves."""

    def undo(rows: Tensor, config: dict[str, Any]) -> Tensor:
        n_heads = config.get(n_heads_key) or config["num_attention_heads"]
        heads = rows.unflatten(0, (n_heads, -1, 2))
        return heads.transpose(1, 2).flatten(0, 2).contiguous()

    return undo


def _by_head(rows: Tensor, config: dict[str, Any]) -> Tensor:
    return (
        rows.unflatten(0, (3, config["num_attention_heads"], -1)).transpose(0, 1).flatten(0, 2).contiguous()
    )


def _turned(matrix: Tensor, config: dict[str, Any]) -> Tensor:
    return matrix.T.contiguous()


def _flat(tensor: Tensor, config: dict[str, Any]) -> Tensor:
    return tensor.flatten()


_LLAMA_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "embedding_length": "n_embd",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_NEOX_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "use_parallel_residual": "use_parallel_residual",
    "rope.freq_base": "rope_theta",
}
_MAMBA_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "d_inner",
    "ssm.state_size": "state_size",
    "vocab_size": "vocab_size",
}
_MAMBA_PARTS = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out": "mixer.out_proj",
}
_MAMBA_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_TAPS = {"conv1d.weight": lambda taps, config: taps.unsqueeze(1)}

FAMILIES = {
    "llama": _Family(
        "llama",
        _LLAMA_KEYS,
        {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        "model.layers",
        {
            **{f"q_proj.{kind}": _halves("num_attention_heads") for kind in ("weight", "bias")},
            **{f"k_proj.{kind}": _halves("num_key_value_heads") for kind in ("weight", "bias")},
        },
    ),
    "gpt2": _Family(
        "gpt2",
        _GPT2_KEYS,
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "ffn_norm": "ln_2",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        "transformer.h",
        dict.fromkeys(("c_attn.weight", "c_proj.weight", "c_fc.weight"), _turned),
    ),
    "gptneox": _Family(
        "gpt_neox",
        _NEOX_KEYS,
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        "gpt_neox.layers",
        dict.fromkeys(("query_key_value.weight", "query_key_value.bias"), _by_head),
    ),
    "mamba": _Family(
        "mamba",
        {**_MAMBA_KEYS, "ssm.time_step_rank": "time_step_rank"},
        _MAMBA_OUTER,
        {**_MAMBA_PARTS, "ssm_x": "mixer.x_proj", "ssm_dt": "mixer.dt_proj"},
        "backbone.layers",
        {**_TAPS, ".A_log": lambda A, config: (-A).log()},
    ),
    "mamba2": _Family(
        "mamba2",
        {**_MAMBA_KEYS, "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
        _MAMBA_OUTER,
        {**_MAMBA_PARTS, "ssm_dt": "mixer.dt_bias", "ssm_norm": "mixer.norm"},
        "backbone.layers",
        {**_TAPS, ".A_log": lambda A, config: (-A).log().flatten(), ".D": _flat, "mixer.norm.weight": _flat},
    ),
}
