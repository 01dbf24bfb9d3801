"""Split a backward pass into input gradients and weight gradients, using autograd.

    saved = SavedTensors()
    with saved.hooks():
        outputs = stage(*inputs)
    split = SplitBackward(outputs, inputs, saved)
    gradients = split.input_gradients(output_gradients)     # other ranks wait for these
    ...
    split.weight_gradients()                                # accumulates into `.grad`

The autograd graph is a graph of functions, from the outputs to leaves.  A function is on the *path* if an input of
the stage is reachable from the function.  A function on the path, such as the matrix product of a linear
layer, is a *branch* if it also leads to a parameter outside of the path.  The first half of the backward pass computes
gradients along the path only, and keeps the gradients that arrive at branches.  The second half starts at the branches
and computes only the gradients of parameters.  Autograd skips gradients that are not needed, so no product is
computed twice.  Branches with a common parameter, such as the products of several experts whose weights are one
parameter, start together.

The first half also computes the gradients of three kinds of parameters:

- the parameters of a custom `autograd.Function`, because such a function computes all its gradients at once,
- the common parameters of several branches if one of these branches is reachable from another, such as the parameters
  of a layer that is called twice,
- vectors, such as the weights of a normalization: their gradients take little time, but computing them later would keep
  two hidden states in memory.

If no input requires a gradient, as in the first stage, the second half is the complete backward pass.

Between the halves, a linear layer keeps its input and the gradient of its output.  The first half releases the tensors
that only path functions have saved, such as the inputs of activation functions and of attention.  Therefore a
transformer needs little more memory than before the first half.

`torch.distributed.pipelining` splits backward passes in the same way; Qi et al. (2023, "Zero Bubble Pipeline
Parallelism") describe schedules that need the split.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks


class _Saved:
    """A tensor that autograd has saved for a function; `tensor` is None once the memory is released."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # an output would keep its own graph alive
        self.version = tensor._version


class SavedTensors:
    """The tensors that autograd saves in one forward pass under `hooks`.

    The first half of the backward pass releases some of these tensors.
    """

    def __init__(self) -> None:
        self._is_releasing = False
        self._in_branch: set[int] = set()  # threads, because autograd has one for each device
        self._used: dict[int, list[_Saved]] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context manager in which the forward pass must run."""
        return saved_tensors_hooks(_Saved, self._unpack)

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            raise RuntimeError(
                "the backward pass of this pipeline stage has already run; run its forward pass again before another backward pass"
            )
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "a tensor needed by the backward pass was modified in place after it was saved; use an out-of-place operation"
            )
        thread = threading.get_ident()
        if (
            self._is_releasing
            and thread not in self._in_branch
            and not _is_recomputing(sys._getframe().f_back)
        ):
            self._used.setdefault(thread, []).append(saved)
        return saved.tensor

    @contextmanager
    def releasing(self) -> Iterator[None]:
        """Return a context manager that releases the saved tensors of functions that are not branches.

        The first half of the backward pass must run in this context.
        """
        self._is_releasing = True
        try:
            yield
        finally:
            self._is_releasing = False
            for thread in list(self._used):
                self._release(thread)

    def enter_branch(self) -> None:
        """Record that a branch starts in this thread, and release the tensors that earlier functions used."""
        thread = threading.get_ident()
        self._release(thread)
        self._in_branch.add(thread)

    def leave_branch(self, *_: Any) -> None:
        """Record that the branch in this thread has ended."""
        self._in_branch.discard(threading.get_ident())

    def _release(self, thread: int) -> None:
        for saved in self._used.pop(thread, ()):
            saved.tensor = None


def _is_recomputing(caller: FrameType | None) -> bool:
    """Return whether the calling function is part of `torch.utils.checkpoint`."""
    # both halves may recompute a checkpointed function, so its saved inputs must not be released
    return caller is not None and caller.f_globals is vars(torch.utils.checkpoint)


@dataclass(frozen=True)
class _Branch:
    """A group of branch functions, and the parameters that are reachable only from this group."""

    nodes: list[Node]
    parameters: list[nn.Parameter]


class SplitBackward:
    """A backward pass in two halves, through the graph between `inputs` and `outputs`.

    Args:
        outputs: the outputs that require gradients.
        inputs: the leaves for which `input_gradients` computes gradients.
        saved: the tensors that the forward pass has saved; by default, the first half releases no saved tensors.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], saved: SavedTensors | None = None
    ) -> None:
        self._outputs, self._inputs = list(outputs), list(inputs)
        self._saved = saved or SavedTensors()
        self._branches: list[_Branch] = []
        self._arrived: dict[Node, dict[int, Tensor]] = {}
        self._whole: tuple[list[Tensor], list[Tensor]] | None = None

    def input_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the first half of the backward pass, and return the gradients of the inputs.

        The outputs are released.  Without inputs, nothing is computed, and `weight_gradients` runs the complete
        backward pass.

        Args:
            gradients: the gradients of the outputs.
        """
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
                handles.append(node.register_hook(self._saved.leave_branch))
                continue
            for output, gradient in zip(outputs, gradients, strict=True):
                if _node(output) is node:
                    arrived = self._arrived.setdefault(node, {})
                    before = arrived.get(output.output_nr)
                    arrived[output.output_nr] = gradient if before is None else before + gradient
        try:
            with self._saved.releasing():
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
        """Accumulate the gradients of the remaining parameters, and release the graph."""
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
            self._saved.enter_branch()
            self._arrived[node] = {n: each for n, each in enumerate(gradients) if each is not None}

        return keep


def alias(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor` that may be modified in place even if `tensor` is a leaf.

    The alias shares memory with `tensor`, and passes its gradient on to `tensor`.
    """
    aliased: Tensor = _Alias.apply(tensor) if tensor.requires_grad else tensor
    return aliased


class _Alias(torch.autograd.Function):
    """The identity function.  The output is not a view, because views of leaves cannot be modified in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def _node(tensor: Tensor) -> Node:
    """Return the autograd function that computed `tensor`; for a leaf, its gradient accumulator."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node


class _Graph:
    """The functions between outputs and leaves."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        leaves = {_node(each) for each in inputs}
        self.path: set[Node] = set()
        self._parameters: dict[Node, nn.Parameter] = {}
        self._roots = list(roots)
        self._order: list[Node] = list(_post_order(roots))  # a function comes after its next functions
        for node in self._order:
            if node in leaves or any(behind in self.path for behind, _ in node.next_functions):
                self.path.add(node)
            elif isinstance(variable := getattr(node, "variable", None), Tensor):
                self._parameters[node] = variable  # type: ignore[assignment]

    def branches(self) -> tuple[list[_Branch], list[nn.Parameter]]:
        """Return the branches, and the parameters whose gradients the first half must compute."""
        behind: dict[Node, frozenset[Node]] = {}  # the parameters that functions outside the path lead to
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
            is_custom = any(isinstance(cast(object, node), BackwardCFunction) for node in nodes)
            has_vectors = all(self._has_vectors(node, found[node]) for node in nodes)
            if number in in_sequence or is_custom or has_vectors:
                at_once += parameters
            else:
                branches.append(_Branch(nodes, parameters))
        return branches, at_once

    def _has_vectors(self, node: Node, leaves: Collection[Node]) -> bool:
        """Return whether all `leaves` are direct arguments of `node` and have at most one dimension."""
        direct = {behind for behind, _ in node.next_functions}
        return all(leaf in direct and self._parameters[leaf].dim() < 2 for leaf in leaves)

    def _in_sequence(self, groups: Sequence[Sequence[Node]]) -> set[int]:
        """Return the indices of the groups in which one function is reachable from another along the path."""
        bits = {node: 1 << number for number, nodes in enumerate(groups) if len(nodes) > 1 for node in nodes}
        reached: dict[Node, int] = {}  # the groups that each function on the path leads to
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
    """Group functions so that functions with a common leaf are in the same group."""
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
