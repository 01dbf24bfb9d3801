"""Recompute calls to a module in the backward pass, with non-reentrant `torch.utils.checkpoint`.

Outputs of matrix products can be kept, so that only cheaper operations are recomputed (Korthikanti et al., 2022,
"Reducing Activation Recomputation in Large Transformer Models"; Chen et al., 2016, section 4.2).  Two dispatch
modes share a `_Kept` object.  The forward mode keeps the outputs of products.  The recomputation mode returns the
kept outputs instead of running the products again.

PyTorch has similar modes (`create_selective_checkpoint_contexts`), with three differences:

- After a module's first recomputation, outputs that no recomputation has used are no longer kept (for example, in a
  block x + f(x), the output of the last product of f).
- A kept output that is overwritten in place is recomputed.  PyTorch raises an error in the backward pass.
- Outputs of products with dropout are never kept, because skipping these products would shift the random numbers of
  later operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten

WEIGHT_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.convolution, aten._scaled_mm, aten.mv, aten.addmv})
"""The operators for products with weights, which perform many operations per output byte."""

FUSED_ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_fused_attention_overrideable,
    }
)
"""The operators for fused attention, whose outputs have the same size as the queries."""

KEPT_PRODUCTS: dict[str, frozenset[Any]] = {
    "block": frozenset(),
    "selective": WEIGHT_PRODUCTS | FUSED_ATTENTION,
    "attention": WEIGHT_PRODUCTS,
}
"""The products whose outputs are kept in each mode, in addition to the module's inputs."""

_SMALL_BYTES = 1 << 20

_running = threading.local()
_observers: list[Callable[[Tensor], None]] = []


def recomputing() -> bool:
    """Return whether this thread is recomputing a module.

    Hooks of a module can call this function to detect a recomputation.
    """
    return recomputed_module() is not None


def recomputed_module() -> str | None:
    """Return the name of the module that this thread is recomputing, or None.

    If recomputations are nested, return the name of the outermost module.
    """
    names: list[str] = getattr(_running, "names", [])
    return names[0] if names else None


@contextmanager
def observe_kept(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Within the context, call `observer` with each operator output that is kept for a recomputation."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def measuring() -> bool:
    """Return whether an `observe_kept` context is active."""
    return bool(_observers)


class RecomputeWrapper:
    """Recomputes calls to a module in the backward pass, except for the products in `KEPT_PRODUCTS[mode]`.

    A recomputation starts from the buffer values before the forward pass and does not change the buffers.  Tensors
    in nested arguments are treated as saved tensors.  If a module changes its input in place, the call raises a
    RuntimeError.
    """

    def __init__(self, name: str, mode: str) -> None:
        self.name, self.mode = name, mode
        self._products = KEPT_PRODUCTS[mode]
        self._needed: int | None = None

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module, and keep only its inputs and the outputs of the selected products."""
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        # All tensors become separate arguments.  PyTorch saves them like other saved tensors, so they are checked for
        # in-place changes, counted and swapped.
        inputs, structure = tree_flatten((args, kwargs))
        versions = [
            (one, one._version) for one in inputs if isinstance(one, Tensor) and not one.is_inference()
        ]
        buffers = _Buffers(module)
        kept = _Kept(self._products, self._needed)
        forward = True

        def run(*leaves: Any) -> Any:
            nonlocal forward
            some, named = tree_unflatten(list(leaves), structure)
            if forward:
                forward = False
                return call(*some, **named)
            with _recomputation(self.name), buffers.as_before():
                try:
                    return call(*some, **named)
                finally:
                    self._needed = max(self._needed or 0, kept.replayed)

        def modes() -> tuple[Any, Any]:
            if not self._products:
                return nullcontext(), nullcontext()
            return _Keep(kept), _Replay(kept)

        results = checkpoint(run, *inputs, use_reentrant=False, context_fn=modes)
        if any(tensor._version != version for tensor, version in versions):
            raise RuntimeError(
                f"block {self.name!r} ({type(module).__name__}) changes its input in place and cannot be recomputed: "
                "use the out-of-place form (inplace=False), or do not recompute this block"
            )
        buffers.drop_unchanged()
        kept.report(tree_leaves(results))
        return results


@contextmanager
def _recomputation(name: str) -> Iterator[None]:
    names: list[str] = _running.__dict__.setdefault("names", [])
    names.append(name)
    try:
        yield
    finally:
        names.pop()


class _Buffers:
    """The buffer values before a call; a recomputation starts from these values."""

    def __init__(self, module: nn.Module) -> None:
        found = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        copies = {buffer: buffer.detach().clone() for *_, buffer in found}  # modules may share a buffer
        self._before = [
            (owner, name, buffer, buffer._version, copies[buffer]) for owner, name, buffer in found
        ]

    def drop_unchanged(self) -> None:
        """Drop the copies of large buffers that the call has not changed."""
        self._before = [
            entry
            for entry in self._before
            if entry[0]._buffers[entry[1]] is not entry[2]
            or entry[2]._version != entry[3]
            # kernels update running statistics (small buffers) without increasing the version counter
            or entry[2].nbytes <= _SMALL_BYTES
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        now = [(owner, name, owner._buffers[name]) for owner, name, *_ in self._before]
        clones = {before: before.clone() for *_, before in self._before}
        for owner, name, _, _, before in self._before:
            owner._buffers[name] = clones[before]
        try:
            yield
        finally:
            for owner, name, buffer in now:
                owner._buffers[name] = buffer


class _Kept:
    """The kept outputs of one forward pass, keyed by the index of the product in execution order."""

    def __init__(self, products: frozenset[Any], needed: int | None) -> None:
        self.products = products
        # the number of products that earlier recomputations ran, or None; outputs of later products are not kept
        self.needed = needed
        self.outputs: dict[int, tuple[Any, Any]] = {}
        self.replayed = 0

    def report(self, results: Iterable[Any]) -> None:
        """Drop kept outputs that the module returns, and pass the others to the observers."""
        self.drop(results)
        for _, output in self.outputs.values():
            for tensor in tree_iter(output):
                if isinstance(tensor, Tensor):
                    for observer in _observers:
                        observer(tensor)

    def drop(self, tensors: Iterable[Any]) -> None:
        """Drop outputs that share memory with any of `tensors`."""
        gone = {
            one.untyped_storage()._cdata
            for one in tensors
            if isinstance(one, Tensor) and one.layout is torch.strided
        }
        for number, (_, output) in list(self.outputs.items()):
            if any(isinstance(t, Tensor) and t.untyped_storage()._cdata in gone for t in tree_iter(output)):
                del self.outputs[number]


class _Mode(TorchDispatchMode):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept
        self.count = 0

    def is_product(self, func: Any) -> bool:
        return func.overloadpacket in self.kept.products and not func._schema.is_mutable


class _Keep(_Mode):
    """A dispatch mode that keeps the outputs of matrix products in the forward pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.is_product(func):
            wanted = self.kept.needed is None or self.count < self.kept.needed
            if wanted and not _has_dropout(func, args, kwargs):
                self.kept.outputs[self.count] = (func, _aliases(output))
            self.count += 1
        elif self.kept.outputs and func._schema.is_mutable:
            self.kept.drop(tree_iter(list(_written(func, args, kwargs))))
        return output


class _Replay(_Mode):
    """A dispatch mode that returns the kept outputs during the recomputation."""

    def __enter__(self) -> _Replay:
        self.count = 0  # every backward pass over a retained graph reuses this mode
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_product(func):
            then, output = self.kept.outputs.get(self.count, (func, None))
            self.count += 1
            self.kept.replayed = max(self.kept.replayed, self.count)
            if then is not func:
                raise RuntimeError(
                    f"the recomputation calls {func} where the forward pass called {then}: make the operations of the "
                    "recomputed block depend only on its inputs and random numbers"
                )
            if output is not None:
                return _aliases(output)
        return func(*args, **(kwargs or {}))


def _aliases(output: Any) -> Any:
    """Return detached aliases of `output`, so that autograd can attach a graph to them."""
    return tree_map_only(Tensor, Tensor.detach, output)


def _has_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return False


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that `func` writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[index] if index < len(args) else kwargs.get(argument.name)
