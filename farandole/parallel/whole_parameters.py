"""Read, load and change unsharded parameters of a model that is sharded or has master weights.

    state = engine.state_dict()                 # unsharded values, on all ranks
    model.load_state_dict(state)                # all ranks; the optimizer continues from the loaded values
    with engine.edit_parameters():              # all ranks make the same changes
        model.head.weight.mul_(0.5)

An engine's optimizer updates *master weights*: shards, or values in higher precision.  If only the model's parameters
were changed, the next update would undo the change.  If several ranks changed parameters in shared memory, the change
would be applied several times.  Such changes are detected before the next update and raise an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from farandole._troubleshooting import see
from farandole.layout import Layout
from farandole.mesh import Cell, Groups
from farandole.parallel.axes import own_part
from farandole.parallel.checkpoint.ranges import TensorBoxes
from farandole.parallel.data import has_engine
from farandole.parallel.zero.gathered_weights import GatheredWeights
from farandole.parallel.zero.gatherer import Gatherer
from farandole.parallel.zero.weights import EDIT, FlatWeights

_GUARD = "_farandole_is_editable"
"""The name of the module attribute that holds a guard function.

The function returns whether the module's parameters can be changed in place.
"""


def check_editable(module: nn.Module, name: str, advice: str = "") -> None:
    """Raise RuntimeError if `module` belongs to an engine, unless called within `engine.edit_parameters()`.

    Args:
        name: the name of the module in the message.
        advice: additional advice for the message.
    """
    guard = module.__dict__.get(_GUARD)
    if guard is not None and not guard(module):
        raise RuntimeError(
            f"cannot change the weights of {name} here, because ranks may share them: change them within `with "
            f"engine.edit_parameters():` on all ranks{advice and '; ' + advice}"
        )


class WholeParameters:
    """Reads and changes the unsharded values of a model's parameters.

    Args:
        weights: the flat weights in which an engine stores the parameters.
        groups: the communicator of all ranks, and the communicators of the ranks over which an axis shards parameters.
        gatherer: the gatherer of the model's weights (`zero=3`), or None.
        layouts: maps parameter names to layouts.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[FlatWeights],
        groups: Groups,
        gatherer: Gatherer | None,
        layouts: Mapping[str, Layout],
    ) -> None:
        self._model, self._weights, self._comm = model, list(weights), groups.comm
        self._gatherer, self._groups = gatherer, groups
        self._mesh = groups.mesh
        self._split = {
            id(parameter): layouts[name]
            for name, parameter in model.named_parameters()
            if layouts[name].shards
        }
        """The layouts of parameters that axes shard."""
        self._gathers = any(isinstance(weight, GatheredWeights) for weight in weights)
        self._modules = {id(module): name for name, module in model.named_modules()}
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
            module.__dict__[_GUARD] = self._guard()
            self._handles.append(module.register_load_state_dict_pre_hook(self._before_load()))
            self._handles.append(module.register_load_state_dict_post_hook(self._after_load()))
            if self._gathers or self._split:
                self._handles.append(module.register_state_dict_pre_hook(self._before_state()))
        if self._gathers or self._split:
            self._model.__dict__["__deepcopy__"] = _RefusedCopy()

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        if not any(weight.shared for weight in self._weights):
            for module in self._model.modules():
                module.__dict__.pop(_GUARD, None)
        self._model.__dict__.pop("__deepcopy__", None)

    # ---- unannounced changes ----

    def remember(self) -> None:
        """Record the current versions of the parameters, for comparison in `check`."""
        self._versions = [[p._version for p in weight.parameters] for weight in self._weights]

    def check(self) -> None:
        """Raise RuntimeError if code other than the optimizer has changed parameters."""
        for weight, versions in zip(self._weights, self._versions, strict=True):
            weight.check_in_place()
            for name, parameter, version in zip(weight.plan.names, weight.parameters, versions, strict=True):
                if parameter._version != version:
                    raise RuntimeError(
                        f"{name} was changed in place, but the optimizer updates another tensor; {EDIT}"
                    )

    # ---- announced changes ----

    def _agree_to_load(self, module: nn.Module, state: Iterable[str]) -> None:
        """Raise RuntimeError unless all ranks of a stage load states with the same names (a collective call)."""
        names = [self._modules[id(module)], *sorted(state)]
        stages = [cell.pipeline for cell in self._mesh.of_rank(self._comm.rank)]
        advice = "call it on all ranks with the same state, or engine.load_weights(path) on all ranks"
        try:
            digest = hashlib.sha256("\n".join(names).encode()).digest()
            found = [each for at, each in self._comm.all_gather_object((stages, digest)) if at == stages]
        except RuntimeError as error:
            raise RuntimeError(
                f"load_state_dict could not communicate with the other ranks ({error}): {advice}"
            ) from error
        if any(each != found[0] for each in found):
            raise RuntimeError(
                f"load_state_dict was called with states whose names differ between ranks: {advice}"
            )

    def masters_are_elsewhere(self) -> None:
        """Record that the master weights are offloaded, so that `edit` raises an error."""
        self._masters_elsewhere = True

    @contextmanager
    def masters(self) -> Iterator[None]:
        """Return a context manager that replaces the parameters with unsharded copies in the master weights' dtype.

        This is a collective call.
        """
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
                for parameter in self._model.parameters():
                    if id(parameter) in self._split:
                        parameter.data = self._complete(parameter, parameter.data)
            yield
        finally:
            self._editing = False
            for weight in self._weights:
                weight.use_weights()

    @contextmanager
    def edit(self) -> Iterator[None]:
        """Return a context manager within which the parameters can be changed in place.

        All ranks must make the same changes.  On exit, the changes are copied to the weights and the master weights.
        This is a collective call.
        """
        if self._masters_elsewhere and self._weights:
            raise RuntimeError(
                "the master weights are offloaded and cannot be changed through the parameters: load "
                "weights before engine.optimizer(...) is called"
            )
        with self.masters():
            yield
            with torch.no_grad():
                self._comm.barrier()  # wait until no rank reads the shared buffer
                values = [[self._own(p) for p in weight.parameters] for weight in self._weights]
                for weight, changed in zip(self._weights, values, strict=True):
                    with weight.in_memory(write=True):
                        for index, value in enumerate(changed):
                            weight.set_values(index, value)
                self._comm.barrier()
        self.remember()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state, with unsharded parameters in the dtype of the master weights.

        This is a collective call.
        """
        with self.masters():
            state = self._model.state_dict()
            return {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}

    def values(
        self, wanted: Callable[[nn.Parameter], bool] = lambda parameter: True
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, unsharded value) for each parameter for which `wanted` returns True.

        Values are gathered one bucket or parameter at a time.  This is a collective call.
        """
        for parameter, value in self._values_of_cell():
            if wanted(parameter):
                yield parameter, self._complete(parameter, value)

    def _values_of_cell(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, value); if an axis shards the parameter, the value is only this rank's part."""
        gathered: set[int] = set()
        if self._gatherer is not None:
            for parameters in self._gatherer.one_by_one():
                yield from ((parameter, parameter.detach()) for parameter in parameters)
                gathered.update(id(parameter) for parameter in parameters)
        for parameter in self._model.parameters():
            if id(parameter) not in gathered:
                yield parameter, parameter.detach()

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the weights of all blocks gathered; see `Engine.whole`."""
        return nullcontext() if self._gatherer is None else self._gatherer.whole()

    def release(self) -> None:
        """Release gathered weights."""
        if self._gatherer is not None:
            self._gatherer.release()

    def _complete(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Gather the complete value of a parameter from the ranks' parts.  This is a collective call."""
        layout = self._split.get(id(parameter))
        if layout is None:
            return value
        own = self._cell(layout)
        group = self._groups.of(own, *(axis for axis, _ in layout.shards))
        if group.comm is None:
            return value
        complete = value.new_zeros(layout.shape)
        place = TensorBoxes.of_boxes(layout.shape, value.shape, layout.boxes(self._mesh, own))
        for local, box in place.regions:
            holders = [cell for cell in layout.replicas(self._mesh, box) if cell in group.cells]
            if holders[0] == own:  # one rank contributes each element
                complete[tuple(slice(*ends) for ends in box)] = value[tuple(slice(*ends) for ends in local)]
        group.comm.all_reduce(complete)
        return complete

    def _own(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of a parameter that holds the complete value."""
        layout = self._split.get(id(parameter))
        if layout is None:
            return parameter.data
        return own_part(parameter.data, layout, self._mesh, self._cell(layout))

    def _cell(self, layout: Layout) -> Cell:
        """Return the cell of this rank that stores a parameter with the given `layout`."""
        cells = self._mesh.of_rank(self._comm.rank)  # two in a mirrored pipeline
        return next(cell for cell in cells if cell.pipeline in layout.stages)

    def _guard(self) -> Callable[[nn.Module], bool]:
        return lambda module: self._editing or id(module) not in self._modules

    # ---- module hooks: functions instead of methods, because copies of the model also have the hooks ----

    def _before_load(self) -> Callable[..., None]:
        def before(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
            if self._editing or id(module) not in self._modules:
                return
            if metadata.get("assign_to_params_buffers"):
                raise RuntimeError(
                    "load_state_dict(assign=True) would replace the parameters that the engine updates: "
                    "omit assign=True, or load before parallelize"
                )
            self._agree_to_load(module, state)
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
            if id(module) not in self._modules or self._editing:
                return
            if not (self._gatherer is None or self._gatherer.is_whole) or any(
                id(p) in self._split for p in module.parameters()
            ):
                raise RuntimeError(
                    "cannot return a state, because this rank has only its shards of the parameters: call "
                    "engine.state_dict() on all ranks to get unsharded values"
                )

        return before


class _RefusedCopy:
    """Raises an error when a model with sharded parameters is copied or pickled."""

    def __call__(self, memo: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(
            "the model cannot be copied, because this rank has only its shards of the parameters: create "
            "another model, and load the result of engine.state_dict()"
        )

    def __reduce__(self) -> NoReturn:
        """Raise RuntimeError when the model is pickled."""
        self(None)


# ---- checks of a model ----


def check_model(model: nn.Module, *, moved: bool) -> None:
    """Raise ValueError if an engine cannot train `model`.

    Args:
        moved: whether the engine moves parameters into flat buffers.
    """
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(f"{name} is not initialized: run the model once before parallelize")
        if has_engine(parameter):
            raise ValueError(
                f"{name} belongs to an engine already: call close() on that engine before creating another "
                f"engine for the model{see('belongs-to-an-engine-already')}"
            )
    if moved and (pair := _overlapping(named)):
        raise ValueError(
            f"{pair[0]} and {pair[1]} are different parameters that share memory, but the engine would "
            "store them separately: use the same nn.Parameter in both places, or copy one of them"
        )


def check_gradients(model: nn.Module, trained: Collection[int]) -> None:
    """Raise RuntimeError if a parameter that the engine does not train has a gradient.

    Args:
        trained: the `id` of each parameter that the engine trains.
    """
    for parameter in model.parameters():
        if parameter.grad is not None and id(parameter) not in trained:
            name = next(name for name, known in model.named_parameters() if known is parameter)
            raise RuntimeError(
                f"{name} has a gradient that ranks do not average, because the parameter was frozen, or not in the "
                "model, when the engine was created; close() the engine, and create another engine after "
                f"changing requires_grad or the model{see('has-a-gradient-that-ranks-do-not-average')}"
            )


def _overlapping(named: dict[str, nn.Parameter]) -> tuple[str, str] | None:
    """Return the names of two different parameters that share memory, or None."""
    extents = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in named.items()
        if type(p.data) is Tensor and not p.is_meta and p.numel() and _is_dense(p)
    )
    for (device, _, end, name), (other_device, start, _, other) in zip(extents, extents[1:], strict=False):
        if device == other_device and start < end:
            return name, other
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a contiguous block of memory, in any order."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()
