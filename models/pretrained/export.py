"""Our models in Hugging Face's formats, with equal logits there."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.config import LanguageModelConfig
from models.errors import ConfigError
from models.pretrained.gpt2 import GPT2
from models.pretrained.gpt_neox import GPT_NEOX
from models.pretrained.llama import LLAMA
from models.pretrained.mamba import MAMBA, MAMBA2
from models.pretrained.names import Architecture, State, write_state
from models.pretrained.softmax import half_layout


def to_pretrained(folder: str | Path, model: nn.Module) -> Path:
    """Write a model as a Hugging Face folder: config.json, model.safetensors and its tokenizer.

    The architecture follows from the model: Mamba-1 -> mamba, Mamba-2 -> mamba2; softmax with RMSNorm and
    rotary positions -> llama, with LayerNorm and rotary positions -> gpt_neox, with LayerNorm and learned (or
    no) positions -> gpt2. What the architecture always has and the model has not is written as zeros (biases,
    positions), and a model without MLPs gets MLPs of one unit that write 0: the logits are the same.

    Args:
        model: A LanguageModel, bare or wrapped by torch.compile or DistributedDataParallel.

    Returns:
        The folder. It appears whole or not at all.

    Raises:
        ConfigError: no architecture there can express this model; the message names what it lacks.
        CheckpointError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    from models.checkpoint import model_tensors, unwrapped
    from models.disk import written_folder

    folder, model = Path(folder), unwrapped(model)
    architecture = architecture_of(model.config)
    config = architecture.fitted(model.config)
    state = _padded(model_tensors(model), model.config, config)
    # Clones: parts of one parameter must not share memory in the file's eyes.
    tensors = {
        name: tensor.clone() for name, tensor in write_state(architecture.entries(config), state).items()
    }
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    files = _tokenizer_files(model)
    special = json.loads(files["tokenizer_config.json"]) if files else {}
    values = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": config.d_vocab,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos,
        "eos_token_id": _token_id(model.tokenizer, special.get("eos_token")),
        "pad_token_id": None,
        "dtype": dtype,
        **architecture.write_config(config),
    }
    files["config.json"] = json.dumps(values, indent=2, allow_nan=False) + "\n"
    with written_folder(folder) as temporary:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
    return folder


def architecture_of(config: LanguageModelConfig) -> Architecture:
    """The Hugging Face architecture of a model.

    Raises:
        ConfigError: its mixers are mixed, or of a kind that none there has.
    """
    kinds = sorted({mixer.kind for mixer in config.mixers})
    if kinds == ["mamba1"]:
        return MAMBA
    if kinds == ["mamba2"]:
        return MAMBA2
    if kinds == ["softmax"]:
        if config.norm == "rms":
            return LLAMA
        return GPT_NEOX if config.positions == "rope" else GPT2
    raise ConfigError(
        f"no Hugging Face architecture here has the mixers {', '.join(kinds)}; accepted: softmax, mamba1 or "
        f"mamba2 in "
        "every layer"
    )


def _padded(state: State, config: LanguageModelConfig, target: LanguageModelConfig) -> State:
    """The state of the fitted model: ours, and zeros (norm gains: ones) for what only that one has."""
    from models.language_model import LanguageModel

    full = LanguageModel(target).state_dict()
    dtype = next(iter(state.values())).dtype
    out = {}
    for name, tensor in full.items():
        if name in state:
            out[name] = state[name]
        else:
            out[name] = (
                torch.ones_like(tensor, dtype=dtype)
                if _is_gain(name)
                else torch.zeros_like(tensor, dtype=dtype)
            )
    left = sorted(set(state) - set(full))
    if left:
        raise ConfigError(f"{left[0]!r} has no place in that architecture")
    if config.rope is not None and config.rope.layout == "adjacent":
        _to_halves(out, config)
    return out


def _is_gain(name: str) -> bool:
    return name.split(".")[-2].startswith("ln") and name.endswith(".w")


def _to_halves(state: State, config: LanguageModelConfig) -> None:
    for layer, mixer in enumerate(config.mixers):
        mixer = mixer.resolved(config.d_model)
        for kind in ("weight", "bias"):
            name = f"blocks.{layer}.attn.in_proj.{kind}"
            if name in state:
                state[name] = half_layout(
                    state[name], config.rope, mixer.n_heads, mixer.n_kv_heads, mixer.d_head
                )


def _tokenizer_files(model: Any) -> dict[str, str]:
    """`tokenizer.json` and what transformers needs beside it; empty where the model has no tokenizer."""
    tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    if not hasattr(tokenizer, "to_str"):
        return {}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.n_ctx,
        "clean_up_tokenization_spaces": False,
    }
    if model.config.bos is not None:
        settings["bos_token"] = tokenizer.id_to_token(model.config.bos)
    if tokenizer.token_to_id("<|endoftext|>") is not None:
        settings["eos_token"] = "<|endoftext|>"
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def _token_id(tokenizer: Any, text: str | None) -> int | None:
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return None if text is None else tokenizer.token_to_id(text)
