"""Reject loss functions that use parameters directly, if this would cause wrong gradients.

A loss may contain a term that is computed from parameters instead of the model's output:

    total + 0.01 * model[1].norm.weight.square().sum()

The term is exact if this rank has the complete parameter, and if the reduction of the parameter's gradient counts the
term once per replica.  Data parallelism and ZeRO satisfy both conditions.  With other axes, the conditions can be
violated:

- If an axis shards a parameter, each rank has only a part of the parameter.  The term would be a partial sum, and its
  gradient would be missing on some ranks.
- The copies of some parameters, such as a router's weight under tensor parallelism, have partial gradients, which are
  summed.  Every rank would compute the complete gradient of the term, so the sum would contain it several times.
- A rank of a pipeline does not have the parameters of other stages.

Parameters that violate a condition are hidden when the model's forward pass ends, until the backward pass begins.  The loss function can still call modules of the model, because these calls communicate as needed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from farandole.comm.dynamo import excluded_from_dynamo
from farandole.layout import Layout
from farandole.mesh import Mesh
from farandole.parallel.zero.hidden_parameters import hide, show

ADVICE = (
    "instead of an L2 penalty in the loss, use the optimizer's weight_decay; for other penalties, change the weights after "
    "optimizer.step() within `with engine.edit_parameters():`"
)


def reason_to_refuse(layout: Layout, mesh: Mesh, rank: int) -> str | None:
    """Return why a loss function on `rank` cannot use a parameter with this layout, or None if it can."""
    if layout.shards:
        axes = " and ".join(axis for axis, _ in layout.shards)
        return f"this rank has only its part of the parameter ({axes} parallelism)"
    if not _counts_once(replace(layout, name="", shape=()), mesh, rank):
        return "its gradients are summed over ranks that compute the same loss, which would count the loss several times"
    return None


@functools.lru_cache(maxsize=64)  # many parameters have the same layout
def _counts_once(layout: Layout, mesh: Mesh, rank: int) -> bool:
    """Return whether the reduction of an unsharded gradient counts each replica's loss once."""
    reduction = layout.reduction(mesh, ())
    counted: dict[int, float] = defaultdict(float)
    for each in reduction.columns[reduction.column_of(rank)]:
        counted[mesh.replica_of(each)] += reduction.weights[each]
    # `mesh.losses` includes the context axis, so gradients are also averaged over the ranks of a replica
    return all(count == mesh.losses / mesh.replicas for count in counted.values())


class LossParameters:
    """Hides the parameters that a loss function cannot use.

    Args:
        layouts: the layouts of the complete model's parameters and buffers, by name.
        staged: whether the model is divided into pipeline stages.  If so, all parameters are hidden.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout], rank: int, *, staged: bool = False
    ) -> None:
        self._reasons: dict[nn.Parameter, tuple[str, str]] = {}
        self._hidden, self._depth = False, 0
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, parameter in model.named_parameters():
            if staged:
                reason: str | None = "this rank has only the parameters of its own pipeline stages"
            else:
                reason = reason_to_refuse(layouts[name], mesh, rank)
            if reason is not None:
                text = f"the loss function cannot use this parameter, because {reason}; {ADVICE}"
                self._reasons[parameter] = (name, text)
        if not self._reasons:
            return
        for module in (model, *model.children()):
            # a schedule calls the loss function within `hidden`
            self._follow(module, ends_forward=module is model and not staged)

    def _follow(self, module: nn.Module, *, ends_forward: bool) -> None:
        before = []  # for each running call, whether parameters were hidden

        def before_forward(*_: Any) -> None:
            before.append(self._hidden)
            self._depth += 1
            self.show()

        def after_forward(*_: Any) -> None:
            was_hidden = before.pop()
            self._depth -= 1
            trains = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
            if not self._depth and (was_hidden or (ends_forward and trains)):
                self.hide()

        self._handles += [
            module.register_forward_pre_hook(excluded_from_dynamo(before_forward)),
            module.register_forward_hook(excluded_from_dynamo(after_forward), always_call=True),
        ]

    def hide(self) -> None:
        """Hide the parameters: operations on their values raise an error."""
        self._hidden = bool(self._reasons)
        for parameter, (name, reason) in self._reasons.items():
            hide(parameter, name, reason)

    def show(self) -> None:
        """Make all parameters usable again."""
        if self._hidden:
            self._hidden = False
            for parameter, (_, reason) in self._reasons.items():
                show(parameter, reason)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Return a context manager that hides the parameters while a loss is computed."""
        self.hide()
        try:
            yield
        finally:
            self.show()

    def close(self) -> None:
        """Remove the hooks."""
        self.show()
        for handle in self._handles:
            handle.remove()
