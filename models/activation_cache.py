"""TransformerLens's ActivationCache for models whose layers may differ in mixer and number of heads."""

from typing import Any

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice, get_act_name

from models.errors import ConfigError, HookNotFired


class ModelCache(ActivationCache):
    """An ActivationCache that says why a name is absent, and counts heads layer by layer.

    `form` is the form in which it was recorded. Entries are copies: editing one changes nothing else.
    """

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, *, form: Any, has_batch_dim: bool = True):
        super().__init__(cache_dict, model, has_batch_dim=has_batch_dim)
        self.form = form

    def __getitem__(self, key: Any) -> Tensor:
        if key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, tuple):
            if len(key) > 1 and isinstance(key[1], int) and key[1] < 0:
                key = (key[0], self.model.cfg.n_layers + key[1], *key[2:])
            name = get_act_name(*key)
        else:
            name = get_act_name(key)
        own = self.model.resolve_hook(name.removesuffix("_grad"), self.form)
        own += "_grad" if name.endswith("_grad") else ""
        if own not in self.cache_dict:
            raise HookNotFired(f"{own!r} is not among the names that this cache was made for")
        return self.cache_dict[own]

    def __contains__(self, key: Any) -> bool:
        return self.model.hook_aliases.get(key, key) in self.cache_dict

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "ModelCache":
        """The cache of some sequences of the batch."""
        cut = super().apply_slice_to_batch_dim(batch_slice)
        return ModelCache(cut.cache_dict, self.model, form=self.form, has_batch_dim=cut.has_batch_dim)

    def _ensure_head_results(self) -> bool:
        """Fill in each `hook_result` that is missing and follows from `hook_z`; True if none was missing."""
        complete = True
        for layer, block in enumerate(self.model.blocks):
            name = f"blocks.{layer}.attn.hook_result"
            if name in self.cache_dict:
                continue
            if "hook_gate" in block.attn.hook_forms:
                raise ConfigError(
                    f"this cache lacks {name!r}: the results by head of a {block.attn.kind} mixer do not "
                    "follow from hook_z alone (its gate comes after); record hook_result"
                )
            complete = False
            self.cache_dict[name] = torch.einsum("...hd,hdm->...hm", self["z", layer], block.attn.W_O)
        return complete

    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
    ) -> Any:
        """What each head of the layers before `layer` wrote to the residual stream.

        As TransformerLens's, but each layer brings its own number of heads (for Mamba-1 its channels).

        Returns:
            [head batch seq d_model], layer after layer; with `return_labels` also the labels "L0H0", ...
        """
        pos_slice = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
        layer = self.model.cfg.n_layers if layer is None or layer == -1 else layer
        self._ensure_head_results()
        stack, labels = [], []
        for i in range(layer):
            result = pos_slice.apply(self["result", i], dim=-3)
            stack.append(result.movedim(-2, 0))
            labels += [f"L{i}H{h}" for h in range(result.shape[-2])]
        resid = pos_slice.apply(self["resid_post", layer - 1] if layer else self["resid_pre", 0], dim=-2)
        if incl_remainder:
            # Summed layer by layer: the stack itself can be large.
            stack.append((resid - sum(part.sum(0) for part in stack))[None])
            labels.append("remainder")
        heads = torch.cat(stack) if stack else resid.new_zeros(0, *resid.shape)
        if apply_ln:
            heads = self.apply_ln_to_stack(
                heads, layer, pos_slice=pos_slice, has_batch_dim=self.has_batch_dim
            )
        return (heads, labels) if return_labels else heads
