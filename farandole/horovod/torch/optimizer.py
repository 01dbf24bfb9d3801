"""`DistributedOptimizer`: an optimizer whose `step` uses the gradients of all ranks.

Gradients are submitted by hooks, each as soon as the backward pass has made it, and reduced by the engine while the
backward pass goes on.  `step` waits for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.common.basics import size
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.adasum_optimizer import DistributedAdasumOptimizer
from farandole.horovod.torch.asynchronous import Adasum, Average, reduction
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.functions import broadcast_object
from farandole.horovod.torch.naming import name_parameters
from farandole.horovod.torch.reducing import Bundle, Slot


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is mixed into the class of the optimizer that is wrapped."""

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
        """How many backward passes come before each `step`, from now on."""
        self.backward_passes_per_step = passes
        for bundle in self._bundles:
            bundle.expect(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; gradients under way are forgotten."""
        for bundle in self._bundles:
            bundle.forget()
            bundle.expect(self.backward_passes_per_step)
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Wait until every gradient is that of all ranks; `.grad` may be clipped or inspected then."""
        for bundle in self._bundles:
            bundle.launch()
        for bundle in self._bundles:
            bundle.finish()
            bundle.expect(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step` does not synchronize: for programs that have called `synchronize` themselves.

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
        """Synchronize, and step.  With a closure, what it computes is synchronized each time it is called."""
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
        """As the wrapped optimizer's; AssertionError while gradients are under way."""
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
    """The slots that are reduced together; without groups each alone."""
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
    """An instance of a new class, `mixin` before the optimizer's own, that shares the optimizer's parameters and state.

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
