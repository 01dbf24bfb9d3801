"""Normalize the arguments that torch passes to the methods of a process group: tensor lists, options and keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor

from farandole.comm.dense import plain


def tensor_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Convert one tensor or a sequence of tensors to a list of tensors."""
    return [plain(tensors)] if isinstance(tensors, Tensor) else [plain(tensor) for tensor in tensors]


def tensors_of(call: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as a list; raise ValueError if there are none.  `call` names the method in the message."""
    found = tensor_list(tensors)
    if not found:
        raise ValueError(f"{call}: expected tensors, got an empty list")
    return found


def one_tensor(call: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return a list that contains the given tensor; raise ValueError unless there is exactly one tensor.

    `call` names the method in the message.
    """
    found = tensor_list(tensors)
    if len(found) != 1:
        hint = "; use all_reduce_coalesced" if call == "all_reduce" and found else ""
        raise ValueError(
            f"{call}: expected exactly one tensor, got {f'{len(found)} tensors' if found else 'an empty list'}{hint}"
        )
    return found


def one_list(call: str, tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the list of tensors in an outer list; raise ValueError unless there is exactly one list.

    Args:
        call: The name of the method, for the error message.
        tensors: One list of tensors, or a sequence that contains one such list.
    """
    lists = [tensors] if tensors and isinstance(tensors[0], Tensor) else tensors
    if len(lists) != 1:
        raise ValueError(
            f"{call}: expected exactly one list of tensors, got {f'{len(lists)} lists' if lists else 'an empty list'}"
        )
    return [tensor_list(lists[0])]  # type: ignore[arg-type]


Method = TypeVar("Method", bound=Callable[..., Any])

_KEYWORDS = {
    "tensor": "tensors",
    "root": "opts",
    "op": "opts",
    "output_tensors": "outputs",
    "output_tensor": "outputs",
    "output": "outputs",
    "input_tensors": "inputs",
    "input_tensor": "inputs",
    "input": "inputs",
    "outputTensor": "output",
    "inputTensor": "input",
    "output_split_sizes": "output_splits",
    "input_split_sizes": "input_splits",
    "dstRank": "peer",
    "srcRank": "peer",
}
"""Maps the argument names of torch's methods to the argument names of `FarandoleProcessGroup`."""


def torch_keywords(method: Method) -> Method:
    """Decorate a method so that it accepts the keyword arguments of the torch method with the same name."""
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if keywords:
            for keyword in keywords.keys() & _KEYWORDS.keys() - set(names):
                name = _KEYWORDS[keyword]
                if name in keywords or name in names[1 : 1 + len(args)]:
                    raise TypeError(f"{method.__name__}() got multiple values for argument {keyword!r}")
                keywords[name] = keywords.pop(keyword)
        return method(self, *args, **keywords)

    return call  # type: ignore[return-value]


def options_of(given: Any, kind: type, **fields: Any) -> Any:
    """Return `given` if it is a torch options object, or else a new options object.

    Args:
        given: An options object, or another value that torch accepts instead, such as a timeout.
        kind: The class of the new options object.
        fields: Values for the fields of the new object; values that are None or a `timedelta` are ignored.
    """
    if hasattr(given, "asyncOp"):
        return given
    made = kind()
    if isinstance(given, timedelta):
        made.timeout = given
    for name, value in fields.items():
        if value is not None and not isinstance(value, timedelta):
            setattr(made, name, value)
    return made
