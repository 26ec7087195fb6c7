"""Llama: RMSNorm, rotary positions on halves, gated MLP, grouped keys and values, biases as an option."""

from models.config import LanguageModelConfig, MLPConfig, SoftmaxAttentionConfig
from models.errors import ConfigError
from models.pretrained.gpt2 import ACTIVATIONS
from models.pretrained.keys import Keys
from models.pretrained.names import Architecture, Entry, joined, same, transposed
from models.pretrained.rope import read_rope, write_rope
from models.pretrained.softmax import attention_only_mlp, plain_softmax, usual_scale


def read_config(keys: Keys) -> LanguageModelConfig:
    d_model, n_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    n_layers, d_vocab = keys.integer("num_hidden_layers"), keys.integer("vocab_size")
    n_ctx = keys.integer("max_position_embeddings", 2048)
    d_head = keys.integer("head_dim", None) or d_model // n_heads
    bias = keys.flag("attention_bias", False)
    mixer = SoftmaxAttentionConfig(
        n_heads=n_heads,
        n_kv_heads=keys.integer("num_key_value_heads", n_heads),
        d_head=d_head,
        qkv_bias=bias,
        out_bias=bias,
    )
    return LanguageModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        mixers=(mixer,) * n_layers,
        mlp=MLPConfig(
            d_mlp=keys.integer("intermediate_size"),
            act=keys.one_of("hidden_act", ACTIVATIONS, "silu"),
            gated=True,
            bias=keys.flag("mlp_bias", False),
        ),
        norm="rms",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        positions="rope",
        rope=read_rope(keys, d_head, n_ctx),
        tied=keys.flag("tie_word_embeddings", False),
        bos=keys.token("bos_token_id", d_vocab),
    )


def entries(config: LanguageModelConfig) -> list[Entry]:
    table = [same("embed.W_E", "model.embed_tokens.weight"), same("ln_final.w", "model.norm.weight")]
    if not config.tied:
        table.append(same("unembed.weight", "lm_head.weight"))
    for layer, mixer in enumerate(config.mixers):
        mixer = mixer.resolved(config.d_model)
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        widths = tuple(n * mixer.d_head for n in (mixer.n_heads, mixer.n_kv_heads, mixer.n_kv_heads))
        table.append(same(f"{ours}ln1.w", f"{theirs}input_layernorm.weight"))
        table.append(same(f"{ours}ln2.w", f"{theirs}post_attention_layernorm.weight"))
        for kind in ("weight", "bias")[: 2 if mixer.qkv_bias else 1]:
            parts = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
            table.append(joined(f"{ours}attn.in_proj.{kind}", parts, widths))
            table.append(same(f"{ours}attn.out_proj.{kind}", f"{theirs}self_attn.o_proj.{kind}"))
        for part, name in (("gate", "gate_proj"), ("in", "up_proj"), ("out", "down_proj")):
            table.append(transposed(f"{ours}mlp.W_{part}", f"{theirs}mlp.{name}.weight"))
            if config.mlp.bias:
                table.append(same(f"{ours}mlp.b_{part}", f"{theirs}mlp.{name}.bias"))
    return table


def fitted(config: LanguageModelConfig) -> LanguageModelConfig:
    mixers = plain_softmax(config, "Llama", grouped=True)
    usual_scale(mixers, "Llama")
    if (config.norm, config.positions) != ("rms", "rope"):
        raise ConfigError(
            f"Llama has norm 'rms' and rotary positions, not norm {config.norm!r} and positions "
            f"{config.positions!r}"
        )
    if config.rope.rotary_dim not in (None, mixers[0].d_head):
        raise ConfigError(f"Llama turns whole heads; this model has rotary_dim = {config.rope.rotary_dim}")
    if config.parallel_residual or (config.mlp is not None and not config.mlp.gated):
        raise ConfigError("Llama has a serial residual stream and a gated MLP")
    bias = any(mixer.qkv_bias or mixer.out_bias for mixer in mixers)
    return config.replace(
        mixers=tuple(mixer.replace(qkv_bias=bias, out_bias=bias) for mixer in mixers),
        mlp=config.mlp or attention_only_mlp(act="silu", gated=True),
        rope=config.rope.replace(layout="half"),
    )


def write_config(config: LanguageModelConfig) -> dict:
    first = config.mixers[0].resolved(config.d_model)
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": first.n_heads,
        "num_key_value_heads": first.n_kv_heads,
        "head_dim": first.d_head,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.n_ctx,
        "intermediate_size": config.mlp.d_mlp,
        "hidden_act": config.mlp.act,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": first.qkv_bias,
        "mlp_bias": config.mlp.bias,
        "rope_parameters": write_rope(config.rope, first.d_head),
    }


LLAMA = Architecture(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    prefix="model.",
    renamed={},
    ignored=(".rotary_emb.inv_freq",),
    read_config=read_config,
    entries=entries,
    fitted=fitted,
    write_config=write_config,
)
