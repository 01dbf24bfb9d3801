"""How many bytes a model keeps between its forward and its backward pass, block by block, before it has run.

    model = build_gpt(config)                             # or under torch.device("meta"): nothing is allocated
    kept = saved_bytes(model, tokens, loss=lambda logits: next_token_loss(logits, targets))
    kept.total, kept.blocks["1"], kept.outside

What is counted is what autograd saves, and what a recomputation keeps for itself: the memory of each tensor once,
however many views of it there are.  It is counted for the block that saves it first.  Parameters, buffers and the
example are left out: they live anyway.  Not seen are tensors that a custom `autograd.Function` hides in attributes of
`ctx` instead of saving them, and what a model itself holds on to.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from farandole.memory.blocks import blocks_of
from farandole.memory.calls import release, surround
from farandole.memory.fakes import as_call, device_of, faked
from farandole.memory.selective import observed

OUTSIDE = None
"""The place of what no block saves."""


@dataclass(frozen=True)
class SavedBytes:
    """What is kept for the backward pass, in bytes, by the name of the block that keeps it.

    `outside` is what is kept outside of blocks, the loss included.
    """

    blocks: dict[str, int]
    outside: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.blocks.values()) + self.outside


def saved_bytes(
    model: nn.Module,
    example: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    real: bool = False,
) -> SavedBytes:
    """Measure what `model(example)` keeps, in its present mode, under the autocast around this call.

    `example` is one tensor, a tuple of arguments or a dict of keywords; for a model on the meta device it may lie there
    too.  `loss` is called with the output, and what it saves is counted.  Nothing is computed or allocated: tensors are
    fake ones on `device` (that of the model; "cpu" for one on the meta device), floating ones of type `dtype` (their own), unless `real` asks for a
    forward pass with the tensors there are, which leaves buffers and random states as they were.

    Raises ValueError for a device that cannot be imitated here, and what the model raises; a model whose path
    depends on values (`.item()`) can be measured with `real=True` only.
    """
    if real:
        if device is not None or dtype is not None:
            raise ValueError(
                f"device={device!r} and dtype={dtype} are for fake tensors; with real=True the model's own are measured"
            )
        with _undone(model):
            return _measured(model, example, loss)
    with faked(model, example, device_of(model, device), dtype) as fake_example:
        return _measured(model, fake_example, loss)


class _InBlock:
    """Around a block: what is saved meanwhile is the block's."""

    def __init__(self, name: str, stack: list[str | None]) -> None:
        self.name, self.stack = name, stack

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.stack.append(self.name)
        try:
            return call(*args, **kwargs)
        finally:
            self.stack.pop()


def _measured(model: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None) -> SavedBytes:
    names = [name for name, _ in blocks_of(model)]
    stack: list[str | None] = [OUTSIDE]
    alive_anyway = {
        tensor.untyped_storage()._cdata
        for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(example))
        if isinstance(tensor, Tensor)
    }
    found: dict[int, tuple[weakref.ref[torch.UntypedStorage], str | None]] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = found.get(storage._cdata)
        gone = known is not None and known[0]() is None  # its address is used again
        if storage._cdata not in alive_anyway and (known is None or gone):
            found[storage._cdata] = (weakref.ref(storage), stack[-1])

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        return tensor.detach()  # an output that is saved as it is would keep its own graph alive

    args, kwargs = as_call(example)
    with ExitStack() as undo:
        for name, block in blocks_of(model):
            around = _InBlock(name, stack)
            surround(block, around)
            undo.callback(release, block, around)
        undo.enter_context(observed(note))
        undo.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        undo.enter_context(torch.enable_grad())
        output = model(*args, **kwargs)
        if loss is not None:
            output = loss(output)
    graph = [one.grad_fn for one in tree_leaves(output) if isinstance(one, Tensor)]
    del output
    kept: Counter[str | None] = Counter()
    for reference, block_name in found.values():
        storage = reference()
        if storage is not None:
            kept[block_name] += storage.nbytes()
    del graph
    return SavedBytes(blocks={name: kept[name] for name in names}, outside=kept[OUTSIDE])


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Leaves buffers (running statistics) and the random generators as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
