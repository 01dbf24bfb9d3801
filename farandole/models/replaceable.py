"""Let a `TorchFunctionMode` replace a whole operation of a model, just as it can replace a torch function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def replaceable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `function` so that a `TorchFunctionMode` receives it as one call.  The first argument must be a tensor.

    `inspect.unwrap` returns the original function.
    """

    @functools.wraps(function)
    def call(x: Tensor, *arguments: Any) -> Tensor:
        if has_torch_function_unary(x):
            result: Tensor = handle_torch_function(call, (x,), x, *arguments)
            return result
        return function(x, *arguments)

    return call
