"""Raise an error for second derivatives of functions whose backward pass is not differentiable."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward pass of an `autograd.Function` so that it raises an error with `create_graph=True`.

    Without this check, second derivatives would silently lack the terms of the `autograd.Function`.
    `torch.autograd.function.once_differentiable` raises an error only if the incoming gradient requires a gradient.

    Raises:
        RuntimeError: in a backward pass with `create_graph=True`.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "farandole's functions have no second derivatives: a backward pass with create_graph=True is not supported"
            )
        return backward(ctx, *gradients)

    return checked
