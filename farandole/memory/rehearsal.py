"""A training step on fake tensors: what a recomputation would do, without doing it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farandole.memory.fakes import as_call, device_of, faked
from farandole.memory.flops import operations
from farandole.memory.recomputation import outermost


def rehearse(model: nn.Module, example: Any, dtype: torch.dtype | None = None) -> Counter[str]:
    """The operations in matrix products and attention that recomputations of each module do, by its name.

    One forward and backward pass of `model(example)`, from which recomputations also learn how far they have to go.
    `dtype` is as for `faked`.
    """
    counting = _RepeatedFlops()
    with faked(model, example, device_of(model), dtype) as fake, torch.enable_grad(), counting:
        args, kwargs = as_call(fake)
        results = [one for one in tree_leaves(model(*args, **kwargs)) if isinstance(one, Tensor)]
        trained = [one for one in results if one.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.ones_like(one) for one in trained])
    return counting.flops


class _RepeatedFlops(TorchDispatchMode):
    """Counts what runs in recomputations.  Products that were kept do not: their mode answers before this one."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and count it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = outermost()
        if name is not None:
            self.flops[name] += operations(func.overloadpacket, args, kwargs, output)
        return output
