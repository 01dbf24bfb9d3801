"""Embeddings and output projections whose vocabulary is sharded over the ranks of the tensor axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from farandole.layout import chunk
from farandole.models.loss import VocabularyShard, head_loss
from farandole.models.vocabulary import Vocabulary
from farandole.parallel.axes import AxisCommunicator, Position
from farandole.parallel.collectives import (
    copy_to_all,
    gather_same,
    sum_of_all,
)
from farandole.parallel.tensor.regions import AXIS, leading
from farandole.parallel.tensor.tokens import Tokens


class ParallelVocabulary(Vocabulary):
    """The operations on a vocabulary of `count` tokens that is sharded over ranks.

    This rank stores the tokens in the slice `own`.
    """

    gathered = True
    """Whether `logits` returns the logits of all tokens, instead of those of this rank's tokens (`sharded_logits`)."""

    def __init__(
        self,
        comm: AxisCommunicator | None,
        count: int,
        position: Position,
        tokens: Tokens | None = None,
    ) -> None:
        self.comm, self.count, self.tokens = comm, count, tokens
        ranks = position.size(AXIS)
        self.own = slice(*chunk(count, ranks, position.coordinate(AXIS)))
        self._shard = VocabularyShard(self.own.start, count, -(-count // ranks), self._all_statistics)

    def local_index(self, token: int | None) -> int | None:
        """Return the index of `token` in this rank's shard, or None if the token is in another shard."""
        if token is None or not self.own.start <= token < self.own.stop:
            return None
        return token - self.own.start

    def _all_statistics(self, own: Tensor) -> Tensor:
        if self.comm is None:
            return own[None]
        every = own.new_empty((self.comm.size, *own.shape))
        self.comm.all_gather(every, own.contiguous())
        return every

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the embeddings of `tokens`; with sequence parallelism, only of this rank's shard of the tokens."""
        hidden = self.embed_with(lambda places: nn.functional.embedding(places, weight), tokens, len(weight))
        return hidden if self.tokens is None else self.tokens.take(hidden)

    def embed_with(self, embed: Callable[[Tensor], Tensor], tokens: Tensor, count: int) -> Tensor:
        """Return the embeddings of `tokens`, summed over the vocabulary shards of all ranks.

        Args:
            embed: a function that returns the embeddings for local indices in this rank's shard.
            count: the number of entries in this rank's shard.
        """
        self._shard.check(tokens)
        places, outside = self._shard.local(tokens, count)
        return sum_of_all(embed(places).masked_fill(outside[..., None], 0), self.comm)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of the whole vocabulary or, within `sharded_logits`, of this rank's part."""
        own = nn.functional.linear(self._enter(hidden), weight, bias)
        if not self.gathered or self.comm is None:
            return own
        return gather_same(own.movedim(-1, 0), self.count, self.comm).movedim(0, -1)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        before: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, int]:
        """Return the summed cross-entropy and the number of targets.

        Args:
            before: a function that is applied to the hidden states before the projection.
        """

        def enter(x: Tensor) -> Tensor:
            return self._enter(x if before is None else before(x))

        if self.tokens is not None:
            return head_loss(enter(hidden), targets, weight, bias, shard=self._shard)
        return head_loss(hidden, targets, weight, bias, before=enter, shard=self._shard)

    def _enter(self, hidden: Tensor) -> Tensor:
        return copy_to_all(hidden, self.comm) if self.tokens is None else self.tokens.gather(hidden)


class ParallelEmbedding:
    """Wraps an embedding whose weight is this rank's shard of the vocabulary."""

    def __init__(self, vocabulary: ParallelVocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the embeddings of tokens, summed over the shards of all ranks."""
        assert isinstance(module, nn.Embedding)
        (tokens,), _, _ = leading(module, 1, args, kwargs)
        return self._vocabulary.embed_with(call, tokens, module.num_embeddings)


@contextmanager
def sharded_logits(model: nn.Module) -> Iterator[slice]:
    """Return a context manager within which `model` returns only the logits of this rank's part of the vocabulary.

        with sharded_logits(model) as own:
            logits = engine(tokens)  # equal to complete_logits[..., own]

    The backward pass expects, on each rank, the gradient of the total loss with respect to the rank's logits.

    Yields:
        The slice of the vocabulary that belongs to this rank; without tensor parallelism, the whole vocabulary.
    """
    found = [module.__dict__.get("vocabulary") for module in model.modules()]
    shards = [vocabulary for vocabulary in found if isinstance(vocabulary, ParallelVocabulary)]
    for vocabulary in shards:
        vocabulary.gathered = False
    try:
        yield shards[-1].own if shards else slice(None)
    finally:
        for vocabulary in shards:
            vocabulary.gathered = True
