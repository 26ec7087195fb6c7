"""What TransformerLens's caches, sweeps and notebooks expect of a model, for models with any mixers."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.errors import ConfigError, HookNotFired
from models.form import Form
from models.hooks import NamesFilter, StrictHooks
from models.lens import attached, require_lens
from models.mixers.base import ALL_FORMS


class LensSurface(StrictHooks):
    """Base of `LanguageModel`: caching, tokens, weights and bias sums under TransformerLens's names."""

    def setup(self) -> None:
        """Name all hook points and learn in which forms they fire. Called last in `__init__`."""
        super().setup()
        self.hook_forms = dict.fromkeys(self.hook_dict, ALL_FORMS)
        for layer, block in enumerate(self.blocks):
            at = f"blocks.{layer}."
            mixer = block.attn
            own = {name: name for name in mixer.hook_forms} | dict(mixer.hook_aliases)
            points = {name: f"{at}attn.{target}" for name, target in own.items()}
            points |= {name: at + target for name, target in mixer.block_aliases.items()}
            for name, point in points.items():
                # TransformerLens's short names, as in cache["dt", 0], put what it does not know on the block.
                self.hook_aliases |= {f"{at}attn.{name}": point, at + name: point}
            for name, forms in mixer.hook_forms.items():
                self.hook_forms[f"{at}attn.{name}"] = frozenset(forms)

    def _hooks_changed(self) -> None:
        # Results by head cost n_heads times the output: they are computed only where something looks at them.
        for block in self.blocks:
            block.attn.use_attn_result = attached(block.attn.hook_result) or self.cfg.use_attn_result

    def run_with_hooks(self, *model_args: Any, **options: Any) -> Any:
        """As `StrictHooks.run_with_hooks`."""
        try:
            return super().run_with_hooks(*model_args, **options)
        except IndexError as error:
            error.add_note(
                "if a sweep over heads met an activation with fewer heads than cfg.n_heads: give it "
                "`index_axis_names=None, index_df=model.head_index(activation_name)`"
            )
            raise

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        return_cache_object: bool = True,
        form: Form | str | None = None,
        **model_kwargs: Any,
    ) -> tuple[Any, Any]:
        """One forward pass, in PARALLEL unless another form is given, and copies of what fired.

        Args:
            names_filter: Exact names or aliases (each has to exist and fire), a function on names, or None:
                all points that fire in this form.
            device: Where the copies go; None is where each activation is.
            remove_batch_dim: Drop the batch axis of a batch of one.
            incl_bwd: Also run backward from the output (a scalar: `return_type="loss"`) and record the
                gradients under the names with "_grad" appended.
            pos_slice: Positions to keep, an int (drops the axis), slice, list or TransformerLens `Slice`; a
                pattern keeps these destinations and all sources.
            return_cache_object: False gives a plain dictionary.

        Returns:
            The model's output and an ActivationCache (`models.activation_cache.ModelCache`). A point that
            fires once for each token (in RECURRENT) is recorded with its firings joined along the position.

        Raises:
            UnknownHook, HookNotFired: before anything runs, or for a point that stayed silent.
            ConfigError: `remove_batch_dim` with more than one sequence.
        """
        require_lens()
        form = self._hook_form(form)
        batch = len(model_args[0]) if model_args and isinstance(model_args[0], Tensor) else 1
        if remove_batch_dim and batch != 1:
            raise ConfigError(f"remove_batch_dim needs a batch of 1; this one has {batch}")
        names = self.select_hooks(names_filter, form)
        forward, fwd_hooks = self._record(names, device)
        backward, bwd_hooks = self._record(names if incl_bwd else [], device)
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts, form=form):
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                output.backward()
        cache = self._joined(forward, "", remove_batch_dim, pos_slice)
        # Backward meets the firings in reverse order.
        reverse = {name: fired[::-1] for name, fired in backward.items() if fired}
        cache |= self._joined(reverse, "_grad", remove_batch_dim, pos_slice)
        if not return_cache_object:
            return output, cache
        from models.activation_cache import ModelCache

        return output, ModelCache(cache, self, form=form, has_batch_dim=not remove_batch_dim)

    def _joined(
        self, record: dict[str, list[Tensor]], suffix: str, remove_batch_dim: bool, pos_slice: Any
    ) -> dict[str, Tensor]:
        from transformer_lens.utilities import Slice

        pos_slice = Slice.unwrap(pos_slice) if isinstance(pos_slice, Slice) else Slice(pos_slice)
        cache = {}
        for name, fired in record.items():
            if not fired:
                raise HookNotFired(f"{name!r} did not fire in this run")
            dim = self.pos_dim(name)
            # What fires for single positions alone has no axis for them.
            join = torch.stack if self.hook_forms[name] == {Form.RECURRENT} else torch.cat
            whole = pos_slice.apply(join(fired, dim), dim=dim)
            cache[name + suffix] = whole[0] if remove_batch_dim and whole.shape[0] == 1 else whole
        return cache

    # Tokens.

    def to_tokens(
        self, text: str | list[str] | Tensor, prepend_bos: bool | None = None
    ) -> Int[Tensor, "batch seq"]:
        """Token ids of one text or of several of equal length; a tensor is passed on.

        Args:
            prepend_bos: Put `config.bos` in front; None does so where the model was trained with one.

        Raises:
            ConfigError: no tokenizer, no BOS to prepend, or texts of different lengths (no padding: it would
                enter a recurrent state).
        """
        if isinstance(text, Tensor):
            return text
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer: give token ids, an integer tensor [batch seq]")
        prepend_bos = self.config.bos is not None if prepend_bos is None else prepend_bos
        if prepend_bos and self.config.bos is None:
            raise ConfigError("prepend_bos needs a model with a BOS token; config.bos is None")
        rows = [self._encoded(t) for t in ([text] if isinstance(text, str) else text)]
        if len({len(row) for row in rows}) != 1:
            raise ConfigError(f"texts have {sorted({len(r) for r in rows})} tokens; accepted: equal lengths")
        rows = [[self.config.bos, *row] for row in rows] if prepend_bos else rows
        return torch.tensor(rows, device=self.cfg.device)

    def _encoded(self, text: str) -> list[int]:
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        except TypeError:
            ids = self.tokenizer.encode(text)
        return list(getattr(ids, "ids", ids))

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token. Raises ConfigError where it is not."""
        ids = self.to_tokens(text, prepend_bos=False)[0].tolist()
        if len(ids) != 1:
            raise ConfigError(f"{text!r} is {len(ids)} tokens; accepted: a text that is one")
        return ids[0]

    def to_string(self, tokens: Int[Tensor, " seq"]) -> str:
        """The text of some token ids. Raises ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer")
        return self.tokenizer.decode([int(t) for t in tokens])

    def to_str_tokens(self, tokens: Int[Tensor, " seq"] | str) -> list[str]:
        """The text of each token, one by one."""
        ids = self.to_tokens(tokens)[0] if isinstance(tokens, str) else tokens.flatten()
        return [self.to_string(t[None]) for t in ids]

    # Weights.

    def tokens_to_residual_directions(
        self, tokens: str | int | Int[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape d_model"]:
        """Directions whose product with the final residual stream, centred (LayerNorm) and divided by its
        scale, is the token's logit up to `logit_bias`: columns of W_U times the final norm's gain.

        Unlike TransformerLens without folded norms, the gain is included, so that `logit_attrs` adds up to
        the logits.
        """
        tokens = self.to_single_token(tokens) if isinstance(tokens, str) else tokens
        ids = torch.as_tensor(tokens, device=self.cfg.device)
        directions = self.unembed.W_U.T[ids]
        gain = getattr(self.ln_final, "w", None)
        return directions if gain is None else directions * gain

    @property
    def logit_bias(self) -> Float[Tensor, " d_vocab"]:
        """The logits that no component of the residual stream carries: the last norm's and b_U's share."""
        bias = torch.zeros_like(self.unembed.W_U[0]) if self.unembed.b_U is None else self.unembed.b_U
        shift = getattr(self.ln_final, "b", None)
        return bias if shift is None else bias + shift @ self.unembed.W_U

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum of the output biases of everything that writes to the residual stream before `layer`.

        Args:
            layer: 0..n_layers; with `mlp_input` that layer's mixer is included.
        """
        total = torch.zeros(self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.dtype)
        for block in self.blocks[: layer + (1 if mlp_input else 0)]:
            total = total + block.attn.b_O
        for block in self.blocks[:layer]:
            if include_mlp_biases and block.mlp is not None and block.mlp.b_out is not None:
                total = total + block.mlp.b_out
        return total

    def head_index(self, activation: str = "z", *, seq: int | None = None) -> Any:
        """A table of the heads that an activation really has, for TransformerLens's sweeps over heads.

        Needed where layers differ in their number of heads, and for Mamba's q and k, which heads share.

        Args:
            activation: Short name of a point with a head axis: "z", "q", "k", "v", "pattern", "result".
            seq: For a sweep by position, the number of positions: the columns are then layer, pos,
            head_index.

        Returns:
            A pandas DataFrame for `index_df` (with `index_axis_names=None`); the sweep then returns one value
            a row.
        """
        import pandas as pd

        point = f"attn.hook_{activation}"
        names = [
            self.resolve_hook(f"blocks.{layer}.{point}", Form.PARALLEL) for layer in range(len(self.blocks))
        ]
        tokens = torch.zeros(1, 1, dtype=torch.long, device=self.cfg.device)
        with torch.no_grad():
            _, cache = self.run_with_cache(tokens, names_filter=names, return_type=None)
        axis = 1 if activation in ("pattern", "attn_scores") else 2
        heads = [cache[name].shape[axis] for name in names]
        positions = [()] if seq is None else [(i,) for i in range(seq)]
        rows = [(layer, *p, head) for layer, n in enumerate(heads) for p in positions for head in range(n)]
        return pd.DataFrame(rows, columns=["layer", *(["pos"] if seq else []), "head_index"])

    def __getattr__(self, name: str) -> Any:
        # W_Q, W_K, W_V, W_O [layer head d_model d_head] and the like, as TransformerLens stacks them.
        if name in (
            "W_Q",
            "W_K",
            "W_V",
            "W_O",
            "b_O",
            "W_in",
            "W_out",
            "W_gate",
            "W_E",
            "W_pos",
            "W_U",
            "b_U",
        ):
            return self._weights(name)
        return super().__getattr__(name)

    def _weights(self, name: str) -> Tensor:
        home = {"W_E": "embed", "W_pos": "pos_embed", "W_U": "unembed", "b_U": "unembed"}.get(name)
        if home is not None:
            value = getattr(getattr(self, home, None), name, None)
            if value is None and name == "b_U":
                value = torch.zeros(self.cfg.d_vocab, device=self.cfg.device, dtype=self.cfg.dtype)
            if value is None:
                raise AttributeError(f"{name}: this model has none")
            return value
        part = "mlp" if name in ("W_in", "W_out", "W_gate") else "attn"
        parts = [getattr(getattr(block, part), name, None) for block in self.blocks]
        for layer, value in enumerate(parts):
            if value is None:
                what = f"a {self.blocks[layer].attn.kind} mixer" if part == "attn" else "its MLP"
                raise AttributeError(f"{name}: a layer of this model lacks it (layer {layer}, {what})")
            if value.shape != parts[0].shape:
                raise AttributeError(
                    f"{name}: the layers differ in its shape, {list(parts[0].shape)} in layer 0 and "
                    f"{list(value.shape)} in layer {layer}; read model.blocks[layer].{part}.{name}"
                )
        return torch.stack(parts)
