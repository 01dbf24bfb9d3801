"""The tensors that the optimizer updates on this rank: a bucket's parameters, or shards of their master weights.

    shards.set_gradients(used, norms)     # the optimizer and PyTorch's functions see gradients
    shards.clear_gradients()

If a bucket's master weights are sharded, the optimizer updates one `nn.Parameter` for each model parameter: the part of
the parameter in this rank's shard.  If the optimizer updates master weights, the `.grad` of the model's parameter is a
`ShardedGradient`, a placeholder without memory:

    nn.utils.clip_grad_norm_(model.parameters(), 1)  # the global norm, and the same factor on every rank's shards
    parameter.grad.abs()                             # RuntimeError that names the methods of the engine to use

A `ShardedGradient` supports norms and in-place elementwise operations with scalar arguments.  Other operations raise an
error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.bucket import Bucket, Change, norm_of
from farandole.parallel.zero.hidden_parameters import unchecked
from farandole.parallel.zero.weights import FlatWeights


class OptimizerShards:
    """The tensors that the optimizer updates for one bucket.

    Args:
        weights: the bucket's weights; None if the optimizer updates the model's parameters directly (`zero=0`, same
            dtype).
        number: the index of this rank's shard of the bucket.
        offloaded: whether shards are offloaded between updates; if so, the tensors are flat.
    """

    def __init__(
        self, bucket: Bucket, weights: FlatWeights | None, number: int, *, offloaded: bool = False
    ) -> None:
        self.bucket, self.weights, self.number = bucket, weights, number
        self.parameters = bucket.parameters
        self.tensors: list[nn.Parameter | None] = [None] * len(self.parameters)
        """The tensor that the optimizer updates, for each parameter; None if this rank has no part of the parameter."""
        self.starts = [0] * len(self.parameters)
        """The index of each tensor's first element in the flattened parameter."""
        self._slices: dict[int, slice] = {}  # of the rank's shard of the bucket
        self._gradients: list[Tensor | None] = [None] * len(self.parameters)
        self._marks: list[ShardedGradient | None] = [None] * len(self.parameters)
        for part in bucket.plan.layout.ranges(number):
            parameter = self.parameters[part.index]
            whole = part.length == parameter.numel() and not offloaded
            self._slices[part.index] = slice(part.offset, part.offset + part.length)
            self.starts[part.index] = part.start
            if weights is not None:
                assert weights.master is not None  # these weights are trained
                values = weights.master[self._slices[part.index]]
                self.tensors[part.index] = nn.Parameter(values.view(parameter.shape) if whole else values)
        if weights is None:
            self.tensors = list(self.parameters)

    def stored(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, tensor, start index in the parameter) for every tensor that this rank updates."""
        for parameter, tensor, start in zip(self.parameters, self.tensors, self.starts, strict=True):
            if tensor is not None:
                yield parameter, tensor, start

    # ---- gradients ----

    def set_gradients(self, used: Sequence[bool], norms: GradientNorms) -> None:
        """Set the `.grad` of all parameters that any rank has used, and set every other `.grad` to None.

        Args:
            used: for each parameter of the bucket, whether any rank used it in a backward pass.
            norms: the norms of the averaged gradients, for `torch.nn.utils.clip_grad_norm_`.

        Raises:
            RuntimeError: if the program assigned a `.grad` to a parameter that no rank used in a backward pass.
        """
        with unchecked():
            self._set_gradients(used, norms)

    def _set_gradients(self, used: Sequence[bool], norms: GradientNorms) -> None:
        names = self.bucket.plan.names
        for index, (parameter, tensor, anybody) in enumerate(
            zip(self.parameters, self.tensors, used, strict=True)
        ):
            if not anybody and self._is_assigned(index):
                raise self._assigned(index)
            parameter.grad = None
            change = None if tensor is None else partial(self._change, index)
            if self.weights is not None:
                mark = ShardedGradient(parameter, change, norms, names[index]) if anybody else None
                self._marks[index] = parameter.grad = mark
            if tensor is None:
                continue
            if not anybody:
                tensor.grad = None
            elif self._is_elsewhere(tensor):
                tensor.grad = ShardedGradient(tensor, change, norms, names[index])
            else:
                tensor.grad = self._gradient(index)

    def set(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, gradient) for each tensor whose gradient is set.

        Changes to the yielded gradients are lost if gradients are offloaded.
        """
        if not self.bucket.holds_result:
            return
        with self.bucket.in_memory() as reduced:
            for index in self._indices_set():
                own = self.bucket.is_offloaded
                yield index, reduced[self._slices[index]] if own else self._gradient(index)

    def norms(self, order: float) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, gradient norm) for tensors whose gradient is set."""
        known = self.bucket.norms if order == 2 else None
        if known is None:
            yield from ((index, norm_of(gradient, order)) for index, gradient in self.set())
        else:
            yield from ((index, known[index]) for index in self._indices_set())

    def versions(self) -> tuple[tuple[int, int], ...] | None:
        """Return a value that changes if a gradient is changed in place; None if changes cannot be detected."""
        if self.weights is None:  # programs also change gradients through `.grad.data`
            return None
        return tuple(
            (i, t.grad._version) for i, t in enumerate(self.tensors) if t is not None and t.grad is not None
        )

    def _indices_set(self) -> list[int]:
        return [i for i, each in enumerate(self.tensors) if each is not None and each.grad is not None]

    def clear_gradients(self) -> None:
        """Set every `.grad` to None."""
        for tensor in (*self.parameters, *self.tensors):
            if tensor is not None:
                tensor.grad = None

    def clear(self) -> None:
        """Discard the gradients of the previous step."""
        self.bucket.clear()
        with unchecked():
            for parameter, mark in zip(self.parameters, self._marks, strict=True):
                if mark is not None and parameter.grad is mark:
                    parameter.grad = None
        self._marks = [None] * len(self.parameters)
        if not self.bucket.holds_result:
            self._gradients = [None] * len(self.parameters)

    @property
    def all_cleared(self) -> bool:
        """Whether all gradients have been cleared; if so, the next backward pass starts a new step."""
        with unchecked():
            return all(self._is_cleared(index) for index in range(len(self.parameters)))

    def resume(self, used: Tensor) -> None:
        """Prepare for another backward pass that adds to the existing gradients.

        Gradients that the program has cleared become zero, and the corresponding elements of `used` become 0.
        """
        cleared = [index for index in range(len(self.tensors)) if self._is_cleared(index)]
        used[cleared] = 0
        self.bucket.resume(used.tolist())
        for index in cleared:
            if self.tensors[index] is not None:
                self._change(index, Tensor.zero_)

    def mark_unfinished(self, has_gradient: Sequence[bool], norms: GradientNorms) -> None:
        """Assign placeholders to `.grad` after a backward pass within `no_sync`.

        A parameter gets a placeholder if its gradient is stored outside `.grad`.  The next pass can then detect
        whether the program has cleared `.grad`.
        """
        if self.weights is None:
            return
        with unchecked():
            for index, parameter in enumerate(self.parameters):
                if has_gradient[index] and parameter.grad is None:
                    name = self.bucket.plan.names[index]
                    self._marks[index] = parameter.grad = UnfinishedGradient(parameter, None, norms, name)

    def cleared_marks(self) -> list[nn.Parameter]:
        """Return the parameters whose placeholder, set by `mark_unfinished`, was cleared by the program."""
        with unchecked():
            return [
                parameter
                for parameter, mark in zip(self.parameters, self._marks, strict=True)
                if isinstance(mark, UnfinishedGradient) and parameter.grad is not mark
            ]

    def zero_result(self, index: int) -> None:
        """Set this rank's part of a reduced gradient to zero; do nothing if this rank has no part."""
        if self.bucket.holds_result and self.weights is not None and index in self._slices:
            self._change(index, Tensor.zero_)

    def take_accumulated(self, index: int) -> Tensor:
        """Return the gradient that autograd has accumulated for a parameter."""
        gradient = self.parameters[index].grad
        if isinstance(gradient, ShardedGradient):
            gradient, self.parameters[index].grad = gradient.received, None
        assert gradient is not None  # the hook runs because a gradient exists
        return gradient if gradient.layout is torch.strided else gradient.to_dense()

    def before_update(self) -> None:
        """Clear the gradient of each shard whose parameter's `.grad` was cleared.

        Raises:
            RuntimeError: if the program assigned a tensor to the `.grad` of a parameter with master weights.
        """
        for index, (parameter, tensor, mark) in enumerate(
            zip(self.parameters, self.tensors, self._marks, strict=True)
        ):
            if parameter.grad is None:
                if mark is not None and tensor is not None:
                    tensor.grad = None
            elif parameter.grad is not mark and self.weights is not None:
                raise self._assigned(index)

    @contextmanager
    def gradients_in_place(self) -> Iterator[None]:
        """Return a context manager in which `.grad` contains gradients instead of placeholders.

        Gradients that are offloaded or on another device are temporarily copied to the devices of the tensors.
        """
        marks: list[tuple[nn.Parameter, Tensor]] = []
        try:
            with self.bucket.in_memory(next(t.device for t in self.tensors if t is not None)) as reduced:
                for index in self._indices_set():
                    tensor = self.tensors[index]
                    assert tensor is not None and tensor.grad is not None
                    if self._is_elsewhere(tensor):
                        marks.append((tensor, tensor.grad))
                        tensor.grad = reduced[self._slices[index]].view(tensor.shape).to(tensor.device)
                yield
        finally:
            for tensor, mark in marks:
                tensor.grad = mark

    def _gradient(self, index: int) -> Tensor:
        """Return the gradient of tensor `index` as a view of the bucket, which must be in memory."""
        if self.weights is None:
            return self.bucket.gradient_view(index)
        found = self._gradients[index]
        if found is None:
            tensor = self.tensors[index]
            assert tensor is not None
            found = self._gradients[index] = self.bucket.reduced[self._slices[index]].view(tensor.shape)
        return found

    def _change(self, index: int, change: Change) -> None:
        """Apply `change` in place to the gradient of tensor `index`."""
        if self.weights is None:
            change(self._gradient(index))
        else:
            part = self._slices[index]
            self.bucket.change(lambda reduced: change(reduced[part]))

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether the gradient of `tensor` is offloaded or on another device."""
        return self.bucket.is_offloaded or tensor.device != self.bucket.plan.device

    def _is_assigned(self, index: int) -> bool:
        """Return whether a parameter has a gradient that the engine did not set."""
        found = self.parameters[index].grad
        known = found is None or isinstance(found, ShardedGradient)
        return not known and (self.weights is not None or found is not self._gradient(index))

    def _assigned(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"{self.bucket.plan.names[index]} was assigned a gradient that ranks have not averaged: call "
            "loss.backward() or engine.backward(loss) instead of torch.autograd.grad(); to change averaged "
            "gradients, use engine.gradients() or engine.scale_gradients(factor)"
        )

    def _is_cleared(self, index: int) -> bool:
        """Return whether the gradient of a parameter was cleared or never set."""
        tensor, mark = self.tensors[index], self._marks[index]
        if mark is not None and self.parameters[index].grad is not mark:
            return True
        if tensor is None:
            return mark is None
        if self._is_elsewhere(tensor):
            return tensor.grad is None
        return tensor.grad is None or tensor.grad is not self._gradient(index)

    # ---- values ----

    @property
    def has_masters(self) -> bool:
        """Return whether the tensors are master weights in memory, separate from the model's weights."""
        return self.weights is not None and self.weights.has_master_copy and self.weights.master is not None

    def values(self, index: int) -> Tensor:
        """Return the values of tensor `index`, possibly flattened; offloaded weights must be in memory."""
        tensor, weights = self.tensors[index], self.weights
        assert tensor is not None
        return tensor.detach() if weights is None or self.has_masters else weights.shard[self._slices[index]]

    def update_weights(self, tensors: Iterable[nn.Parameter]) -> None:
        """Copy the values of offloaded `tensors` to the model's weights."""
        assert self.weights is not None
        wanted = {id(tensor) for tensor in tensors}
        updated = {index: part for index, part in self._slices.items() if id(self.tensors[index]) in wanted}
        with self.weights.in_memory(
            write=True, blank=len(updated) == len(self._slices), device=torch.device("cpu")
        ):
            for index, part in updated.items():
                tensor = self.tensors[index]
                assert tensor is not None
                self.weights.shard[part].copy_(tensor.detach().view(-1))

    @contextmanager
    def values_in_place(self, *, write: bool) -> Iterator[None]:
        """Return a context manager that temporarily loads the offloaded weights into the tensors.

        With `write`, the weights are written back on exit.
        """
        if self.weights is None or self.weights.has_master_copy or not self.weights.is_offloaded:
            yield
        else:
            with self.weights.in_memory(write=write), self.placed_in(self.weights.shard):
                yield

    @contextmanager
    def placed_in(self, shard: Tensor) -> Iterator[None]:
        """Return a context manager that temporarily makes the tensors views of `shard`."""
        before = []
        for index, part in self._slices.items():
            tensor = self.tensors[index]
            assert tensor is not None
            before.append((tensor, tensor.data))
            tensor.data = shard[part].view(tensor.shape)
        try:
            yield
        finally:
            for tensor, data in before:
                tensor.data = data

    def prefetch(self) -> None:
        """Start reading the offloaded gradients and weights that the next update needs."""
        self.bucket.prefetch()
        if self.weights is not None and not self.weights.has_master_copy:
            self.weights.prefetch()


# ---- gradients as PyTorch's functions see them ----

_ATEN = torch.ops.aten
_ELEMENTWISE = {
    _ATEN.mul_.Tensor,
    _ATEN.mul_.Scalar,
    _ATEN.div_.Tensor,
    _ATEN.div_.Scalar,
    _ATEN.clamp_.default,
    _ATEN.clamp_min_.default,
    _ATEN.clamp_max_.default,
    _ATEN.zero_.default,
    _ATEN.nan_to_num_.default,
}
"""In-place operations that change each element independently, with scalar arguments."""


class GradientNorms:
    """The norms of all averaged gradients, computed with one collective call.

    Args:
        names: the names of all parameters of the model, in the same order on all ranks.
        shards: this rank's shards of all buckets.
        comm: the communicator of the ranks that have different parts of the gradients; None if this rank has all parts.
    """

    def __init__(
        self,
        names: Iterable[str],
        shards: Sequence[OptimizerShards],
        device: torch.device,
        comm: Communicator | None,
    ) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._shards, self._device, self._comm = shards, device, comm
        self._norms: dict[float, list[Tensor]] = {}
        self._square: Tensor | None = None  # of this rank's parts
        self._versions: list[tuple[tuple[int, int], ...] | None] = []  # of the gradients in `_square`

    def number(self, name: str) -> int:
        """Return the index of a parameter in `names`."""
        return self._numbers[name]

    def clear(self) -> None:
        """Discard the stored norms; call this after gradients have changed."""
        self._norms.clear()
        self._square = None

    def of(self, name: str, order: float) -> Tensor:
        """Return the norm of a parameter's gradient.

        The first call with a given `order` after gradients have changed is collective.
        """
        if order not in self._norms:
            self._norms[order] = self._compute(order)
        return self._norms[order][self._numbers[name]]

    def total(self) -> float:
        """Return the Euclidean norm of all gradients.  This is a collective call.

        The norm is infinite or NaN if any element is infinite or NaN.
        """
        versions = [shards.versions() for shards in self._shards]
        if self._square is None or versions != self._versions or None in versions:
            self._square, self._versions = self._own_square(), versions
        square = self._square.clone()
        if self._comm is not None:
            self._comm.all_reduce(square)
        return float(square.sqrt())

    def _own_square(self) -> Tensor:
        """Return this rank's contribution to the sum of the squares of all gradients."""
        squares: dict[int, list[Tensor]] = {}
        for _, norm, holders in self._parts(2):
            squares.setdefault(holders, []).append(norm.to(self._device, torch.float64))
        square = torch.zeros((), dtype=torch.float64)
        for holders, norms in squares.items():
            own = (torch.linalg.vector_norm(torch.stack(norms)) ** 2).cpu()
            square += own if self._comm is None else own / holders
        return square

    def _parts(self, order: float) -> Iterator[tuple[str, Tensor, int]]:
        """Yield (parameter name, norm of this rank's part, number of ranks with the same part)."""
        for shards in self._shards:
            plan = shards.bucket.plan
            for index, norm in shards.norms(order):
                yield plan.names[index], norm, plan.ranks.holders

    def _compute(self, order: float) -> list[Tensor]:
        powers = torch.zeros(len(self.names), dtype=torch.float64, device=self._device)
        largest = math.isinf(order)
        for name, part, holders in self._parts(order):
            norm = part.double()
            powers[self._numbers[name]] = (
                norm if largest else norm**order / (1 if self._comm is None else holders)
            )
        if self._comm is not None:
            self._comm.all_reduce(powers, "max" if largest else "sum")
        return list((powers if largest else powers ** (1 / order)).float())


class ShardedGradient(Tensor):
    """A placeholder for the averaged gradient of `parameter`.

    Args:
        change: the function that modifies this rank's part of the gradient; None on ranks without a part.
        norms: the norms of all gradients.
        name: the name of the parameter in `norms`.
    """

    _change_part: Callable[[Change], None] | None
    _norms: GradientNorms
    _name: str
    received: Tensor | None
    """The gradient that autograd has added in a further backward pass."""

    @staticmethod
    def __new__(
        cls, parameter: Tensor, change: Callable[[Change], None] | None, norms: GradientNorms, name: str
    ) -> ShardedGradient:
        """Create a placeholder with the parameter's shape, dtype and device."""
        made: ShardedGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._change_part, made._norms, made._name = change, norms, name
        made.received = None
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient({self._name}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a supported operation; raise RuntimeError for any other operation."""
        gradient, *rest = args
        if isinstance(gradient, cls) and not any(isinstance(each, cls) for each in rest):
            if function in _ELEMENTWISE:
                return gradient._change(function, rest, kwargs or {})
            if function is _ATEN.linalg_vector_norm.default and len(rest) < 2:
                return gradient._norm(*rest)
            if function is _ATEN.detach.default:
                return gradient
            if function is _ATEN.add_.Tensor and torch._C._current_graph_task_id() != -1:
                # autograd accumulates in another pass; the hook of the parameter takes the gradient
                gradient.received = rest[0]
                return gradient
        found = next(each for each in _flat(args) if isinstance(each, cls))
        raise RuntimeError(
            f"{function.__name__.split('.')[0]} is not supported for the gradient of {found._name}, because this rank "
            "does not have the whole gradient in the dtype of the parameter. Read this rank's part with "
            "engine.gradients(). Compute with the whole gradient through engine.clip(max_norm), "
            "engine.gradient_norm(), engine.scale_gradients(factor), torch.nn.utils.clip_grad_norm_ or "
            "clip_grad_value_. Pass optimizers to engine.optimizer(...)."
        )

    def _change(self, function: Any, rest: Sequence[Any], kwargs: dict[str, Any]) -> ShardedGradient:
        if any(isinstance(each, Tensor) and each.numel() != 1 for each in rest):
            raise RuntimeError(
                f"the gradient of {self._name} cannot be combined with a tensor of several elements, because "
                "this rank has only a shard of the gradient; engine.gradients() returns this shard"
            )
        self._norms.clear()
        if self._change_part is not None:
            numbers = [each.clone() if isinstance(each, Tensor) else each for each in rest]
            self._change_part(lambda part: function(part, *numbers, **kwargs))
        return self

    def _norm(self, order: float = 2.0) -> Tensor:
        if not order > 0:
            raise RuntimeError(
                f"expected an order above 0 for the norm of the gradient of {self._name}, got {order}; "
                "engine.gradients() returns this rank's shards of all gradients"
            )
        return self._norms.of(self._name, float(order))


class UnfinishedGradient(ShardedGradient):
    """A placeholder for a gradient that is not averaged yet, because the last pass ran within `no_sync`."""

    def _change(self, function: Any, rest: Sequence[Any], kwargs: dict[str, Any]) -> ShardedGradient:
        raise self._refusal()

    def _norm(self, order: float = 2.0) -> Tensor:
        raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self._name} is not averaged yet, because the last backward pass ran within no_sync; run the "
            "last pass of a step outside no_sync, or call engine.synchronize() on all ranks"
        )


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values
