"""Read, load and change unsharded parameters while a model is sharded or has master weights.

    state = engine.state_dict()                 # unsharded values, on all ranks
    model.load_state_dict(state)                # all ranks; the optimizer continues from the loaded values
    with engine.edit_parameters():              # all ranks make the same changes
        model.head.weight.mul_(0.5)

An engine's optimizer updates *master weights*: shards, or values in higher precision.  If the model's parameters were
changed without changing the master weights, the next update would undo the change.  If several ranks changed
parameters in shared memory, the change would be applied several times.  Such changes are detected before the next
update and raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from farandole.comm.communicator import Communicator
from farandole.parallel.gathered_weights import GatheredWeights
from farandole.parallel.weights import EDIT, FlatWeights


class WholeParameters:
    """Provides unsharded values of the model's parameters, which are stored as `weights`."""

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[FlatWeights],
        comm: Communicator,
        is_whole: Callable[[], bool],
    ) -> None:
        """Initialize; `is_whole()` returns whether gathered weights are unsharded."""
        self._model, self._weights, self._comm = model, list(weights), comm
        self._is_whole = is_whole
        self._gathers = any(isinstance(weight, GatheredWeights) for weight in weights)
        self._modules = {id(module) for module in model.modules()}
        self._loading: nn.Module | None = None
        self._editing = False
        self._masters_elsewhere = False
        self._context: Any = None
        self._handles: list[RemovableHandle] = []
        if self._weights:
            self._follow()
        self.remember()

    def _follow(self) -> None:
        for module in self._model.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(self._before_load()))
            self._handles.append(module.register_load_state_dict_post_hook(self._after_load()))
            if self._gathers:
                self._handles.append(module.register_state_dict_pre_hook(self._before_state()))
        if self._gathers:
            self._model.__dict__["__deepcopy__"] = _RefusedCopy()

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._model.__dict__.pop("__deepcopy__", None)

    # ---- unannounced changes ----

    def remember(self) -> None:
        """Record the parameters' current versions as unchanged."""
        self._versions = [[p._version for p in weight.parameters] for weight in self._weights]

    def check(self) -> None:
        """Raise RuntimeError if parameters were changed outside of the optimizer."""
        for weight, versions in zip(self._weights, self._versions, strict=True):
            weight.check_in_place()
            for name, parameter, version in zip(weight.plan.names, weight.parameters, versions, strict=True):
                if parameter._version != version:
                    raise RuntimeError(
                        f"{name} was changed in place, but the optimizer updates another tensor; {EDIT}"
                    )

    # ---- announced changes ----

    def masters_are_elsewhere(self) -> None:
        """Record that master weights are offloaded, so that parameters cannot be changed."""
        self._masters_elsewhere = True

    @contextmanager
    def masters(self) -> Iterator[None]:
        """Return a context with unsharded parameters in the type of the master weights, in separate memory.  This is a collective call."""
        if self._editing:
            raise RuntimeError(
                "edit_parameters() cannot be nested, or called while a state is being loaded: first exit the other "
                "context, or finish loading"
            )
        self._editing = True
        try:
            with torch.no_grad():
                for weight in self._weights:
                    weight.use_masters()
            yield
        finally:
            self._editing = False
            for weight in self._weights:
                weight.use_weights()

    @contextmanager
    def edit(self) -> Iterator[None]:
        """Return a context in which all ranks can make the same in-place changes to parameters, which also change the master weights."""
        if self._masters_elsewhere and self._weights:
            raise RuntimeError(
                "the master weights are offloaded and cannot be changed through the parameters: load "
                "weights before engine.optimizer(...) is called"
            )
        with self.masters():
            yield
            with torch.no_grad():
                self._comm.barrier()  # no rank reads the shared buffer
                values = [[p.data for p in weight.parameters] for weight in self._weights]
                for weight, changed in zip(self._weights, values, strict=True):
                    with weight.in_memory(write=True):
                        for index, value in enumerate(changed):
                            weight.set_values(index, value)
                self._comm.barrier()
        self.remember()

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state with unsharded parameters in the type of the master weights, as copies.  This is a collective call."""
        with self.masters():
            state = self._model.state_dict()
            return {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}

    # ---- hooks of modules; functions, because copies of the model have the hooks too ----

    def _before_load(self) -> Callable[..., None]:
        def before(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
            if self._editing or id(module) not in self._modules:
                return
            if metadata.get("assign_to_params_buffers"):
                raise RuntimeError(
                    "load_state_dict(assign=True) would replace the parameters that the engine updates: "
                    "omit assign=True, or load before parallelize"
                )
            self._context = self.edit()
            self._context.__enter__()
            self._loading = module

        return before

    def _after_load(self) -> Callable[..., None]:
        def after(module: nn.Module, _: Any) -> None:
            if module is self._loading:
                context, self._context, self._loading = self._context, None, None
                context.__exit__(None, None, None)

        return after

    def _before_state(self) -> Callable[..., None]:
        def before(module: nn.Module, *_: Any) -> None:
            if id(module) in self._modules and not self._editing and not self._is_whole():
                raise RuntimeError(
                    "this rank has only its shards of the parameters: call engine.state_dict() on all "
                    "ranks to get unsharded values"
                )

        return before


class _RefusedCopy:
    """Replaces `__deepcopy__` for a model with sharded parameters, and raises an error."""

    def __call__(self, memo: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(
            "the model cannot be copied, because this rank has only its shards of the parameters: create "
            "another model, and load the result of engine.state_dict()"
        )

    def __reduce__(self) -> NoReturn:
        """Raise RuntimeError when the model is pickled."""
        self(None)
