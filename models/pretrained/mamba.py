"""Mamba-1 and Mamba-2: our mixers keep the parameters' names, so the tables are short."""

import math

from models.config import LanguageModelConfig, Mamba1Config, Mamba2Config
from models.errors import ConfigError
from models.pretrained.keys import Keys
from models.pretrained.names import Architecture, Entry, same

# Neither file format says how long the training sequences were; nothing in these models depends on it.
N_CTX = 2048
# Stands for "no upper limit": JSON has no infinity.
UNLIMITED = 1e30


def read_mamba1(keys: Keys) -> LanguageModelConfig:
    d_model = keys.integer("hidden_size")
    mixer = Mamba1Config(
        d_inner=int(keys.number("expand", 2) * d_model),
        d_state=keys.integer("state_size", 16),
        dt_rank=_dt_rank(keys, d_model),
        dt_min=keys.number("time_step_min", 1e-3),
        dt_max=keys.number("time_step_max", 0.1),
        **_shared(keys),
    )
    return _model(keys, d_model, mixer, tied=True)


def read_mamba2(keys: Keys) -> LanguageModelConfig:
    d_model = keys.integer("hidden_size")
    d_inner = int(keys.number("expand", 2) * d_model)
    n_heads, d_head = keys.integer("num_heads", 128), keys.integer("head_dim", 64)
    if n_heads * d_head != d_inner:
        raise ConfigError(
            f"{keys.where}: num_heads * head_dim = {n_heads} * {d_head} is not expand * hidden_size = "
            f"{d_inner}"
        )
    mixer = Mamba2Config(
        d_inner=d_inner,
        d_head=d_head,
        n_heads=n_heads,
        d_state=keys.integer("state_size", 128),
        n_groups=keys.integer("n_groups", 8),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        dt_limits=_dt_limits(keys),
        **_shared(keys),
    )
    return _model(keys, d_model, mixer, tied=False)


def _shared(keys: Keys) -> dict:
    keys.refuse("hidden_act", "silu", "swish")
    return {
        "d_conv": keys.integer("conv_kernel", 4),
        "conv_bias": keys.flag("use_conv_bias", True),
        "proj_bias": keys.flag("use_bias", False),
    }


def _model(
    keys: Keys, d_model: int, mixer: Mamba1Config | Mamba2Config, *, tied: bool
) -> LanguageModelConfig:
    n_layers, d_vocab = keys.integer("num_hidden_layers"), keys.integer("vocab_size")
    return LanguageModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        d_vocab=d_vocab,
        n_ctx=keys.integer("max_position_embeddings", N_CTX),
        mixers=(mixer,) * n_layers,
        norm="rms",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        residual_in_fp32=keys.flag("residual_in_fp32", True),
        tied=keys.flag("tie_word_embeddings", tied),
        bos=keys.token("bos_token_id", d_vocab),
    )


def _dt_rank(keys: Keys, d_model: int) -> int:
    if keys.get("time_step_rank", "auto") == "auto":
        return math.ceil(d_model / 16)
    return keys.integer("time_step_rank")


def _dt_limits(keys: Keys) -> tuple[float, float] | None:
    limits = keys.get("time_step_limit", (0.0, math.inf))
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise keys.refused("time_step_limit", "two numbers")
    low, high = (float(limit) for limit in limits)
    # A softplus is positive: these limits change nothing.
    return None if low <= 0 and math.isinf(high) else (low, min(high, UNLIMITED))


def entries(config: LanguageModelConfig) -> list[Entry]:
    table = [same("embed.W_E", "backbone.embeddings.weight"), same("ln_final.w", "backbone.norm_f.weight")]
    if not config.tied:
        table.append(same("unembed.weight", "lm_head.weight"))
    for layer, mixer in enumerate(config.mixers):
        ours, theirs = f"blocks.{layer}.", f"backbone.layers.{layer}."
        table.append(same(f"{ours}ln1.w", f"{theirs}norm.weight"))
        table += [same(f"{ours}attn.{name}", f"{theirs}mixer.{name}") for name in _parameters(mixer)]
    return table


def _parameters(mixer: Mamba1Config | Mamba2Config) -> list[str]:
    names = ["A_log", "D", "conv1d.weight", "in_proj.weight", "out_proj.weight"]
    names += ["conv1d.bias"] if mixer.conv_bias else []
    names += ["in_proj.bias", "out_proj.bias"] if mixer.proj_bias else []
    if mixer.kind == "mamba1":
        return [*names, "x_proj.weight", "dt_proj.weight", "dt_proj.bias"]
    return [*names, "dt_bias", "norm.weight"]


def _fitted(config: LanguageModelConfig, kind: str, name: str) -> LanguageModelConfig:
    kinds = sorted({mixer.kind for mixer in config.mixers})
    if kinds != [kind] or len({mixer.to_dict().__repr__() for mixer in config.mixers}) > 1:
        raise ConfigError(
            f"{name} has the same {kind} mixer in every layer; this model has {', '.join(kinds)}"
        )
    if config.mlp is not None or (config.norm, config.positions) != ("rms", "none"):
        raise ConfigError(
            f"{name} has no MLP, norm 'rms' and no positions; this model has {'an' if config.mlp else 'no'} "
            f"MLP, norm "
            f"{config.norm!r} and positions {config.positions!r}"
        )
    if config.unembed_bias:
        raise ConfigError(f"{name} has no unembedding bias; this model has one")
    config = config.replace(mixers=tuple(mixer.resolved(config.d_model) for mixer in config.mixers))
    if config.mixers[0].d_inner % config.d_model:
        raise ConfigError(
            f"{name} has d_inner a multiple of d_model; this model has d_inner = {config.mixers[0].d_inner} "
            f"and "
            f"d_model = {config.d_model}"
        )
    return config


def fitted_mamba1(config: LanguageModelConfig) -> LanguageModelConfig:
    config = _fitted(config, "mamba1", "Mamba")
    if config.mixers[0].constant_bcdt:
        raise ConfigError("Mamba has no constant_bcdt; this model has it")
    return config


def fitted_mamba2(config: LanguageModelConfig) -> LanguageModelConfig:
    config = _fitted(config, "mamba2", "Mamba-2")
    mixer = config.mixers[0]
    if not mixer.gated_norm or mixer.norm_eps != config.norm_eps:
        raise ConfigError(
            f"Mamba-2 has a gated norm with the model's epsilon {config.norm_eps}; this model has "
            f"gated_norm = "
            f"{mixer.gated_norm} and norm_eps = {mixer.norm_eps}"
        )
    return config


def _written(config: LanguageModelConfig) -> dict:
    mixer = config.mixers[0]
    return {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "expand": mixer.d_inner // config.d_model,
        "state_size": mixer.d_state,
        "conv_kernel": mixer.d_conv,
        "use_conv_bias": mixer.conv_bias,
        "use_bias": mixer.proj_bias,
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.residual_in_fp32,
        "time_step_min": mixer.dt_min,
        "time_step_max": mixer.dt_max,
        "hidden_act": "silu",
        # Not a key of this architecture; read back by this project.
        "max_position_embeddings": config.n_ctx,
    }


def write_mamba1(config: LanguageModelConfig) -> dict:
    mixer = config.mixers[0]
    return _written(config) | {"time_step_rank": mixer.dt_rank, "intermediate_size": mixer.d_inner}


def write_mamba2(config: LanguageModelConfig) -> dict:
    mixer = config.mixers[0]
    values = {"num_heads": mixer.n_heads, "head_dim": mixer.d_head, "n_groups": mixer.n_groups}
    if mixer.dt_limits is not None:
        values["time_step_limit"] = list(mixer.dt_limits)
    return _written(config) | values


MAMBA = Architecture(
    model_type="mamba",
    hf_class="MambaForCausalLM",
    prefix="backbone.",
    renamed={"backbone.embedding.": "backbone.embeddings."},
    ignored=(),
    read_config=read_mamba1,
    entries=entries,
    fitted=fitted_mamba1,
    write_config=write_mamba1,
)
MAMBA2 = Architecture(
    model_type="mamba2",
    hf_class="Mamba2ForCausalLM",
    prefix="backbone.",
    renamed={"backbone.embedding.": "backbone.embeddings."},
    ignored=(),
    read_config=read_mamba2,
    entries=entries,
    fitted=fitted_mamba2,
    write_config=write_mamba2,
)
