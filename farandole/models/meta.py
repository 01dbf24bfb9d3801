"""Create models on the meta device, without allocating memory or initializing values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_RANDOM = frozenset(
    {"normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_", "trunc_normal_", "xavier_uniform_"}
)


class _SkipRandomValues(TorchFunctionMode):
    """Skips random initialization on the meta device."""

    # The first random initialization on this device would import torch's compiler, which takes 2 to 8 s.

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Return a context in which tensors are created on the meta device."""
    with torch.device("meta"), _SkipRandomValues():
        yield
