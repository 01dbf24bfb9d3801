"""Parameters whose values cannot be used: shape, dtype and device can be read, and other operations raise an error.

    hide(parameter, "0.weight")
    parameter.shape             # as before
    parameter.sum()             # RuntimeError that names the engine methods to use
    show(parameter)             # an ordinary parameter again

Calling `hide` without a reason means that the values are not on this rank.  With a reason, the values may be on this
rank (`loss_parameters`), and a backward pass can use them, because it may recompute a module.

The class of a hidden parameter has a `__torch_function__`.  A shown parameter is a plain `nn.Parameter`, so operations
of the model have no overhead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = {"T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__", "__array_interface__"}
"""The properties that depend on values."""

_METADATA = {
    *(
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "element_size",
        "dim_order",
    ),
    *(
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_same_size",
        "is_shared",
        "is_pinned",
    ),
    *("is_inference", "is_conj", "is_neg", "is_set_to", "_is_view", "_has_compatible_shallow_copy_type"),
    *("data_ptr", "untyped_storage", "get_device", "__len__", "result_type", "requires_grad_", "retain_grad"),
    *("register_hook", "register_post_accumulate_grad_hook", "__set__", "__delete__"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("grad", "backward"),  # torch.autograd.grad(loss, parameters), loss.backward(inputs=parameters)
}
"""The functions that do not depend on values and are therefore allowed."""

_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}


_SHARDED = (
    "this rank has only its shard of the parameter, which is gathered only while the model computes with it; on all "
    "ranks, read unsharded values with engine.whole_parameters() or engine.state_dict(), and change them within `with "
    "engine.edit_parameters():`; instead of an L2 penalty in the loss, use the optimizer's weight_decay; a block must pass "
    "a copy of its parameter to other blocks (parameter.clone())"
)


class _Hidden(Tensor):
    """A tensor whose values cannot be used."""

    name_of_hidden: str
    reason: str | None
    """Why the values cannot be used; None if they are not on this rank."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.name_of_hidden}: {self.dtype} of shape {tuple(self.shape)}, hidden"

    def __format__(self, _: str) -> str:
        """Return the description."""
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `function` if it does not need the values, and otherwise raise RuntimeError."""
        name, kwargs = function.__name__, kwargs or {}
        if name == "__get__":
            name = function.__self__.__name__
            allowed = name not in _VALUES
        else:
            allowed = name in _METADATA
        if name in ("data", "detach"):
            return _detached(args[0])
        if allowed or (torch._C._current_graph_task_id() != -1 and _first(args, kwargs).reason is not None):
            return torch._C._disabled_torch_function_impl(function, types, args, kwargs)
        if name in _CONVERSIONS:
            example = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            if function(example, *args[1:], **kwargs) is example:  # nothing is converted
                return args[0]
        hidden = _first(args, kwargs)
        raise RuntimeError(
            f"cannot compute {name.strip('_')} of {hidden.name_of_hidden}: {hidden.reason or _SHARDED}"
        )


class _HiddenParameter(_Hidden, nn.Parameter):
    pass


def hide(parameter: nn.Parameter, name: str, reason: str | None = None) -> None:
    """Make operations on the values of a plain parameter raise an error that contains `name` and `reason`."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = _HiddenParameter
        parameter.name_of_hidden, parameter.reason = name, reason  # type: ignore[attr-defined]


def show(parameter: nn.Parameter, reason: str | None = None) -> None:
    """Make a hidden parameter an ordinary parameter; with a `reason`, only if it was hidden for that reason."""
    if type(parameter) is _HiddenParameter and reason in (None, parameter.reason):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter.name_of_hidden, parameter.reason


def unchecked() -> AbstractContextManager[None]:
    """Return a context manager that disables the checks of hidden parameters, for code that does not read values."""
    return torch._C.DisableTorchFunctionSubclass()


def is_hidden(tensor: Tensor) -> bool:
    """Return whether operations on the values of a tensor raise an error."""
    return isinstance(tensor, _Hidden)


def _detached(hidden: Tensor) -> Tensor:
    with unchecked():
        made = Tensor._make_subclass(_Hidden, hidden)
    made.name_of_hidden, made.reason = hidden.name_of_hidden, hidden.reason  # type: ignore[attr-defined]
    return made


def _first(*values: Any) -> _Hidden:
    return next(each for each in _flat(values) if isinstance(each, _Hidden))


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    elif isinstance(values, dict):
        yield from _flat(list(values.values()))
    else:
        yield values
