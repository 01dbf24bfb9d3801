"""The recomputation of one module's calls: what `apply_recompute` puts around blocks.

The mechanism is `torch.utils.checkpoint`, not reentrant; what is added to it is said at `Recompute`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from farandole.memory.selective import (
    FUSED_ATTENTION,
    WEIGHT_PRODUCTS,
    Keeping,
    Kept,
    Replaying,
)

KEPT_PRODUCTS: dict[str, frozenset[Any]] = {
    "block": frozenset(),
    "selective": WEIGHT_PRODUCTS | FUSED_ATTENTION,
    "attention": WEIGHT_PRODUCTS,
}
"""What each way of recomputing a module keeps beside the module's inputs."""

_SMALL_BYTES = 1 << 20

_running = threading.local()


def recomputing() -> bool:
    """Whether this thread is in a recomputation: hooks ask it, for in the forward pass they run too."""
    return outermost() is not None


def outermost() -> str | None:
    """The name of the module that this thread recomputes, the outermost if they are nested; None if it does not."""
    names: list[str] = getattr(_running, "names", [])
    return names[0] if names else None


class Recompute:
    """Around a module: its calls are recomputed in the backward pass.  `way` is a key of `KEPT_PRODUCTS`.

    Beyond what torch does: tensors inside of nested arguments are kept like saved tensors, buffers are those of
    the forward pass and are changed once, products may be kept, and a module that changes its input is named.
    """

    def __init__(self, name: str, way: str) -> None:
        self.name, self.way = name, way
        self._products = KEPT_PRODUCTS[way]
        self._needed: int | None = None

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module in such a way that only its inputs are kept (and products, if selective)."""
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        # All tensors are handed over as arguments of their own: torch keeps those like any saved tensor,
        # so that they are checked for changes, counted and swapped.
        inputs, structure = tree_flatten((args, kwargs))
        versions = [
            (one, one._version) for one in inputs if isinstance(one, Tensor) and not one.is_inference()
        ]
        buffers = _Buffers(module)
        kept = Kept(self._products, self._needed)
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
                    self._learn(kept)

        def modes() -> tuple[Any, Any]:
            if not self._products:
                return nullcontext(), nullcontext()
            return Keeping(kept), Replaying(kept)

        results = checkpoint(run, *inputs, use_reentrant=False, context_fn=modes)
        if any(tensor._version != version for tensor, version in versions):
            raise RuntimeError(
                f"block {self.name!r} ({type(module).__name__}) changes its input in place, so it cannot be "
                "recomputed from it: use the form that is not in place (inplace=False), or do not recompute this block"
            )
        buffers.settle()
        kept.settle(tree_leaves(results))
        return results

    def _learn(self, kept: Kept) -> None:
        self._needed = max(self._needed or 0, kept.replayed)


@contextmanager
def _recomputation(name: str) -> Iterator[None]:
    names: list[str] = _running.__dict__.setdefault("names", [])
    names.append(name)
    try:
        yield
    finally:
        names.pop()


class _Buffers:
    """The buffers that a call changes, as they were before it: a recomputation starts from them and changes none."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def settle(self) -> None:
        """After the call: forget what is large and has not changed.

        Of small ones one cannot tell: running statistics are updated by kernels that do not count it as a change.
        """
        self._before = [
            entry
            for entry in self._before
            if entry[0]._buffers[entry[1]] is not entry[2]
            or entry[2]._version != entry[3]
            or entry[2].nbytes <= _SMALL_BYTES
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        now = [(owner, name, owner._buffers[name]) for owner, name, *_ in self._before]
        for owner, name, _, _, before in self._before:
            owner._buffers[name] = before.clone()
        try:
            yield
        finally:
            for owner, name, buffer in now:
                owner._buffers[name] = buffer
