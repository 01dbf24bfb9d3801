"""Exclusion of classes from Dynamo, the tracer of `torch.compile`.

While a compiled function runs, Dynamo intercepts every Python frame, including frames started by C++ code: for example,
DDP's reducer calls `ProcessGroup.broadcast`.  Dynamo cannot trace the attributes of a process group.

`torch.compiler.disable` would import `torch._dynamo`, which takes a second.  It would also wrap each method, which
slows down every call.  `exclude_from_dynamo` marks code objects instead and does not slow down calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)


def exclude_from_dynamo(cls: _Class) -> _Class:
    """Exclude the methods of `cls`, and all functions called by the methods, from Dynamo; return `cls`.

    This function is a class decorator.  Compiled code may still read the properties of `cls`, such as `group_name` in
    torch 2.11.  Dynamo treats the values as constants.
    """
    for member in vars(cls).values():
        for function in _functions(member):
            if not isinstance(member, property):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for calls in traced code
            _skip(function)
    return cls


_Function = TypeVar("_Function", bound=Callable[..., Any])


def excluded_from_dynamo(function: _Function) -> _Function:
    """Exclude `function`, and all functions that it calls, from Dynamo; return `function`.

    This function is a decorator.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(function)
    return function


def _functions(member: Any) -> list[FunctionType]:
    if isinstance(member, property):
        candidates = [member.fget, member.fset, member.fdel]
    elif isinstance(member, (staticmethod, classmethod)):
        candidates = [member.__func__]
    else:
        candidates = [member]
    return [candidate for candidate in candidates if inspect.isfunction(candidate)]


def _skip(function: Callable[..., Any]) -> None:
    """Mark `function` so that Dynamo traces neither `function` nor the functions that it calls."""
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
