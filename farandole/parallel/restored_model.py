"""Restore a model whose conversion failed, so that another plan can be applied to it.

with restored_after_error(model):
    convert(model)          # adds adapters, wraps calls, splits parameters, removes blocks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def restored_after_error(model: nn.Module) -> Iterator[None]:
    """Restore the structure of `model` if the `with` block raises an exception.

    The structure consists of the classes and attributes of all modules, and of the shapes and `requires_grad` of all
    parameters.  Values that are changed in place are not restored.  If the block splits parameters, their original
    values stay in memory until the block ends.
    """
    modules = [(module, type(module), _copied(vars(module))) for module in model.modules()]
    parameters = [(parameter, parameter.data, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, kind, attributes in modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update({name: _restored(value, copy) for name, (value, copy) in attributes.items()})
        for parameter, data, requires_grad in parameters:
            if parameter.shape != data.shape:
                parameter.data = data
            parameter.requires_grad_(requires_grad)
        raise


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return a dict that maps names to (value, copy); the copy is None unless the value is a dict or a list."""
    return {name: (value, _items(value)) for name, value in attributes.items()}


def _items(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else None


def _restored(value: Any, copy: Any) -> Any:
    """Restore the items of `value` from `copy` in place, because hook handles refer to `value`; return `value`."""
    if isinstance(value, dict):
        value.clear()
        value.update(copy)
    elif isinstance(value, list):
        value[:] = copy
    return value
