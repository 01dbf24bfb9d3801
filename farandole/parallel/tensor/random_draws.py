"""Detect random numbers that a region draws outside the dropout layers of its rule.

The ranks of the tensor axis have random generators in the same state.  `F.dropout` on a split tensor therefore draws
a mask for the wrong elements, and draws different numbers of values if the shards are uneven.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farandole.memory.call_wrappers import wrap_calls

_log = logging.getLogger(__name__)


def warn_of_draws(region: nn.Module, path: str, described: Iterable[nn.Module]) -> None:
    """Warn in the first training-mode call of `region` if it draws random numbers outside the layers `described`."""
    check = _DrawCheck(path)
    wrap_calls(region, check)
    for layer in described:
        wrap_calls(layer, _Described(check))


class _DrawCheck:
    """Wraps a region, and compares the random generator's states before and after calls of described layers."""

    def __init__(self, path: str) -> None:
        self._path, self._is_done = path, False
        self._device = torch.device("cpu")
        self._state: Tensor | None = None  # only during the call that is checked

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._is_done or not module.training or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        self._is_done = True
        self._device = next((p.device for p in module.parameters()), self._device)
        self._state = self._current()
        try:
            result = call(*args, **kwargs)
            self.compare()
        finally:
            self._state = None
        return result

    def compare(self) -> None:
        """Warn if the generator's state has changed since the last call of `resume`."""
        if self._state is None or torch.equal(self._state, self._current()):
            return
        self._state = None
        _log.warning(
            "%s draws random numbers outside the dropout layers of its rule, for example with F.dropout or "
            "F.scaled_dot_product_attention(dropout_p=...): if they are applied to a split tensor, the ranks' masks are "
            "wrong and replicated weights can diverge; use nn.Dropout layers that the rule describes",
            self._path,
        )

    def resume(self) -> None:
        """Store the generator's state after the call of a described layer."""
        if self._state is not None:
            self._state = self._current()

    def _current(self) -> Tensor:
        if self._device.type == "cpu":
            return torch.get_rng_state()
        state: Tensor = torch.get_device_module(self._device).get_rng_state(self._device)
        return state


class _Described:
    """Wraps a dropout layer that the region's rule describes."""

    def __init__(self, check: _DrawCheck) -> None:
        self._check = check

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check.compare()
        result = call(*args, **kwargs)
        self._check.resume()
        return result
