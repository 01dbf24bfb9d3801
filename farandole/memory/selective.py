"""Keeping the outputs of matrix products through a recomputation, so that only the cheap rest is computed again.

Two dispatch modes share a `Kept`: the first runs around a forward pass and keeps what products return, the second
around its recomputation and hands it out where the product is asked for again (Korthikanti et al., 2022, "Reducing
Activation Recomputation in Large Transformer Models", recompute attention only; Chen et al., 2016, section 4.2, all
that is not a convolution).

torch has such a pair (`create_selective_checkpoint_contexts`).  This one differs in three things: outputs that the
last recomputation did not get to are not kept (of a block x + f(x), the product at the end of f); an output
that is overwritten in place is computed again, where torch's raises in the backward pass; and products with dropout
inside are never kept, because leaving them out would shift the random numbers of what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

aten = torch.ops.aten

WEIGHT_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.convolution, aten._scaled_mm, aten.mv, aten.addmv})
"""Products with weights: many operations for each byte of output."""

FUSED_ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_fused_attention_overrideable,
    }
)
"""Attention in one kernel: its output is as small as a query."""

BATCHED_PRODUCTS = frozenset({aten.bmm, aten.baddbmm})
"""Among these are written-out attention's scores, which have few operations for each byte of output."""

_observers: list[Callable[[Tensor], None]] = []


@contextmanager
def observed(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Within it, `observer` is told every tensor that a forward pass has kept."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def measuring() -> bool:
    """Whether anything observes what is kept."""
    return bool(_observers)


class Kept:
    """Outputs of the `products` of one forward pass, by their number.

    `needed` is how many products an earlier recomputation went through before it had all it wanted, None if there
    was none; later ones are not kept.
    """

    def __init__(self, products: frozenset[Any], needed: int | None) -> None:
        self.products = products
        self.needed = needed
        self.outputs: dict[int, tuple[Any, Any]] = {}
        self.replayed = 0

    def settle(self, results: Iterable[Any]) -> None:
        """The forward pass has returned `results`: what it kept of them is let go, for its caller may overwrite it."""
        self.drop(results)
        for _, output in self.outputs.values():
            for tensor in tree_iter(output):
                if isinstance(tensor, Tensor):
                    for observer in _observers:
                        observer(tensor)

    def drop(self, tensors: Iterable[Any]) -> None:
        """Let go of outputs that lie in the memory of any of `tensors`."""
        gone = {
            one.untyped_storage()._cdata
            for one in tensors
            if isinstance(one, Tensor) and one.layout is torch.strided
        }
        for number, (_, output) in list(self.outputs.items()):
            if any(isinstance(t, Tensor) and t.untyped_storage()._cdata in gone for t in tree_iter(output)):
                del self.outputs[number]


class _Mode(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept
        self.count = 0

    def is_product(self, func: Any) -> bool:
        return func.overloadpacket in self.kept.products and not func._schema.is_mutable


class Keeping(_Mode):
    """Around the forward pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and keep what it returns if it is a product."""
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


class Replaying(_Mode):
    """Around the recomputation."""

    def __enter__(self) -> Replaying:
        self.count = 0  # the same mode serves every backward pass over a retained graph
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand out what was kept of `func`, or run it."""
        if self.is_product(func):
            then, output = self.kept.outputs.get(self.count, (func, None))
            self.count += 1
            self.kept.replayed = max(self.kept.replayed, self.count)
            if then is not func:
                raise RuntimeError(
                    f"the recomputation calls {func} where the forward pass called {then}: a block that is recomputed "
                    "must do the same both times; what it does may depend on its inputs and random numbers only"
                )
            if output is not None:
                return _aliases(output)
        return func(*args, **(kwargs or {}))


def _aliases(output: Any) -> Any:
    """The same memory in new tensors: autograd attaches its graph to those that an operation returns."""
    return tree_map_only(Tensor, Tensor.detach, output)


def _has_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return False


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that `func` writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[index] if index < len(args) else kwargs.get(argument.name)
