"""A peer that starts from our initial weights, so that both loss curves can be compared step by step.

With equal weights these peers (`peer` with `like_ours`) compute our function, and what is left is rounding:

- All: untied embeddings, RMSNorm with eps 1e-5, no state before the sequence, losses a mean over the tokens
  after the first of each sequence. Weights are float32, and with them the residual stream: fla's
  residual_in_fp32 changes nothing.
- softmax: rows of queries, keys and values in one matrix, rotary halves, gate beside the MLP's other half.
- linear: fla's layer has a per-head RMSNorm of its outputs in place of our denominators, and eps 1e-6 in its
  norms. For this comparison it is built with denominators (norm_feature_map), without that norm and with our
  eps; it is another layer than the one that is timed. Left: it scales both sums with 1/sqrt(d_head), adds
  1e-10 to the denominators where we add 1e-6, and adds up keys in bfloat16 under autocast, as we do not.
- mamba1, mamba2: the parameters of Hugging Face's layers under the same names, biases in the convolution
  only, no limits on dt (dt_limit 0 .. infinity; dt_min and dt_max only shape fla's own initial weights);
  Mamba-2 multiplies the gate before its norm, with one group.
"""

from collections.abc import Callable

import torch
from torch import nn

from experiments.benchmarks.whole_models.contenders import Contender, Shape, ours, peer
from models.config import LanguageModelConfig
from models.errors import ConfigError
from models.pretrained.mamba import entries as mamba_entries
from models.pretrained.names import Entry, joined, same, transposed, write_state


def peer_with_our_weights(kind: str, shape: Shape) -> Contender:
    """The peer that computes our function, with the weights that `ours` starts from."""
    contender = peer(kind, shape, like_ours=True)
    copy_weights(kind, ours(kind, shape).model, contender.model)
    return contender


@torch.no_grad()
def copy_weights(kind: str, ours_model: nn.Module, peer_model: nn.Module) -> None:
    """Write our weights over all of the peer's.

    Raises:
        ConfigError: a parameter of either side that the other has no place for, or of another shape. Nothing
            is written then.
    """
    table = ENTRIES[kind](ours_model.config)
    source, target = dict(ours_model.named_parameters()), dict(peer_model.named_parameters())
    _check_all_named(kind, "ours", source, [name for entry in table for name in entry.ours])
    _check_all_named(kind, "the peer", target, [name for entry in table for name in entry.theirs])
    values = write_state(table, source)
    for name, value in values.items():
        if value.shape != target[name].shape:
            raise ConfigError(
                f"{kind}: the peer's {name!r} has shape {list(target[name].shape)}; ours gives "
                f"{list(value.shape)}"
            )
    for name, value in values.items():
        target[name].copy_(value)


def _check_all_named(kind: str, who: str, parameters: dict[str, nn.Parameter], named: list[str]) -> None:
    left, missing = sorted(set(parameters) - set(named)), sorted(set(named) - set(parameters))
    if left:
        raise ConfigError(f"{kind}: {who} has parameters that the other has no place for: {', '.join(left)}")
    if missing:
        raise ConfigError(f"{kind}: {who} lacks parameters that the other has: {', '.join(missing)}")


def _softmax_entries(config: LanguageModelConfig) -> list[Entry]:
    """Our names and those of `PlainTransformer`."""
    table = [
        same("embed.W_E", "embed.weight"),
        same("ln_final.w", "norm.weight"),
        same("unembed.weight", "unembed.weight"),
    ]
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        table += [
            same(f"{block}ln1.w", f"{block}norm_1.weight"),
            same(f"{block}ln2.w", f"{block}norm_2.weight"),
            same(f"{block}attn.in_proj.weight", f"{block}qkv.weight"),
            same(f"{block}attn.out_proj.weight", f"{block}out.weight"),
            Entry(
                ours=(f"{block}mlp.W_gate", f"{block}mlp.W_in"),
                theirs=(f"{block}up.weight",),
                read=lambda up: tuple(part.T for part in up.chunk(2)),
                write=lambda gate, inner: (torch.cat((gate.T, inner.T)),),
            ),
            transposed(f"{block}mlp.W_out", f"{block}down.weight"),
        ]
    return table


def _linear_entries(config: LanguageModelConfig) -> list[Entry]:
    """Our names and those of fla's LinearAttentionForCausalLM without its output norm."""
    table = [
        same("embed.W_E", "model.embeddings.weight"),
        same("ln_final.w", "model.norm.weight"),
        same("unembed.weight", "lm_head.weight"),
    ]
    for layer in range(config.n_layers):
        block, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        qkv = tuple(f"{theirs}attn.{name}_proj.weight" for name in "qkv")
        table += [
            same(f"{block}ln1.w", f"{theirs}attn_norm.weight"),
            same(f"{block}ln2.w", f"{theirs}mlp_norm.weight"),
            joined(f"{block}attn.in_proj.weight", qkv, (config.d_model,) * 3),
            same(f"{block}attn.out_proj.weight", f"{theirs}attn.o_proj.weight"),
            transposed(f"{block}mlp.W_gate", f"{theirs}mlp.gate_proj.weight"),
            transposed(f"{block}mlp.W_in", f"{theirs}mlp.up_proj.weight"),
            transposed(f"{block}mlp.W_out", f"{theirs}mlp.down_proj.weight"),
        ]
    return table


ENTRIES: dict[str, Callable[[LanguageModelConfig], list[Entry]]] = {
    "softmax": _softmax_entries,
    "linear": _linear_entries,
    "mamba1": mamba_entries,
    "mamba2": mamba_entries,
}
