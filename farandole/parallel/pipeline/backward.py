"""Split a backward pass into input gradients and weight gradients, through autograd.

    split = SplitBackward(outputs, inputs)
    gradients = split.input_gradients(output_gradients)     # other ranks wait for these
    ...
    split.weight_gradients()                                # accumulates into `.grad`

No layer is rewritten.  The autograd graph is a graph of functions, from the outputs to leaves.  A function is on the *path* if
an input of the stage is reachable from it.  A path function with a parameter behind it that is not on the path, such as the
matrix product of a linear layer, is a *branch*.  The first half of the backward pass computes the gradients of path functions
only, and keeps the gradients that arrive at branches.  The second half starts at the branches and computes the gradients of
parameters only.  Autograd skips outputs that are not needed, so that no product is computed twice.

A function that computes all its gradients at once (a custom `autograd.Function` that ignores `ctx.needs_input_grad`) runs twice,
with the same results.  If no input requires a gradient, as in the first stage, the second half is the complete backward pass.

The idea is that of `torch.distributed.pipelining` (Qi et al., 2023, "Zero Bubble Pipeline Parallelism", describe the schedule).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node


@dataclass
class _Group:
    """Branches that share parameters, which must be differentiated together."""

    branches: list[Node] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)


class SplitBackward:
    """A backward pass in two halves, over the graph between `inputs` and `outputs`.

    Args:
        outputs: the outputs that require gradients.
        inputs: the leaves for which `input_gradients` computes gradients.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._outputs, self._inputs = list(outputs), list(inputs)
        self._groups: list[_Group] = []
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}
        self._whole: tuple[list[Tensor], list[Tensor]] | None = None

    def input_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the inputs, given the gradients of the outputs."""
        outputs, self._outputs = self._outputs, []
        if not self._inputs:
            self._whole = (outputs, list(gradients))
            return []
        graph = _Graph([_node(output) for output in outputs], self._inputs)
        self._groups = graph.groups()
        branches = {branch for group in self._groups for branch in group.branches}
        for output, gradient in zip(outputs, gradients, strict=True):
            if (node := _node(output)) in branches and node not in graph.path:
                arrived = list(self._arrived.get(node, [None] * (output.output_nr + 1)))
                arrived += [None] * (output.output_nr + 1 - len(arrived))
                before = arrived[output.output_nr]
                arrived[output.output_nr] = gradient if before is None else before + gradient
                self._arrived[node] = tuple(arrived)
        handles = [branch.register_prehook(self._keep(branch)) for branch in branches & graph.path]
        try:
            return list(
                torch.autograd.grad(
                    outputs, self._inputs, list(gradients), retain_graph=True, allow_unused=True
                )
            )
        finally:
            for handle in handles:
                handle.remove()

    def weight_gradients(self) -> None:
        """Accumulate the gradients of the parameters, and release the graph."""
        if self._whole is not None:
            outputs, gradients = self._whole
            self._whole = None
            if outputs:
                torch.autograd.backward(outputs, gradients)
            return
        groups, self._groups = self._groups, []
        arrived, self._arrived = self._arrived, {}
        for group in groups:
            edges: list[GradientEdge] = []
            values: list[Tensor] = []
            handles = []
            for branch in group.branches:
                for number, gradient in enumerate(arrived.get(branch, ())):
                    if gradient is not None:
                        edges.append(GradientEdge(branch, number))
                        values.append(gradient)
                if len(group.branches) > 1 and branch in arrived:
                    # a branch that is reachable from another branch would receive its gradient twice
                    handles.append(branch.register_prehook(_replacement(arrived[branch])))
            try:
                if edges:
                    torch.autograd.backward(edges, values, inputs=group.parameters)
            finally:
                for handle in handles:
                    handle.remove()

    def _keep(self, branch: Node) -> Any:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            self._arrived[branch] = gradients

        return keep


def _replacement(kept: tuple[Tensor | None, ...]) -> Any:
    return lambda _: kept


def _node(tensor: Tensor) -> Node:
    """Return the function that computed a tensor, or that accumulates the gradient of a leaf."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node


class _Graph:
    """The functions between outputs and leaves."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        leaves = {_node(each) for each in inputs}
        self.path: set[Node] = set()
        self._parameters: dict[Node, nn.Parameter] = {}
        self._roots = list(roots)
        self._order: list[Node] = list(_post_order(roots))  # a function comes after the functions behind it
        for node in self._order:
            if node in leaves or any(behind in self.path for behind, _ in node.next_functions):
                self.path.add(node)
            elif isinstance(variable := getattr(node, "variable", None), Tensor):
                self._parameters[node] = variable  # type: ignore[assignment]

    def groups(self) -> list[_Group]:
        """Return the branches, in groups that share no parameters."""
        behind: dict[Node, frozenset[Node]] = {}  # the parameters behind functions that are not on the path
        for node in self._order:
            if node not in self.path:
                found = {node} if node in self._parameters else set()
                behind[node] = frozenset(
                    found.union(*(behind[n] for n, _ in node.next_functions if n is not None))
                )
        branches: dict[Node, frozenset[Node]] = {}
        for node in self._order:
            if node in self.path:
                own = [behind[n] for n, _ in node.next_functions if n is not None and n not in self.path]
                if any(own):
                    branches[node] = frozenset().union(*own)
        for node in self._roots:
            if node not in self.path and behind[node]:
                branches[node] = behind[node]
        groups: list[tuple[set[Node], _Group]] = []
        for branch, leaves in branches.items():
            joined = [each for each in groups if each[0] & leaves]
            groups = [each for each in groups if not each[0] & leaves]
            members = [member for _, group in joined for member in group.branches]
            groups.append((set(leaves).union(*(each[0] for each in joined)), _Group([*members, branch])))
        for nodes, group in groups:
            group.parameters = [self._parameters[node] for node in nodes]
        return [group for _, group in groups]


def _post_order(roots: Sequence[Node]) -> Iterator[Node]:
    seen: set[Node] = set()
    for root in roots:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(behind, False) for behind, _ in node.next_functions if behind is not None]
