"""Tiny random Hugging Face models: one of each family and variant that `models.pretrained` reads."""

import torch

VOCAB, CTX = 61, 48

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "beta_fast": 16.0,
    },
}


def gpt2(**changes):
    values = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": CTX, "layer_norm_epsilon": 1e-3}
    return _made("GPT2", values | changes)


def gpt_neox(**changes):
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": CTX,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "layer_norm_eps": 1e-3,
    }
    return _made("GPTNeoX", values | changes)


def llama(**changes):
    values = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "max_position_embeddings": CTX,
        "rms_norm_eps": 1e-3,
        "rope_parameters": dict(ROPE["default"]),
    }
    return _made("Llama", values | changes)


def mamba(**changes):
    values = {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 5, "layer_norm_epsilon": 1e-3}
    return _made("Mamba", values | changes)


def mamba2(**changes):
    values = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 6,
        "head_dim": 8,
        "state_size": 7,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-3,
        "chunk_size": 16,
    }
    return _made("Mamba2", values | changes)


def _made(name: str, values: dict):
    import transformers

    values = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None} | values
    config = getattr(transformers, f"{name}Config")(**values)
    suffix = {"GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, name + suffix)(config)
        # Defaults would hide an ignored tensor: zero biases, unit gains, small matrices.
        for key, parameter in model.named_parameters():
            if key.endswith(("A_log", "dt_bias", "dt_proj.bias")):
                parameter.data += 0.3 * torch.randn_like(parameter)
            elif parameter.ndim == 1:
                parameter.data = 0.3 * torch.randn_like(parameter) + (0.0 if "bias" in key else 1.0)
            elif "conv1d" not in key:
                parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    model.set_attn_implementation("eager") if name in ("GPT2", "GPTNeoX", "Llama") else None
    return model.eval()


VARIANTS = {
    "gpt2": gpt2,
    "gpt2 untied, relu, narrow MLP": lambda: gpt2(
        tie_word_embeddings=False, activation_function="relu", n_inner=20
    ),
    "gpt2 scales by layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2 unscaled": lambda: gpt2(scale_attn_weights=False, activation_function="gelu"),
    "gpt_neox": gpt_neox,
    "gpt_neox serial, whole rotary, tied": lambda: gpt_neox(
        use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
    ),
    "gpt_neox without attention biases, linear rope": lambda: gpt_neox(
        attention_bias=False,
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 90.0,
            "factor": 2.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama": llama,
    "llama biases, tied": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama one key head": lambda: llama(num_key_value_heads=1, head_dim=6),
    **{
        f"llama rope {kind}": lambda kind=kind: llama(rope_parameters=dict(ROPE[kind]))
        for kind in ROPE
        if kind != "default"
    },
    "llama rope yarn mscale": lambda: llama(
        rope_parameters={**ROPE["yarn"], "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}
    ),
    "mamba": mamba,
    "mamba biases, untied": lambda: mamba(
        use_bias=True, use_conv_bias=False, tie_word_embeddings=False, time_step_rank=3
    ),
    "mamba2 two groups": mamba2,
    "mamba2 one group, biases, tied": lambda: mamba2(n_groups=1, use_bias=True, tie_word_embeddings=True),
    "mamba2 limits": lambda: mamba2(time_step_limit=[0.3, 0.9], n_groups=3),
}
