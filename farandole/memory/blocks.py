"""Split a model into blocks, which are the units of recomputation, swapping, weight gathering and placement."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward pass; their members are blocks."""


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a pair (name, block) for each block of `module`, in registration order.

    - The blocks of an `nn.Sequential` are its children: `0`, `1`, ...
    - The blocks of any other module are the members of its outermost ModuleLists and Sequentials, such as
      `transformer.h.0`.  Modules outside these containers (an embedding, the last norm) belong to no block.
    - Without such containers, the only block is `module` itself, named ``""``.

    If one of these children or members is a ModuleList or ModuleDict, which cannot be called, its members are blocks
    instead.  A block with two names is listed once, under the first name.
    """
    members = _called(module, "") if isinstance(module, nn.Sequential) else _in_lists(module, "")
    found: dict[nn.Module, str] = {}
    for name, block in members:
        found.setdefault(block, name)
    return [(name, block) for block, name in found.items()] or [("", module)]


def group_by_block(
    model: nn.Module,
) -> tuple[list[list[nn.Parameter]], list[tuple[nn.Module, list[int]]]]:
    """Group the parameters of `model` by block.

    Returns:
        - One list per block of `blocks_of(model)`, with the parameters that belong only to this block, and a last list
          with all other parameters.  Lists keep the model's order and may be empty.
        - Pairs of a block and the indices of the lists that its forward pass needs.  If some parameters are in no
          block, the last pair contains `model` and the index of the last list.
    """
    blocks = [block for _, block in blocks_of(model)]
    owners: dict[nn.Parameter, list[int]] = {parameter: [] for parameter in model.parameters()}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            owners[parameter].append(number)
    rest = len(blocks)
    groups: list[list[nn.Parameter]] = [[] for _ in range(rest + 1)]
    group_of = {parameter: found[0] if len(found) == 1 else rest for parameter, found in owners.items()}
    for parameter, group in group_of.items():
        groups[group].append(parameter)
    needs = [(block, sorted({group_of[parameter] for parameter in block.parameters()})) for block in blocks]
    if not all(owners.values()):
        needs.append((model, [rest]))
    return groups, needs


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
