"""Which modules of a model compute attention, found out by looking at what they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.memory.calls import release, surround
from farandole.memory.fakes import as_call, device_of, faked
from farandole.memory.selective import BATCHED_PRODUCTS, FUSED_ATTENTION

_SOFTMAX = frozenset({torch.ops.aten._softmax, torch.ops.aten._safe_softmax})


def attention_modules(
    model: nn.Module, example: Any, dtype: torch.dtype | None = None
) -> list[tuple[str, nn.Module]]:
    """The modules of `model`, by name, that compute attention themselves and not through a module inside them.

    Attention is a call of torch's scaled dot-product attention, or batched matrix products with a softmax, which may be
    a module of its own.  They are found in one forward pass of `model(example)` on fake tensors (`faked`).
    """
    found: list[nn.Module] = []
    looking = _Looking(found)
    args, kwargs = as_call(example)
    with ExitStack() as undo:
        for module in dict.fromkeys(model.modules()):
            surround(module, looking)
            undo.callback(release, module, looking)
        args, kwargs = as_call(undo.enter_context(faked(model, example, device_of(model), dtype)))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(looking.mode)
        model(*args, **kwargs)
    return [(name, module) for name, module in model.named_modules() if module in found]


class _Call:
    """A call of a module that is under way."""

    def __init__(self) -> None:
        self.fused = self.products = self.softmax = False


class _Looking:
    """Around every module: notes those that turn out to compute attention."""

    def __init__(self, found: list[nn.Module]) -> None:
        self.found = found
        self.calls = [_Call()]
        self.mode = _Noticing(self.calls)

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        mine = _Call()
        self.calls.append(mine)
        try:
            return call(*args, **kwargs)
        finally:
            self.calls.pop()
            if mine.fused or (mine.products and mine.softmax):
                self.found.append(module)
            else:  # the softmax of a module that has one inside of it
                self.calls[-1].softmax |= mine.softmax


class _Noticing(TorchDispatchMode):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and note what it is."""
        kind, current = func.overloadpacket, self.calls[-1]
        current.fused |= kind in FUSED_ATTENTION
        current.products |= kind in BATCHED_PRODUCTS
        current.softmax |= kind in _SOFTMAX
        return func(*args, **(kwargs or {}))
