"""Which name each parameter of an optimizer has, and whether the names will do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor


def name_parameters(param_groups: list[dict[str, Any]], named_parameters: Any) -> list[tuple[Tensor, str]]:
    """The parameters of an optimizer with their names: given ones, or made-up ones where none are given.

    Raises ValueError where what is given is no sequence of (name, parameter), where a name occurs twice, or where a
    parameter has none.
    """
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [
            (parameter, f"gradient.{number}.{index}")
            for number, group in enumerate(param_groups)
            for index, parameter in enumerate(group["params"])
        ]
    given = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in given).items() if count > 1]
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    names = {id(parameter): name for name, parameter in given}
    unnamed = [parameter for parameter in parameters if id(parameter) not in names]
    if unnamed:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in unnamed)
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} of the {len(parameters)} parameters of the optimizer "
            f"were not named; their shapes: {shapes}"
        )
    return [(parameter, names[id(parameter)]) for parameter in parameters]
