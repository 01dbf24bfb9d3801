"""Allow a `TorchFunctionMode` to intercept a model's operations in the same way as torch functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def replaceable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `function` so that a `TorchFunctionMode` intercepts it as one call.

    The first argument must be a tensor.  `inspect.unwrap` returns the original function.
    """

    @functools.wraps(function)
    def call(x: Tensor, *arguments: Any) -> Tensor:
        if has_torch_function_unary(x):
            result: Tensor = handle_torch_function(call, (x,), x, *arguments)
            return result
        return function(x, *arguments)

    return call
