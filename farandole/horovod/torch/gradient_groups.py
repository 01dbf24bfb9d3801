"""Gradients that are reduced in one request, and their progress within a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.engine import Engine
from farandole.horovod.process_sets import ProcessSet
from farandole.horovod.requests import ALLREDUCE, Request, Signature
from farandole.horovod.torch.compression import Compressor, NoneCompressor
from farandole.horovod.torch.operations import make_request, sparse_allreduce_async


class Slot:
    """One parameter, and the number of gradients to accumulate before the reduction."""

    __slots__ = ("awaited", "context", "name", "parameter", "sparse")

    def __init__(self, parameter: Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.awaited = 0
        self.context: Any = None  # of the compressor
        self.sparse = False  # whether its gradients have been sparse


class Bundle:
    """Parameters whose gradients form one request: the members of a group, or one parameter.

    agreed: fields of the request's signature.  `begun`: whether a gradient of this step was received.
    `left`: how many members still await gradients.
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
        self.left = 0
        self._agreed = agreed
        self._compression = compression
        self._as_is = compression is NoneCompressor
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._signature: Signature | None = None
        self._request: tuple[Engine, Request] | None = None
        self._sparse: Callable[[], Tensor] | None = None

    def expect(self, passes: int) -> None:
        """Begin a step with `passes` gradients per parameter."""
        self.left = len(self.slots)
        self.begun = False
        for slot in self.slots:
            slot.awaited = passes

    def forget(self) -> None:
        """Discard the request in flight."""
        self._request = self._sparse = None

    def launch(self) -> None:
        """Submit the gradients, once per step; a gradient that this rank has not computed is zero."""
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
                        f"the gradient of {slot.name} is sparse, and sparse gradients are not reduced in groups; "
                        f"leave it out of groups, or use sparse_as_dense=True"
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
        """Wait for the result and store it in `.grad`."""
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
    """Return the gradient of an embedding, or an empty gradient if this rank has none."""
    if parameter.grad is not None:
        return parameter.grad.coalesce()
    none = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    nothing = parameter.new_zeros((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(none, nothing, parameter.shape, check_invariants=True)


def _sparse_dimensions(gradient: Tensor | None) -> int:
    return 1 if gradient is None else gradient.sparse_dim()
