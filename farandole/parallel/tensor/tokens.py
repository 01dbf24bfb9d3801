"""Sequence parallelism: between regions, each rank of the tensor axis processes its shard of the tokens.

Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from farandole.models.dropout import ShardedDropout
from farandole.models.sequence import SequenceInfo
from farandole.parallel.axes import AxisCommunicator
from farandole.parallel.collectives import (
    gather_and_reduce,
    own_rows,
    reduce_and_gather,
    slice_of_same,
)
from farandole.parallel.tensor.regions import leading


class Tokens:
    """The tokens of a forward pass, sharded over the ranks of `comm`.

    Tokens (batch, positions) are numbered in row-major order.
    """

    def __init__(self, comm: AxisCommunicator | None) -> None:
        self.comm = comm
        # in the running block; not stored once per pass, because a recomputation may run a block of an earlier pass,
        # and a pipeline stage may have no embedding
        self._shape = (0, 0)

    @contextmanager
    def of_pass(self, args: Iterable[Any]) -> Iterator[None]:
        """Return a context manager that takes the shape of the tokens from the `SequenceInfo` in `args`."""
        before = self._shape
        shapes = [each.shape for each in args if isinstance(each, SequenceInfo)]
        self._shape = next((shape for shape in shapes if shape is not None), before)
        try:
            yield
        finally:
            self._shape = before

    @property
    def count(self) -> int:
        """The total number of tokens on all ranks."""
        return self._shape[0] * self._shape[1]

    def gather(self, shard: Tensor) -> Tensor:
        """Return the hidden states (batch, positions, width) of all tokens.

        In the backward pass, the gradients are summed over ranks.
        """
        return gather_and_reduce(shard, self.count, self.comm).view(*self._shape, -1)

    def reduce(self, hidden: Tensor) -> Tensor:
        """Sum the hidden states (batch, positions, width) over ranks, and return this rank's shard (tokens, width)."""
        return reduce_and_gather(hidden.flatten(0, 1), self.comm)

    def take(self, hidden: Tensor) -> Tensor:
        """Return this rank's shard (tokens, width) of hidden states that are equal on all ranks."""
        return slice_of_same(hidden.flatten(0, 1), self.comm)

    def dropout(self, x: Tensor, probability: float, training: bool = True) -> Tensor:
        """Apply dropout to this rank's shard (tokens, width).

        The rank applies its part of the mask that a single process would draw.
        """
        first = own_rows(self.count, self.comm).start if self.comm is not None else 0
        return ShardedDropout(0, ((first, first + len(x)),), self.count)(x, probability, training)


class ShareTokens:
    """Wraps the embedding: the output contains only this rank's shard of the tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the embedding, and return this rank's shard of the output."""
        return self._tokens.take(call(*args, **kwargs))


class TokenBlock:
    """Wraps a block: during a call, `tokens` uses the shape in the `SequenceInfo` of this call."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the block."""
        with self._tokens.of_pass((*args, *kwargs.values())):
            return call(*args, **kwargs)


class TokenRegion:
    """Wraps a region: gathers the input tokens of all ranks, sums the outputs, and returns this rank's tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the region with the tokens of all ranks."""
        (shard,), rest, kwargs = leading(module, 1, args, kwargs)
        with self._tokens.of_pass((*rest, *kwargs.values())):  # a recomputation may run the region alone
            return self._tokens.reduce(call(self._tokens.gather(shard), *rest, **kwargs))
