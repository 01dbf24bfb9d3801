"""Provide `DistributedOptimizer`, which reduces gradients across ranks before each step.

Hooks submit each gradient, or each group of gradients, as soon as the backward pass has computed it.  The reduction
overlaps with the backward pass, and `step` waits for the results.

With op=Adasum, each rank updates its parameters with its own gradients, and Adasum combines the resulting parameter
changes (Maleki et al., 2020, section 4).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from farandole.horovod.basics import size
from farandole.horovod.compression import Compression, Compressor, NoneCompressor
from farandole.horovod.engine import Engine
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.requests import ALLREDUCE, Request, Signature
from farandole.horovod.torch.functions import broadcast_object
from farandole.horovod.torch.operations import (
    Adasum,
    Average,
    allreduce_async_,
    make_request,
    reduction,
    sparse_allreduce_async,
    synchronize,
)


def name_parameters(param_groups: list[dict[str, Any]], named_parameters: Any) -> list[tuple[Tensor, str]]:
    """Return a (parameter, name) pair for each parameter of an optimizer; generate names if none are given.

    Raises:
        ValueError: if an item of `named_parameters` is not a pair, a name is repeated, or a parameter has no name.
    """
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [
            (parameter, f"gradient.{number}.{index}")
            for number, group in enumerate(param_groups)
            for index, parameter in enumerate(group["params"])
        ]
    given = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in given).items() if count > 1]
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    names = {id(parameter): name for name, parameter in given}
    unnamed = [parameter for parameter in parameters if id(parameter) not in names]
    if unnamed:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in unnamed)
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} of the {len(parameters)} parameters of the optimizer "
            f"were not named; shapes of these parameters: {shapes}"
        )
    return [(parameter, names[id(parameter)]) for parameter in parameters]


class Trainable:
    """Finds an optimizer's trainable parameters, including parameters that are unfrozen or added later.

    Args:
        param_groups: The optimizer's initial parameter groups.
        named_parameters: (name, parameter) pairs, or None to generate all names.  Parameters that are added later get
            generated names.
    """

    def __init__(self, param_groups: list[dict[str, Any]], named_parameters: Any) -> None:
        self._names = dict(name_parameters(param_groups, named_parameters))
        self._found: set[int] = set()

    def find(self, param_groups: list[dict[str, Any]]) -> list[tuple[Tensor, str]]:
        """Return (parameter, name) pairs for the trainable parameters that earlier calls have not returned."""
        found = [
            (parameter, self._names.setdefault(parameter, f"gradient.{number}.{index}"))
            for number, group in enumerate(param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter.requires_grad and id(parameter) not in self._found
        ]
        self._found |= {id(parameter) for parameter, _ in found}
        return found


class DistributedAdasumOptimizer(torch.optim.Optimizer):
    """A mixin for op=Adasum that makes an optimizer's `step` combine the parameter changes of all ranks."""

    def _prepare(
        self,
        named_parameters: Any,
        compression: type[Compressor],
        backward_passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        self.backward_passes_per_step = backward_passes_per_step
        self._compression = compression
        self._process_set = process_set
        self._included = process_set.included()
        self._trainable = Trainable(self.param_groups, named_parameters)
        self._names = self._trainable.find(self.param_groups)
        reduction(Adasum, None, process_set, [parameter for parameter, _ in self._names])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each `step`.  This number does not affect the result."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing, because `step` combines the changes."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, because a step without synchronization is not supported."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with this rank's gradients, and combine the parameter changes from all ranks."""
        self._names += self._trainable.find(self.param_groups)
        before = [parameter.clone() for parameter, _ in self._names]
        loss = super().step(closure)
        if not self._included:
            return loss
        waiting: list[tuple[Tensor, Tensor, int, Any]] = []
        for (parameter, name), start in zip(self._names, before, strict=True):
            narrow, context = self._compression.compress(parameter - start)
            handle = allreduce_async_(narrow, name=name, op=Adasum, process_set=self._process_set)
            waiting.append((parameter, start, handle, context))
        for parameter, start, handle, context in waiting:
            parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        return loss


class Slot:
    """A parameter and the state of its gradient.

    The attribute `awaited` is the number of backward passes that the gradient still requires before the reduction.
    """

    __slots__ = ("awaited", "context", "name", "parameter", "sparse")

    def __init__(self, parameter: Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.awaited = 0
        self.context: Any = None  # compression context
        self.sparse = False  # whether any gradient was sparse


class GradientGroup:
    """A group of parameters whose gradients form one request.

    The attribute `begun` is True once the backward pass has computed one of the gradients in this step.  The attribute
    `incomplete` is the number of parameters whose gradients require more backward passes.

    Args:
        slots: The parameters.
        agreed: The fields `op`, `prescale` and `postscale` of the request's signature.
        compression: The compressor.
        sparse_as_dense: Whether to reduce sparse gradients as dense tensors.
        process_set: The participating ranks.
    """

    def __init__(
        self,
        slots: list[Slot],
        agreed: dict[str, Any],
        compression: type[Compressor],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.slots = slots
        self.begun = False
        self.incomplete = 0
        self._agreed = agreed
        self._compression = compression
        self._as_is = compression is NoneCompressor
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._signature: Signature | None = None
        self._request: tuple[Engine, Request] | None = None
        self._sparse: Callable[[], Tensor] | None = None

    def expect(self, passes: int) -> None:
        """Begin a step, in which each gradient accumulates over `passes` backward passes."""
        self.incomplete = len(self.slots)
        self.begun = False
        for slot in self.slots:
            slot.awaited = passes

    def discard(self) -> None:
        """Ignore the result of the request in flight."""
        self._request = self._sparse = None

    def launch(self) -> None:
        """Submit the gradients, unless they are already submitted.  Missing gradients count as zero."""
        if self._request is not None or self._sparse is not None:
            return
        first = self.slots[0]
        if len(self.slots) == 1 and self._is_sparse(first) and not self._sparse_as_dense:
            self._sparse = sparse_allreduce_async(
                _sparse_gradient(first.parameter), first.name, self._agreed["op"], self._process_set
            )
            return
        tensors = []
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                gradient = slot.parameter.grad = torch.zeros_like(slot.parameter, requires_grad=False)
            elif gradient.is_sparse:
                if not self._sparse_as_dense:
                    raise ValueError(
                        f"the gradient of {slot.name} is sparse, and groups do not support sparse gradients; "
                        f"remove the parameter from groups, or use sparse_as_dense=True"
                    )
                slot.sparse = True
                gradient = gradient.to_dense()
            if self._as_is:
                tensors.append(gradient)
            else:
                narrow, slot.context = self._compression.compress(gradient)
                tensors.append(narrow)
        engine = self._process_set.engine or self._process_set.member()
        request = make_request(first.name, ALLREDUCE, tensors, tensors, self._signature, self._agreed)
        self._signature = request.signature
        engine.submit(request)
        self._request = engine, request

    def finish(self) -> None:
        """Wait for the reduction and store the result in `.grad`."""
        if self._sparse is not None:
            collect, self._sparse = self._sparse, None
            self.slots[0].parameter.grad = collect()
            return
        if self._request is None:
            return
        (engine, request), self._request = self._request, None
        engine.wait(request)
        for slot, reduced in zip(self.slots, request.outputs, strict=True):
            gradient = slot.parameter.grad
            if reduced is gradient:
                continue
            whole = self._compression.decompress(reduced, slot.context)
            if gradient is not None and not gradient.is_sparse:
                gradient.copy_(whole)
            else:
                slot.parameter.grad = whole.to_sparse(_sparse_dimensions(gradient)) if slot.sparse else whole

    def _is_sparse(self, slot: Slot) -> bool:
        gradient = slot.parameter.grad
        if gradient is not None and gradient.is_sparse:
            slot.sparse = True
        return slot.sparse


def _sparse_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's sparse gradient, or an empty sparse tensor if the parameter has no gradient."""
    if parameter.grad is not None:
        return parameter.grad.coalesce()
    none = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    nothing = parameter.new_zeros((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(none, nothing, parameter.shape, check_invariants=True)


def _sparse_dimensions(gradient: Tensor | None) -> int:
    return 1 if gradient is None else gradient.sparse_dim()


class _DistributedOptimizer(torch.optim.Optimizer):
    """A mixin that makes an optimizer reduce gradients across ranks, in hooks and in `step`."""

    def _prepare(
        self,
        named_parameters: Any,
        compression: type[Compressor],
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: int | Sequence[Sequence[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._trainable = Trainable(self.param_groups, named_parameters)
        self.backward_passes_per_step = backward_passes_per_step
        self._synchronized = False
        self._should_synchronize = True
        self._hooks: list[Any] = []
        self._gradient_groups: list[GradientGroup] = []
        _check_groups(groups)
        self._reduces = process_set.included() and size() > 1
        if not self._reduces:
            return
        factor = gradient_predivide_factor
        agreed = {"op": op, "prescale": 1.0 / factor, "postscale": factor}
        self._group = partial(
            GradientGroup,
            agreed=agreed,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        for slots in _grouped(self._new_slots(), groups, process_set):
            self._add_group(slots)

    def _new_slots(self) -> list[Slot]:
        """Create slots for trainable parameters that have no slot yet."""
        return [Slot(parameter, name) for parameter, name in self._trainable.find(self.param_groups)]

    def _add_group(self, slots: list[Slot]) -> None:
        """Register a group of parameters whose gradients are reduced together."""
        group = self._group(slots)
        group.expect(self.backward_passes_per_step)
        self._gradient_groups.append(group)
        for slot in slots:
            hook = slot.parameter.register_post_accumulate_grad_hook(_hook(group, slot))
            self._hooks.append(hook)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each `step`."""
        self.backward_passes_per_step = passes
        for group in self._gradient_groups:
            group.expect(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Discard the gradients in flight, and load a state dict into the wrapped optimizer."""
        for group in self._gradient_groups:
            group.discard()
            group.expect(self.backward_passes_per_step)
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Submit the remaining gradients, and wait until every gradient is reduced."""
        if self._reduces:
            # parameters that were unfrozen or added after this optimizer was created
            for slot in self._new_slots():
                self._add_group([slot])
        for group in self._gradient_groups:
            group.launch()
        for group in self._gradient_groups:
            group.finish()
            group.expect(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context manager in which `step` does not call `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `synchronize` and update the parameters."""
        if not self._should_synchronize:
            self._synchronized = False
            return super().step(closure)
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        if closure is None:
            self.synchronize()
            self._synchronized = False
            return super().step()
        compute = closure

        def synchronized() -> Any:
            loss = compute()
            self.synchronize()
            self._synchronized = False
            return loss

        return super().step(synchronized)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, or raise AssertionError if gradients are in flight."""
        if any(group.begun for group in self._gradient_groups):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)


def _hook(group: GradientGroup, slot: Slot) -> Callable[[Tensor], None]:
    def received(_: Tensor) -> None:
        if slot.awaited <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step times before call to step() "
                f"(parameter {slot.name}). Increase backward_passes_per_step to accumulate gradients locally."
            )
        group.begun = True
        slot.awaited -= 1
        if slot.awaited == 0:
            group.incomplete -= 1
            if group.incomplete == 0:
                group.launch()

    return received


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if (
        isinstance(groups, bool)
        or not isinstance(groups, (int, list, tuple))
        or (isinstance(groups, int) and groups <= 0)
    ):
        raise ValueError("groups should be a positive integer or a list of lists of torch.Tensor.")
    if isinstance(groups, int):
        return
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"groups: expected lists of tensors, got a list with {type(parameter).__name__}"
                )
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))


def _grouped(
    slots: list[Slot], groups: int | Sequence[Sequence[Tensor]] | None, process_set: ProcessSet
) -> list[list[Slot]]:
    """Return the slots in each group.  A slot that is not in `groups` forms its own group."""
    if groups is None:
        return [[slot] for slot in slots]
    assert process_set.ranks is not None  # the set is registered
    # all ranks use the parameter order from the process set's first rank, so that the groups are equal
    order = broadcast_object([slot.name for slot in slots], process_set.ranks[0], process_set=process_set)
    unknown = {slot.name for slot in slots} ^ set(order)
    if unknown:
        raise ValueError(
            f"all ranks must have the same parameters, but only some ranks have {', '.join(sorted(unknown))}; "
            "create the same model on all ranks"
        )
    slots = sorted(slots, key=lambda slot: order.index(slot.name))
    if isinstance(groups, int):
        share, more = divmod(len(slots), groups)
        lengths = [share + (index < more) for index in range(groups)]
        parts = iter(slots)
        return [group for length in lengths if (group := [next(parts) for _ in range(length)])]
    by_parameter = {id(slot.parameter): slot for slot in slots}
    chosen = [
        [by_parameter.pop(id(parameter)) for parameter in group if id(parameter) in by_parameter]
        for group in groups
    ]
    return [group for group in chosen if group] + [[slot] for slot in by_parameter.values()]


def wrapped(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """Create an instance of a new class that derives from `mixin` and the optimizer's class.

    The instance shares the parameters, state and options of `optimizer`, so schedulers of `optimizer` also affect the
    instance.
    """
    kind = type(optimizer)
    instance: Any = object.__new__(type(kind.__name__, (mixin, kind), {}))
    # schedulers set a `step` attribute on the optimizer instance, which would hide the new class's `step`
    instance.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    return instance


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer that works like `optimizer`, but reduces gradients across ranks before each step.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: The parameter names, usually `model.named_parameters()`.  Gradients are negotiated under these
            names.
        compression: The gradient compressor.
        backward_passes_per_step: The number of backward passes whose gradients each rank accumulates before a step.
        op: The gradient reduction: Average, Sum, Min, Max or Product.  With Adasum, ranks combine parameter changes
            instead of gradients.
        gradient_predivide_factor: A factor that divides the gradients before the sum and multiplies the sum.  Avoids
            overflow in 16-bit dtypes.  Requires op=Average.
        num_groups: Deprecated; use `groups`.
        groups: The number of groups, or a list of lists of parameters.  Gradients in a group are reduced together.
        sparse_as_dense: Whether to reduce sparse gradients as dense tensors instead of gathering them.
        process_set: The participating ranks.

    Returns:
        An optimizer whose class derives from `type(optimizer)`.

    Raises:
        ValueError: if the names are not unique or do not cover the parameters, or options are invalid or incompatible.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, got {gradient_predivide_factor}")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, got {backward_passes_per_step}")
    if isinstance(optimizer, _DistributedOptimizer | DistributedAdasumOptimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} is already a DistributedOptimizer; wrap the plain optimizer once"
        )
    if not hasattr(compression, "compress"):
        raise ValueError(
            f"expected compression to be hvd.Compression.none, fp16 or bf16, got {compression!r}"
        )
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if op == Adasum and size() > 1:
        if groups is not None or sparse_as_dense:
            raise ValueError(
                "groups and sparse_as_dense are not supported with op=Adasum; remove these options"
            )
        adasum = wrapped(optimizer, DistributedAdasumOptimizer)
        adasum._prepare(named_parameters, compression, backward_passes_per_step, process_set)
        return adasum
    reduction(op, None, process_set, [])
    distributed = wrapped(optimizer, _DistributedOptimizer)
    distributed._prepare(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )
    return distributed
