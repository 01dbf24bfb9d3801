"""The blocks of a model: what is recomputed, swapped, gathered or placed as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward pass of their own: no block."""


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of `module` with their names in it, in the order in which they are registered, each once.

    - Of an `nn.Sequential`, they are its children: `0`, `1`, ...
    - Else the members of its outermost ModuleLists and Sequentials, as in `transformer.h.0`.  Modules beside these
      lists (an embedding, a last norm) belong to no block.
    - Where there is no list, `module` is its only block, named ``""``.

    A ModuleList or ModuleDict cannot be called, so where one is a member it stands for its own members.  A block that
    has two names appears under the first.
    """
    members = _called(module, "") if isinstance(module, nn.Sequential) else _in_lists(module, "")
    found: dict[nn.Module, str] = {}
    for name, block in members:
        found.setdefault(block, name)
    return [(name, block) for block, name in found.items()] or [("", module)]


def _in_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield from _in_lists(child, f"{prefix}{name}.")


def _called(container: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in container.named_children():
        if isinstance(child, _NEVER_CALLED):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child
