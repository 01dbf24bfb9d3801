"""Compare collectives with the same calls on a Gloo group of the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gloo_group() -> dist.ProcessGroup:
    """Return a Gloo group with the ranks of the default group, created once per default group.

    The group is not destroyed before the default group.  Gloo's destructor holds the interpreter lock while it waits
    for its threads, and these threads may need the lock to free Python objects of the last work.
    """
    world = dist.group.WORLD
    if not hasattr(world, "next_to_gloo"):
        world.next_to_gloo = dist.new_group(backend="gloo")
    return world.next_to_gloo


def same_on_both(gloo: dist.ProcessGroup, run: Callable[[dist.ProcessGroup], Any]) -> None:
    """Assert that `run(group)` returns the same tensors on the default group and on Gloo."""
    assert dist.get_backend().startswith("farandole")
    found, expected = flat(run(dist.group.WORLD)), flat(run(gloo))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        else:
            assert one == other


def flat(result: Any) -> list[Any]:
    """Return the tensors and other objects in nested lists as one list."""
    if isinstance(result, Tensor):
        return [result.detach().clone()]
    if isinstance(result, (list, tuple)):
        return [tensor for each in result for tensor in flat(each)]
    return [result]
