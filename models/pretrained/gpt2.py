"""GPT-2: learned positions, LayerNorm with bias, biases everywhere, matrices stored [in, out]."""

from models.config import LanguageModelConfig, MLPConfig, SoftmaxAttentionConfig
from models.errors import ConfigError
from models.pretrained.keys import Keys
from models.pretrained.names import Architecture, Entry, same, transposed
from models.pretrained.softmax import attention_only_mlp, plain_softmax

ACTIVATIONS = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


def read_config(keys: Keys) -> LanguageModelConfig:
    keys.refuse("add_cross_attention", False)
    d_model = keys.integer("n_embd", also=("hidden_size",))
    n_heads = keys.integer("n_head", also=("num_attention_heads",))
    n_layers = keys.integer("n_layer", also=("num_hidden_layers",))
    d_vocab = keys.integer("vocab_size")
    if d_model % n_heads:
        raise ConfigError(f"{keys.where}: n_embd = {d_model} does not divide into n_head = {n_heads} heads")
    usual = (d_model // n_heads) ** -0.5 if keys.flag("scale_attn_weights", True) else 1.0
    by_layer = keys.flag("scale_attn_by_inverse_layer_idx", False)
    scales = [usual / (layer + 1) if by_layer else usual for layer in range(n_layers)]
    return LanguageModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        d_vocab=d_vocab,
        n_ctx=keys.integer("n_positions", also=("n_ctx", "max_position_embeddings")),
        mixers=tuple(
            SoftmaxAttentionConfig(
                n_heads=n_heads,
                qkv_bias=True,
                out_bias=True,
                scale=None if scale == (d_model // n_heads) ** -0.5 else scale,
            )
            for scale in scales
        ),
        mlp=MLPConfig(
            d_mlp=keys.integer("n_inner", 4 * d_model),
            act=keys.one_of("activation_function", ACTIVATIONS, "gelu_new"),
            bias=True,
        ),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        positions="learned",
        tied=keys.flag("tie_word_embeddings", True),
        bos=keys.token("bos_token_id", d_vocab),
    )


def entries(config: LanguageModelConfig) -> list[Entry]:
    table = [
        same("embed.W_E", "transformer.wte.weight"),
        same("pos_embed.W_pos", "transformer.wpe.weight"),
        same("ln_final.w", "transformer.ln_f.weight"),
        same("ln_final.b", "transformer.ln_f.bias"),
    ]
    if not config.tied:
        table.append(same("unembed.weight", "lm_head.weight"))
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        for norm, name in (("ln1", "ln_1"), ("ln2", "ln_2")):
            table.append(same(f"{ours}{norm}.w", f"{theirs}{name}.weight"))
            table.append(same(f"{ours}{norm}.b", f"{theirs}{name}.bias"))
        for part, name in (("in_proj", "c_attn"), ("out_proj", "c_proj")):
            table.append(transposed(f"{ours}attn.{part}.weight", f"{theirs}attn.{name}.weight"))
            table.append(same(f"{ours}attn.{part}.bias", f"{theirs}attn.{name}.bias"))
        for part, name in (("in", "c_fc"), ("out", "c_proj")):
            table.append(same(f"{ours}mlp.W_{part}", f"{theirs}mlp.{name}.weight"))
            table.append(same(f"{ours}mlp.b_{part}", f"{theirs}mlp.{name}.bias"))
    return table


def fitted(config: LanguageModelConfig) -> LanguageModelConfig:
    mixers = plain_softmax(config, "GPT-2", grouped=False)
    _scale_flags(mixers)
    if (config.norm, config.positions) not in (("layer", "learned"), ("layer", "none")):
        raise ConfigError(
            f"GPT-2 has norm 'layer' and learned positions, not norm {config.norm!r} and positions "
            f"{config.positions!r}"
        )
    if config.parallel_residual or (config.mlp is not None and config.mlp.gated):
        raise ConfigError("GPT-2 has a serial residual stream and an MLP without gate")
    mlp = config.mlp or attention_only_mlp(act="gelu_new", gated=False)
    return config.replace(
        mixers=tuple(mixer.replace(qkv_bias=True, out_bias=True) for mixer in mixers),
        mlp=mlp.replace(bias=True),
        norm_bias=True,
        positions="learned",
    )


def _scale_flags(mixers: tuple[SoftmaxAttentionConfig, ...]) -> tuple[bool, bool]:
    """`scale_attn_weights` and `scale_attn_by_inverse_layer_idx` of these mixers.

    Raises:
        ConfigError: their scales are none that these two can say.
    """
    usual = mixers[0].d_head ** -0.5
    scales = [usual if mixer.scale is None else mixer.scale for mixer in mixers]
    for weights in (True, False):
        for by_layer in (False, True):
            base = usual if weights else 1.0
            if scales == [base / (layer + 1) if by_layer else base for layer in range(len(scales))]:
                return weights, by_layer
    raise ConfigError(
        f"GPT-2 scales attention with 1/sqrt(d_head) or 1, or these over layer + 1; this model has scale = "
        f"{scales}"
    )


def write_config(config: LanguageModelConfig) -> dict:
    first = config.mixers[0]
    mixers = tuple(mixer.resolved(config.d_model) for mixer in config.mixers)
    scaled, by_layer = _scale_flags(mixers)
    return {
        "n_embd": config.d_model,
        "n_head": first.n_heads,
        "n_layer": config.n_layers,
        "n_positions": config.n_ctx,
        "n_inner": config.mlp.d_mlp,
        "activation_function": config.mlp.act,
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": scaled,
        "scale_attn_by_inverse_layer_idx": by_layer,
    }


GPT2 = Architecture(
    model_type="gpt2",
    hf_class="GPT2LMHeadModel",
    prefix="transformer.",
    renamed={},
    ignored=(".attn.bias", ".attn.masked_bias"),
    read_config=read_config,
    entries=entries,
    fitted=fitted,
    write_config=write_config,
)
