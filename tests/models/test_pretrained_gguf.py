"""GGUF files written here, read into our mixers: equal to the models that they were written from."""

from pathlib import Path

import gguf
import hf_models
import numpy as np
import pytest
import torch

from models.errors import CheckpointError, ConfigError
from models.pretrained import UnsupportedArchitecture, from_pretrained


def _tokens() -> torch.Tensor:
    return torch.randint(0, hf_models.VOCAB, (2, 31), generator=torch.Generator().manual_seed(2))


def _llama_rows(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k."""
    half = rows.shape[0] // n_heads // 2
    return rows.reshape(n_heads, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _write(
    path: Path,
    architecture: str,
    numbers: dict,
    tensors: dict,
    *,
    kind=gguf.GGMLQuantizationType.F32,
    **fields,
):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in numbers.items():
        add = (
            writer.add_bool
            if isinstance(value, bool)
            else writer.add_float32
            if isinstance(value, float)
            else writer.add_uint32
        )
        add(f"{architecture}.{key}", value)
    for key, value in fields.items():
        writer.add_string(f"{architecture}.{key.replace('__', '.')}", value)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 0)
    for name, tensor in tensors.items():
        values = tensor.detach().float().contiguous().numpy()
        fits = values.ndim == 2 and values.shape[-1] % 32 == 0
        if kind == gguf.GGMLQuantizationType.F32 or not fits:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama(path: Path, hf, **options):
    state, config = hf.state_dict(), hf.config
    names = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        names["output.weight"] = state["lm_head.weight"]
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in parts.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ours)
            names[f"blk.{layer}.{ours}.weight"] = tensor if heads is None else _llama_rows(tensor, heads)
    numbers = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    return _write(path, "llama", numbers, names, **options)


def _neox(path: Path, hf):
    state, config = hf.state_dict(), hf.config
    names = {
        "token_embd.weight": state["gpt_neox.embed_in.weight"],
        "output.weight": hf.get_output_embeddings().weight,
    }
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
    for kind in ("weight", "bias"):
        names[f"output_norm.{kind}"] = state[f"gpt_neox.final_layer_norm.{kind}"]
        for layer in range(config.num_hidden_layers):
            for ours, theirs in parts.items():
                tensor = state[f"gpt_neox.layers.{layer}.{theirs}.{kind}"]
                if ours == "attn_qkv":
                    tensor = (
                        tensor.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                    )
                names[f"blk.{layer}.{ours}.{kind}"] = tensor
    numbers = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "rope.dimension_count": 4,
        "rope.freq_base": 500.0,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "use_parallel_residual": config.use_parallel_residual,
        "vocab_size": config.vocab_size,
    }
    return _write(path, "gptneox", numbers, names)


def _gpt2(path: Path, hf):
    state, config = hf.state_dict(), hf.config
    names = {
        "token_embd.weight": state["transformer.wte.weight"],
        "position_embd.weight": state["transformer.wpe.weight"],
    }
    parts = {
        "attn_norm": "ln_1",
        "ffn_norm": "ln_2",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
    for kind in ("weight", "bias"):
        names[f"output_norm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for layer in range(config.n_layer):
            for ours, theirs in parts.items():
                tensor = state[f"transformer.h.{layer}.{theirs}.{kind}"]
                names[f"blk.{layer}.{ours}.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
    numbers = {
        "context_length": config.n_positions,
        "block_count": config.n_layer,
        "embedding_length": config.n_embd,
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "vocab_size": config.vocab_size,
    }
    return _write(path, "gpt2", numbers, names)


def _mamba(path: Path, hf, architecture: str):
    state, config = hf.state_dict(), hf.config
    names = {
        "token_embd.weight": state["backbone.embeddings.weight"],
        "output_norm.weight": state["backbone.norm_f.weight"],
    }
    if not config.tie_word_embeddings:
        names["output.weight"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        at, to = f"backbone.layers.{layer}.", f"blk.{layer}."
        mixer = {
            key.removeprefix(at + "mixer."): value
            for key, value in state.items()
            if key.startswith(at + "mixer.")
        }
        names[to + "attn_norm.weight"] = state[at + "norm.weight"]
        names[to + "ssm_in.weight"], names[to + "ssm_out.weight"] = (
            mixer["in_proj.weight"],
            mixer["out_proj.weight"],
        )
        names[to + "ssm_conv1d.weight"], names[to + "ssm_conv1d.bias"] = (
            mixer["conv1d.weight"][:, 0],
            mixer["conv1d.bias"],
        )
        A, D = -mixer["A_log"].exp(), mixer["D"]
        if architecture == "mamba":
            names[to + "ssm_x.weight"] = mixer["x_proj.weight"]
            names[to + "ssm_dt.weight"], names[to + "ssm_dt.bias"] = (
                mixer["dt_proj.weight"],
                mixer["dt_proj.bias"],
            )
        else:
            A, D = A[:, None], D[:, None]
            names[to + "ssm_dt.bias"] = mixer["dt_bias"]
            names[to + "ssm_norm.weight"] = mixer["norm.weight"].view(config.n_groups, -1)
        names[to + "ssm_a"], names[to + "ssm_d"] = A, D
    numbers = {
        "context_length": 1024,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.expand * config.hidden_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.time_step_rank if architecture == "mamba" else config.num_heads,
        "vocab_size": config.vocab_size,
    }
    if architecture == "mamba2":
        numbers["ssm.group_count"] = config.n_groups
    return _write(path, architecture, numbers, names)


WRITERS = {
    "llama": (hf_models.llama, _llama),
    "llama tied": (lambda: hf_models.llama(tie_word_embeddings=True), _llama),
    "gpt2": (hf_models.gpt2, _gpt2),
    "gptneox": (hf_models.gpt_neox, _neox),
    "mamba": (hf_models.mamba, lambda path, hf: _mamba(path, hf, "mamba")),
    "mamba2": (hf_models.mamba2, lambda path, hf: _mamba(path, hf, "mamba2")),
}


@pytest.mark.parametrize("name", WRITERS)
@torch.no_grad()
def test_reads_what_the_model_was(name, tmp_path):
    make, write = WRITERS[name]
    hf = make()
    model = from_pretrained(write(tmp_path / "model.gguf", hf))
    expected = hf(_tokens()).logits
    assert (model(_tokens()) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (model.source.format, model.source.stored_dtype) == ("gguf", "float32")
    assert model.config.bos == 0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "Q5_0"])
@torch.no_grad()
def test_quantised_blocks_are_undone(kind, tmp_path):
    """Against our folder reader on weights that went through the same quantisation: exact."""
    hf = hf_models.llama(hidden_size=32, head_dim=8, intermediate_size=64)
    quantised = gguf.GGMLQuantizationType[kind]
    model = from_pretrained(_llama(tmp_path / "model.gguf", hf, kind=quantised))
    embedding = hf.model.embed_tokens.weight.detach().numpy()
    undone = gguf.quants.dequantize(gguf.quants.quantize(embedding, quantised), quantised)
    assert torch.equal(model.embed.W_E, torch.from_numpy(undone))
    # The first query head's rows, put back in Hugging Face's order.
    rows = hf.model.layers[0].self_attn.q_proj.weight.detach()
    stored = gguf.quants.quantize(_llama_rows(rows, 4).contiguous().numpy(), quantised)
    undone = torch.from_numpy(np.copy(gguf.quants.dequantize(stored, quantised)))
    assert torch.equal(model.blocks[0].attn.in_proj.weight[0], undone[0])
    assert torch.equal(model.blocks[0].attn.in_proj.weight[1], undone[2])
    assert torch.equal(model.blocks[0].attn.in_proj.weight[4], undone[1])


def test_tokenizer_of_the_header(tmp_path):
    path = tmp_path / "model.gguf"
    hf = hf_models.llama()
    _llama(path, hf)
    model = from_pretrained(path)
    assert model.tokenizer is None and model.source.tokenizer == "none: the file holds no tokens"
    with pytest.raises(ConfigError, match="no tokenizer: give token ids"):
        model.to_tokens("text")


def test_unsupported_quantisation_is_named(tmp_path):
    """Q8_1 holds activations: the gguf package has its block size, but nothing that undoes it."""
    hf = hf_models.llama(hidden_size=32, head_dim=8, intermediate_size=64)
    path = _llama(tmp_path / "model.gguf", hf, kind=gguf.GGMLQuantizationType.Q8_0)
    stored = bytearray(path.read_bytes())
    name = b"blk.0.attn_v.weight"
    # In the header: name, number of axes (uint32), their sizes (uint64 each), type (uint32).
    at = stored.index(name) + len(name) + 4 + 2 * 8
    assert stored[at] == gguf.GGMLQuantizationType.Q8_0
    stored[at] = gguf.GGMLQuantizationType.Q8_1
    path.write_bytes(stored + bytes(4096))
    with pytest.raises(
        ConfigError, match="'blk.0.attn_v.weight' is quantised as Q8_1, which is not read; accepted: F32"
    ) as error:
        from_pretrained(path)
    assert "\n" not in str(error.value)


def test_unknown_architecture_and_damage(tmp_path):
    path = _write(tmp_path / "a.gguf", "rwkv6", {"block_count": 1}, {"token_embd.weight": torch.zeros(2, 2)})
    with pytest.raises(UnsupportedArchitecture, match="'rwkv6' is not read; accepted: llama, gpt2"):
        from_pretrained(path)
    (tmp_path / "b.gguf").write_bytes(b"no such format")
    with pytest.raises(CheckpointError, match="b.gguf: not a readable GGUF file"):
        from_pretrained(tmp_path / "b.gguf")
    whole = _llama(tmp_path / "c.gguf", hf_models.llama()).read_bytes()
    (tmp_path / "c.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="c.gguf: not a readable GGUF file"):
        from_pretrained(tmp_path / "c.gguf")
