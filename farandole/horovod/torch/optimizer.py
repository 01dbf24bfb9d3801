"""`DistributedOptimizer`: an optimizer whose `step` uses the gradients of all ranks.

Hooks submit each gradient as soon as the backward pass has computed it.  The engine reduces gradients during the
backward pass, and `step` waits for the results.

With op=Adasum, each rank steps with its own gradients, and the changes of the parameters are combined (Maleki et al.,
2020, section 4).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from farandole.horovod.basics import size
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.functions import broadcast_object
from farandole.horovod.torch.gradient_groups import Bundle, Slot
from farandole.horovod.torch.operations import Adasum, Average, allreduce_async_, reduction, synchronize


def name_parameters(param_groups: list[dict[str, Any]], named_parameters: Any) -> list[tuple[Tensor, str]]:
    """Return the parameters of an optimizer with their given names, or with generated names.

    Raises:
        ValueError: `named_parameters` has wrong items or a repeated name, or a parameter has no name.
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
            f"were not named; their shapes: {shapes}"
        )
    return [(parameter, names[id(parameter)]) for parameter in parameters]


class DistributedAdasumOptimizer(torch.optim.Optimizer):
    """The mixin for the class of the wrapped optimizer if op=Adasum."""

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
        self._names = [
            (parameter, name)
            for parameter, name in name_parameters(self.param_groups, named_parameters)
            if parameter.requires_grad
        ]
        reduction(Adasum, None, process_set, [parameter for parameter, _ in self._names])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each `step`; it has no effect on the result."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: `step` combines the changes."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: a step without synchronization is not supported."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients, and replace the change with the combination of all ranks' changes."""
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


class _DistributedOptimizer(torch.optim.Optimizer):
    """The mixin for the class of the wrapped optimizer."""

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
        names = name_parameters(self.param_groups, named_parameters)
        self.backward_passes_per_step = backward_passes_per_step
        self._synchronized = False
        self._should_synchronize = True
        self._hooks: list[Any] = []
        self._bundles: list[Bundle] = []
        _check_groups(groups)
        if not process_set.included() or size() == 1:
            return
        factor = gradient_predivide_factor
        agreed = {"op": op, "prescale": 1.0 / factor, "postscale": factor}
        slots = [Slot(parameter, name) for parameter, name in names if parameter.requires_grad]
        self._bundles = [
            Bundle(members, agreed, compression, sparse_as_dense, process_set)
            for members in _grouped(slots, groups, process_set)
        ]
        for bundle in self._bundles:
            bundle.expect(backward_passes_per_step)
            for slot in bundle.slots:
                hook = slot.parameter.register_post_accumulate_grad_hook(_hook(bundle, slot))
                self._hooks.append(hook)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each `step`."""
        self.backward_passes_per_step = passes
        for bundle in self._bundles:
            bundle.expect(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer, and discard gradients in flight."""
        for bundle in self._bundles:
            bundle.forget()
            bundle.expect(self.backward_passes_per_step)
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Wait until every gradient is reduced; then `.grad` may be clipped or inspected."""
        for bundle in self._bundles:
            bundle.launch()
        for bundle in self._bundles:
            bundle.finish()
            bundle.expect(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` does not synchronize, for programs that call `synchronize`.

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize and step.  A closure's gradients are synchronized after each call."""
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
        """Clear the gradients; raise AssertionError while gradients are in flight."""
        if any(bundle.begun for bundle in self._bundles):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)


def _hook(bundle: Bundle, slot: Slot) -> Callable[[Tensor], None]:
    def received(_: Tensor) -> None:
        if slot.awaited <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step times before call to step() "
                f"(parameter {slot.name}). Increase backward_passes_per_step to accumulate gradients locally."
            )
        bundle.begun = True
        slot.awaited -= 1
        if slot.awaited == 0:
            bundle.left -= 1
            if bundle.left == 0:
                bundle.launch()

    return received


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if (
        isinstance(groups, bool)
        or not isinstance(groups, (int, list, tuple))
        or (isinstance(groups, int) and groups <= 0)
    ):
        raise ValueError("groups should be a positive integer or a list of list of torch.Tensor.")
    if isinstance(groups, int):
        return
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))


def _grouped(
    slots: list[Slot], groups: int | Sequence[Sequence[Tensor]] | None, process_set: ProcessSet
) -> list[list[Slot]]:
    """Return the slots of each group; without groups, each slot is a group."""
    if groups is None:
        return [[slot] for slot in slots]
    # the same groups on all ranks, whatever order each has its parameters in: that of the first of them
    assert process_set.ranks is not None  # it is registered
    order = broadcast_object([slot.name for slot in slots], process_set.ranks[0], process_set=process_set)
    unknown = {slot.name for slot in slots} ^ set(order)
    if unknown:
        raise ValueError(f"ranks do not have the same parameters; only on some: {', '.join(sorted(unknown))}")
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
    """Return an instance of a new class, with `mixin` before the optimizer's class, that shares parameters and state.

    A scheduler that was made for the optimizer before goes on changing the options of both.
    """
    kind = type(optimizer)
    instance: Any = object.__new__(type(kind.__name__, (mixin, kind), {}))
    # schedulers put a counting `step` on the instance, which would bypass the new class's
    instance.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    return instance


def DistributedOptimizer(  # noqa: N802 - Horovod's spelling
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
    """Wrap an optimizer so that it steps with the gradients of all ranks; an instance of its class.

    named_parameters: usually `model.named_parameters()`; the names under which gradients are negotiated.
    compression: what gradients are communicated in.
    backward_passes_per_step: how many passes are accumulated, locally, before each step.
    op: Average, Sum, Min, Max or Product of the gradients; with Adasum, what is combined is each rank's change
    of the parameters.
    gradient_predivide_factor: divide by it before the sum and multiply by it afterwards, for narrow types.
    groups: reduce gradients in this many groups, or in these; the gradients of a group travel together.
    sparse_as_dense: reduce sparse gradients as dense ones rather than gathering them.

    Raises ValueError where the names are not unique or do not cover the parameters, or options do not go together.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, not {gradient_predivide_factor}")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {backward_passes_per_step}")
    if isinstance(optimizer, _DistributedOptimizer | DistributedAdasumOptimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} is a DistributedOptimizer already: wrap the plain optimizer, once"
        )
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression is hvd.Compression.none, fp16 or bf16, not {compression!r}")
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if op == Adasum and size() > 1:
        if groups is not None or sparse_as_dense:
            raise ValueError("groups and sparse_as_dense are not supported with op=Adasum: leave them out")
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
