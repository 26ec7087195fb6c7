"""Softmax models of Hugging Face transformers, read through TransformerLens's bridge."""

import contextlib
import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import DetectionError
from interp.subject import LayerView, Look, Subject
from interp.table_entries import from_pattern
from models.mixers.reading import Reading


class BridgeSubject(Subject):
    """A Hugging Face causal language model with softmax attention in every layer, as a TransformerBridge.

    Raises:
        DetectionError: a layer whose attention the bridge does not show.
    """

    def __init__(self, bridge: Any, *, bos: int | None, tokenizer: Any = None):
        cfg = bridge.cfg
        self.bridge, self.bos, self.tokenizer = bridge, bos, tokenizer
        self.mixers = ("softmax",) * cfg.n_layers
        self.n_heads, self.n_ctx, self.d_vocab = cfg.n_heads, cfg.n_ctx, cfg.d_vocab
        special = getattr(tokenizer, "all_special_ids", None) or []
        self.special = frozenset([*special, *([] if bos is None else [bos])])
        self.centred_norm = cfg.normalization_type in ("LN", "LNPre")
        self.device = self.W_E.device
        hooks = bridge.hook_dict
        for layer in range(cfg.n_layers):
            for point in ("hook_pattern", "hook_v"):
                if f"blocks.{layer}.attn.{point}" not in hooks:
                    raise DetectionError(
                        f"layer {layer} of this model has no {point}: only models with softmax attention in "
                        "every layer can be read through TransformerBridge"
                    )

    @property
    def n_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.bridge.original_model.parameters())

    @torch.no_grad()
    def logits(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_vocab"]:
        return self.bridge(tokens, return_type="logits")

    @torch.no_grad()
    def visit(self, tokens: Int[Tensor, "batch seq"], look: Look, *, units: str | None = None) -> None:
        values: dict[int, Tensor] = {}

        def keep(tensor: Tensor, hook: Any) -> None:
            values[_layer(hook.name)] = tensor

        def read(pattern: Tensor, hook: Any) -> None:
            layer = _layer(hook.name)
            look(self._view(layer, pattern, values.pop(layer)))

        hooks = [(f"blocks.{layer}.attn.hook_v", keep) for layer in range(self.n_layers)]
        hooks += [(f"blocks.{layer}.attn.hook_pattern", read) for layer in range(self.n_layers)]
        self.bridge.run_with_hooks(tokens, fwd_hooks=hooks, return_type=None)

    def _view(self, layer: int, pattern: Tensor, v: Tensor) -> LayerView:
        W_V, W_O = self.bridge.blocks[layer].attn.W_V, self.bridge.blocks[layer].attn.W_O
        # Grouped-query heads share values.
        W_V = W_V.repeat_interleave(W_O.shape[0] // W_V.shape[0], dim=0)
        reading = self._reading(W_O, self.bridge.blocks[layer].attn.b_O, pattern, v)
        return LayerView(layer=layer, readings=(reading,), W_V=W_V, W_O=W_O, ov_form="exact")

    def _reading(self, W_O: Tensor, bias: Tensor | None, pattern: Tensor, v: Tensor) -> Reading:
        n_heads, d_head, d_model = W_O.shape
        v = v.view(*v.shape[:2], -1, d_head)
        v = v.repeat_interleave(n_heads // v.shape[2], dim=2)
        constant = torch.zeros(d_model) if bias is None else bias
        return Reading(
            name="pattern",
            unit="head",
            normalisation="none",
            W_out=W_O,
            constant=constant.to(v).expand(*v.shape[:2], -1),
            z_index=torch.arange(n_heads * d_head, device=v.device).view(n_heads, d_head),
            entries=from_pattern(pattern),
            taps=v[None],
            make_pattern=lambda: pattern,
        )

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.bridge.original_model.get_input_embeddings().weight

    @property
    def W_U(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.bridge.original_model.get_output_embeddings().weight

    @property
    def final_gain(self) -> Float[Tensor, " d_model"]:
        return self._gain(self.bridge.ln_final)

    def input_gain(self, layer: int) -> Float[Tensor, " d_model"]:
        return self._gain(self.bridge.blocks[layer].ln1)

    def _gain(self, norm: Any) -> Float[Tensor, " d_model"]:
        gain = getattr(norm, "weight", None)
        if gain is None:
            return torch.ones_like(self.W_E[0])
        # Gemma stores the gain minus one.
        return gain + 1 if getattr(self.bridge.cfg, "rmsnorm_uses_offset", False) else gain


def open_bridge(path: str | Path, *, device: str = "cpu", bos: int | None | str = "auto") -> BridgeSubject:
    """Load a Hugging Face model folder or a `.gguf` file of a softmax model, without the network.

    Args:
        bos: `auto` takes the tokenizer's or the configuration's, where sequences begin with it; else an id or
            None.

    Raises:
        DetectionError: transformers or the bridge cannot read it; the message is their first line.
    """
    path = Path(path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with _quiet():
            model, tokenizer = _load(path, device)
            bridge = _boot(model)
    except DetectionError:
        raise
    # transformers and its file readers raise errors of every kind for a damaged file.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DetectionError(f"{path} cannot be read as a Hugging Face model: {reason}") from error
    _refuse_nan(path, model)
    if bos == "auto":
        bos = _bos(model, tokenizer)
    return BridgeSubject(bridge, bos=bos, tokenizer=tokenizer)


def _load(path: Path, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if gguf else path
    if not gguf and json.loads((path / "config.json").read_text()).get("model_type", "").startswith("mamba"):
        raise DetectionError(
            f"{path} is a Mamba model of Hugging Face: not supported yet; convert it to our own mixers"
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, **gguf, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.to(device).eval(), _tokenizer(folder, gguf)


def _tokenizer(folder: Path, gguf: dict[str, str]) -> Any:
    if not gguf and not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    ):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **gguf, local_files_only=True)


def _boot(model: Any) -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    # Not boot_transformers: that one looks for a tokenizer by name, on the network too.
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config, dtype=torch.float32)


def _refuse_nan(path: Path, model: Any) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise DetectionError(f"{path}: {name} holds values that are not finite (NaN or infinity)")


def _bos(model: Any, tokenizer: Any) -> int | None:
    found = getattr(tokenizer, "bos_token_id", None)
    return found if found is not None else getattr(model.config, "bos_token_id", None)


@contextlib.contextmanager
def _quiet():
    # transformers and the bridge report their progress and advice; a command has its own.
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _layer(name: str) -> int:
    return int(name.split(".")[1])
