"""Split a backward pass into input gradients and weight gradients, through autograd.

    split = SplitBackward(outputs, inputs)
    gradients = split.input_gradients(output_gradients)     # other ranks wait for these
    ...
    split.weight_gradients()                                # accumulates into `.grad`

No layer is rewritten.  The autograd graph is a graph of functions, from the outputs to leaves.  A function is on the *path* if
an input of the stage is reachable from it.  A path function with a parameter behind it that is not on the path, such as the
matrix product of a linear layer, is a *branch*.  The first half of the backward pass computes the gradients of path functions
only, and keeps the gradients that arrive at branches.  The second half starts at the branches and computes the gradients of
parameters only.  Autograd skips outputs that are not needed, so that no product is computed twice.  It starts at once at all
branches with the same parameters, such as the products of several experts whose weights are one parameter.

The first half also computes the gradients of parameters that cannot wait: those of a custom `autograd.Function`, which computes
all its gradients at once, and those of several branches one of which is reachable from another, such as a layer that is called
twice.  If no input requires a gradient, as in the first stage, the second half is the complete backward pass.

The idea is that of `torch.distributed.pipelining` (Qi et al., 2023, "Zero Bubble Pipeline Parallelism", describe the schedule).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node


@dataclass(frozen=True)
class _Branch:
    """Functions, and the parameters behind them, which are behind no other branch."""

    nodes: list[Node]
    parameters: list[nn.Parameter]


class SplitBackward:
    """A backward pass in two halves, over the graph between `inputs` and `outputs`.

    Args:
        outputs: the outputs that require gradients.
        inputs: the leaves for which `input_gradients` computes gradients.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._outputs, self._inputs = list(outputs), list(inputs)
        self._branches: list[_Branch] = []
        self._arrived: dict[Node, dict[int, Tensor]] = {}
        self._whole: tuple[list[Tensor], list[Tensor]] | None = None

    def input_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the inputs, given the gradients of the outputs."""
        outputs, self._outputs = self._outputs, []
        if not self._inputs:
            self._whole = (outputs, list(gradients))
            return []
        graph = _Graph([_node(output) for output in outputs], self._inputs)
        self._branches, at_once = graph.branches()
        handles = []
        for node in (node for branch in self._branches for node in branch.nodes):
            if node in graph.path:
                handles.append(node.register_prehook(self._keep(node)))
                continue
            for output, gradient in zip(outputs, gradients, strict=True):
                if _node(output) is node:
                    arrived = self._arrived.setdefault(node, {})
                    before = arrived.get(output.output_nr)
                    arrived[output.output_nr] = gradient if before is None else before + gradient
        try:
            torch.autograd.backward(
                outputs, list(gradients), inputs=[*self._inputs, *at_once], retain_graph=True
            )
        finally:
            for handle in handles:
                handle.remove()
        found = [each.grad for each in self._inputs]
        for each in self._inputs:
            each.grad = None
        return found

    def weight_gradients(self) -> None:
        """Accumulate the gradients of the parameters, and release the graph."""
        if self._whole is not None:
            outputs, gradients = self._whole
            self._whole = None
            if outputs:
                torch.autograd.backward(outputs, gradients)
            return
        branches, self._branches = self._branches, []
        for branch in branches:
            arrived = {
                GradientEdge(node, number): gradient
                for node in branch.nodes
                for number, gradient in self._arrived.pop(node, {}).items()
            }
            if arrived:
                torch.autograd.backward(list(arrived), list(arrived.values()), inputs=branch.parameters)

    def _keep(self, node: Node) -> Any:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            self._arrived[node] = {n: each for n, each in enumerate(gradients) if each is not None}

        return keep


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

    def branches(self) -> tuple[list[_Branch], list[nn.Parameter]]:
        """Return the branches, and the parameters whose gradients cannot wait."""
        behind: dict[Node, frozenset[Node]] = {}  # the parameters behind functions that are not on the path
        found: dict[Node, frozenset[Node]] = {}
        for node in self._order:
            others = [
                after for after, _ in node.next_functions if after is not None and after not in self.path
            ]
            reached = frozenset().union(*(behind[after] for after in others))
            if node not in self.path:
                behind[node] = reached | {node} if node in self._parameters else reached
            elif reached:
                found[node] = reached
        found |= {node: behind[node] for node in self._roots if behind.get(node)}
        groups = _with_common_leaves(found)
        in_sequence = self._in_sequence(groups)
        branches: list[_Branch] = []
        at_once: list[nn.Parameter] = []
        for number, nodes in enumerate(groups):
            leaves = dict.fromkeys(leaf for node in nodes for leaf in found[node])
            parameters = [self._parameters[leaf] for leaf in leaves]
            if number in in_sequence or any(isinstance(cast(object, n), BackwardCFunction) for n in nodes):
                at_once += parameters
            else:
                branches.append(_Branch(nodes, parameters))
        return branches, at_once

    def _in_sequence(self, groups: Sequence[Sequence[Node]]) -> set[int]:
        """Return the numbers of the groups in which a function is reachable from another one through the path."""
        bits = {node: 1 << number for number, nodes in enumerate(groups) if len(nodes) > 1 for node in nodes}
        reached: dict[Node, int] = {}  # the groups behind each function of the path
        found = 0
        for node in self._order if bits else ():
            if node in self.path:
                reached[node] = 0
                for after, _ in node.next_functions:
                    if after in self.path:
                        reached[node] |= reached[after] | bits.get(after, 0)
                found |= reached[node] & bits.get(node, 0)
        return {number for number in range(found.bit_length()) if found >> number & 1}


def _with_common_leaves(found: Mapping[Node, Collection[Node]]) -> list[list[Node]]:
    """Return the functions in groups, such that functions of different groups have no leaf in common."""
    groups: list[tuple[list[Node], set[Node]]] = []  # functions and their leaves
    group_of: dict[Node, int] = {}
    for node, leaves in found.items():
        first, *others = dict.fromkeys(group_of[leaf] for leaf in leaves if leaf in group_of) or (
            len(groups),
        )
        if first == len(groups):
            groups.append(([], set()))
        nodes, known = groups[first]
        for other in others:
            nodes += groups[other][0]
            known |= groups[other][1]
            group_of |= dict.fromkeys(groups[other][1], first)
            groups[other] = [], set()
        nodes.append(node)
        known |= set(leaves)
        group_of |= dict.fromkeys(leaves, first)
    return [nodes for nodes, _ in groups if nodes]


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
