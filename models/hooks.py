"""Strict hooks: a name that does not exist or does not fire in the chosen form is refused before a run."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from models.errors import ConfigError, HookNotFired, UnknownHook, closest
from models.form import Form
from models.lens import HookedRootModule, HookPoint, attached, require_lens

NamesFilter = str | Iterable[str] | Callable[[str], bool] | None
Hooks = Iterable[tuple[str | Callable[[str], bool], Callable]]


class StrictHooks(HookedRootModule):
    """A HookedRootModule that knows in which forms each of its points fires.

    A subclass fills `hook_forms` (name -> forms) and `hook_aliases` (other name -> name) after `setup()`,
    calls `_before_run(form)` at the start of every evaluation, and asks `_form(form)` which form None means.
    """

    def __init__(self):
        super().__init__()
        self.hook_forms: dict[str, frozenset[Form]] = {}
        self.hook_aliases: dict[str, str] = {}
        # The form of each open `hooks()` context, and every name that was ever hooked and may still be.
        self._open_forms: list[Form] = []
        self._hooked: set[str] = set()

    # Names.

    def resolve_hook(self, name: str, form: Form | str | None = None) -> str:
        """The hook point's own name, from that name or an alias.

        Raises:
            UnknownHook: no point has this name (the message has the closest matches).
            HookNotFired: the point does not fire in `form` (the message names the forms in which it does).
        """
        own = self.hook_aliases.get(name, name)
        if own not in self.hook_dict:
            raise UnknownHook(f"no hook point {name!r}{closest(name, [*self.hook_dict, *self.hook_aliases])}")
        if form is not None and Form.of(form) not in self.hook_forms[own]:
            fires = ", ".join(f.value for f in Form if f in self.hook_forms[own]) or "none"
            raise HookNotFired(
                f"{name!r} does not fire in form {Form.of(form).value!r}; it fires in: {fires}"
            )
        return own

    def select_hooks(self, names: NamesFilter, form: Form | str) -> list[str]:
        """The points that a filter selects among those that fire in `form`; None selects all of them.

        A name or a list of names must be exact: each has to exist and to fire. A function selects freely, but
        must select something.

        Raises:
            UnknownHook, HookNotFired: as `resolve_hook`; or a function that selects nothing (that fires).
        """
        form = Form.of(form)
        if isinstance(names, str):
            return [self.resolve_hook(names, form)]
        if names is not None and not callable(names):
            return list(dict.fromkeys(self.resolve_hook(name, form) for name in names))
        chosen = [n for n in self.hook_dict if names is None or names(n)]
        if not chosen:
            raise UnknownHook("the function given as a filter selects no hook point")
        firing = [n for n in chosen if form in self.hook_forms[n]]
        if not firing:
            self.resolve_hook(chosen[0], form)
        return firing

    # Which form a run takes.

    def _form(self, form: Form | str | None) -> Form:
        if form is not None:
            return Form.of(form)
        return self._open_forms[-1] if self._open_forms else Form.CHUNKED

    def _hook_form(self, form: Form | str | None) -> Form:
        """As `_form`, for what exists to fire hooks: None is PARALLEL outside a context."""
        return Form.PARALLEL if form is None and not self._open_forms else self._form(form)

    def _before_run(self, form: Form) -> None:
        """Refuses a run in which a hook that is attached would never fire."""
        if not self._hooked:
            return
        self._hooked = {n for n in self._hooked if attached(self.hook_dict[n])}
        for name in sorted(self._hooked):
            self.resolve_hook(name, form)
        self._hooks_changed()

    def _hooks_changed(self) -> None:
        """Called when hooks were attached or removed; for a subclass that computes some points on request."""

    # Attaching. Every way to attach a hook comes through these two.

    def _enable_hook(
        self, name: str | Callable[[str], bool], hook: Callable, dir: Literal["fwd", "bwd"]
    ) -> None:
        for own in self.select_hooks(name, self._form(None)):
            self.hook_dict[own].add_hook(_checked(hook, dir), dir=dir, level=self.context_level)
            self._hooked.add(own)

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: Callable,
        dir: Literal["fwd", "bwd"] = "fwd",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Attach a hook until `reset_hooks()`. A run in a form in which it would not fire is refused."""
        require_lens()
        names = [n for n in self.hook_dict if name(n)] if callable(name) else [self.resolve_hook(name)]
        if not names:
            raise UnknownHook("the function given as a filter selects no hook point")
        for own in names:
            super().add_hook(own, _checked(hook, dir), dir, *args, **kwargs)
            self._hooked.add(own)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        *,
        form: Form | str | None = None,
    ) -> Iterator["StrictHooks"]:
        """Hooks for as long as the context is open; it sets the form of every run inside that names none
        itself.

        Args:
            fwd_hooks, bwd_hooks: Pairs of a name (or a function on names) and a function `f(tensor, hook)`.
                What a forward one returns takes the tensor's place, in its shape and dtype (it is cast);
                None leaves it.
            form: None is the form of the context around this one, PARALLEL where there is none.

        Raises:
            UnknownHook, HookNotFired: before anything runs; no hook stays attached.
            ConfigError: in a run inside, a hook that returns another shape, or no floating-point tensor.
        """
        require_lens()
        self._open_forms.append(self._hook_form(form))
        try:
            with super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
                yield self
        finally:
            self._open_forms.pop()
            self._hooks_changed()

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        form: Form | str | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """One forward pass with hooks, in PARALLEL unless another form is given.

        Raises:
            UnknownHook, HookNotFired: before anything runs.
            ConfigError: backward hooks that would be removed before a backward pass can reach them.
        """
        if bwd_hooks and reset_hooks_end:
            raise ConfigError(
                "run_with_hooks removes its hooks before a backward pass: use reset_hooks_end=False, or "
                "`with model.hooks(bwd_hooks=...)` around forward and backward"
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts, form=form):
            return self.forward(*model_args, **model_kwargs)

    # Caching.

    def _record(
        self, names: list[str], device: torch.device | str | None
    ) -> tuple[dict[str, list[Tensor]], list[tuple[str, Callable]]]:
        """Copies of what fires at each name, in firing order, and the hooks that make them."""
        record: dict[str, list[Tensor]] = {name: [] for name in names}

        def save(tensor: Tensor, hook: HookPoint) -> None:
            # A copy: a later hook may edit the live tensor in place.
            record[hook.name].append(tensor.detach().to(device or tensor.device, copy=True))

        return record, [(name, save) for name in names]

    def pos_dim(self, name: str) -> int:
        """Axis of the (destination) position in what a point fires, counted in the batched layout."""
        own = self.hook_dict[name].pos_dim
        if own is not None:
            return own
        return -2 if name.endswith(("hook_pattern", "hook_attn_scores")) else 1


def _checked(hook: Callable, dir: Literal["fwd", "bwd"]) -> Callable:
    """A forward hook whose result is refused where it cannot stand for the activation."""
    if dir != "fwd":
        return hook

    function = hook

    @functools.wraps(function)
    def checked(tensor: Tensor, hook: HookPoint) -> Tensor | None:
        found = function(tensor, hook=hook)
        if found is None:
            return None
        fits = isinstance(found, Tensor) and found.shape == tensor.shape
        if not (fits and found.is_floating_point() == tensor.is_floating_point()):
            described = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else repr(found)
            raise ConfigError(
                f"a hook at {hook.name!r} returned {described}; accepted: None or a tensor "
                f"{list(tensor.shape)} {tensor.dtype}, as it was given"
            )
        # Weights of a probe in float32, or autocast inside the hook: the model goes on in its own dtype.
        return found.to(tensor.dtype)

    return checked
