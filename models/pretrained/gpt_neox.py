"""GPT-NeoX and Pythia: partial rotary positions, LayerNorm, parallel residual stream; q, k, v by head."""

from torch import Tensor

from models.config import LanguageModelConfig, MLPConfig, SoftmaxAttentionConfig
from models.errors import ConfigError
from models.pretrained.gpt2 import ACTIVATIONS
from models.pretrained.keys import Keys
from models.pretrained.names import Architecture, Entry, same, transposed
from models.pretrained.rope import read_rope, write_rope
from models.pretrained.softmax import attention_only_mlp, plain_softmax, usual_scale


def read_config(keys: Keys) -> LanguageModelConfig:
    d_model, n_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    n_layers, d_vocab = keys.integer("num_hidden_layers"), keys.integer("vocab_size")
    n_ctx = keys.integer("max_position_embeddings", 2048)
    if d_model % n_heads:
        raise ConfigError(
            f"{keys.where}: hidden_size = {d_model} does not divide into num_attention_heads = {n_heads} "
            f"heads"
        )
    bias = keys.flag("attention_bias", True)
    return LanguageModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        mixers=(SoftmaxAttentionConfig(n_heads=n_heads, qkv_bias=bias, out_bias=bias),) * n_layers,
        mlp=MLPConfig(
            d_mlp=keys.integer("intermediate_size"),
            act=keys.one_of("hidden_act", ACTIVATIONS, "gelu"),
            bias=True,
        ),
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        positions="rope",
        rope=read_rope(keys, d_model // n_heads, n_ctx, partial=0.25),
        tied=keys.flag("tie_word_embeddings", False),
        parallel_residual=keys.flag("use_parallel_residual", True),
        bos=keys.token("bos_token_id", d_vocab),
    )


def entries(config: LanguageModelConfig) -> list[Entry]:
    table = [
        same("embed.W_E", "gpt_neox.embed_in.weight"),
        same("ln_final.w", "gpt_neox.final_layer_norm.weight"),
        same("ln_final.b", "gpt_neox.final_layer_norm.bias"),
    ]
    if not config.tied:
        table.append(same("unembed.weight", "embed_out.weight"))
    for layer, mixer in enumerate(config.mixers):
        ours, theirs = f"blocks.{layer}.", f"gpt_neox.layers.{layer}."
        for norm, name in (("ln1", "input_layernorm"), ("ln2", "post_attention_layernorm")):
            table.append(same(f"{ours}{norm}.w", f"{theirs}{name}.weight"))
            table.append(same(f"{ours}{norm}.b", f"{theirs}{name}.bias"))
        for kind in ("weight", "bias")[: 2 if mixer.qkv_bias else 1]:
            table.append(
                by_head(
                    f"{ours}attn.in_proj.{kind}", f"{theirs}attention.query_key_value.{kind}", mixer.n_heads
                )
            )
            table.append(same(f"{ours}attn.out_proj.{kind}", f"{theirs}attention.dense.{kind}"))
        for part, name in (("in", "dense_h_to_4h"), ("out", "dense_4h_to_h")):
            table.append(transposed(f"{ours}mlp.W_{part}", f"{theirs}mlp.{name}.weight"))
            table.append(same(f"{ours}mlp.b_{part}", f"{theirs}mlp.{name}.bias"))
    return table


def by_head(ours: str, theirs: str, n_heads: int) -> Entry:
    """Rows in the order (head, q|k|v, d_head) in theirs, (q|k|v, head, d_head) in ours."""

    def swapped(first: int, second: int):
        def move(rows: Tensor) -> tuple[Tensor]:
            return (rows.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2),)

        return move

    return Entry(ours=(ours,), theirs=(theirs,), read=swapped(n_heads, 3), write=swapped(3, n_heads))


def fitted(config: LanguageModelConfig) -> LanguageModelConfig:
    mixers = plain_softmax(config, "GPT-NeoX", grouped=False)
    usual_scale(mixers, "GPT-NeoX")
    if (config.norm, config.positions) != ("layer", "rope"):
        raise ConfigError(
            f"GPT-NeoX has norm 'layer' and rotary positions, not norm {config.norm!r} and positions "
            f"{config.positions!r}"
        )
    if config.mlp is not None and config.mlp.gated:
        raise ConfigError("GPT-NeoX has an MLP without gate")
    mlp = config.mlp or attention_only_mlp(act="gelu", gated=False)
    bias = any(mixer.qkv_bias or mixer.out_bias for mixer in mixers)
    return config.replace(
        mixers=tuple(mixer.replace(qkv_bias=bias, out_bias=bias) for mixer in mixers),
        mlp=mlp.replace(bias=True),
        norm_bias=True,
        rope=config.rope.replace(layout="half"),
    )


def write_config(config: LanguageModelConfig) -> dict:
    first = config.mixers[0]
    d_head = config.d_model // first.n_heads
    rope = write_rope(config.rope, d_head)
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": first.n_heads,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.n_ctx,
        "intermediate_size": config.mlp.d_mlp,
        "hidden_act": config.mlp.act,
        "layer_norm_eps": config.norm_eps,
        "attention_bias": first.qkv_bias,
        "use_parallel_residual": config.parallel_residual,
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope},
    }


GPT_NEOX = Architecture(
    model_type="gpt_neox",
    hf_class="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    renamed={"lm_head.": "embed_out."},
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    read_config=read_config,
    entries=entries,
    fitted=fitted,
    write_config=write_config,
)
