"""Operations over a whole vocabulary.  Tensor parallelism replaces them with operations over vocabulary shards."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from farandole.models.loss import head_loss


class Vocabulary:
    """Embedding, output projection and loss for an unsharded weight (vocabulary, width)."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the embeddings (..., width) of int64 tokens (...)."""
        return F.embedding(tokens, weight)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits (..., vocabulary) for hidden states (..., width)."""
        return F.linear(hidden, weight, bias)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        before: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, int]:
        """Return the summed cross-entropy and the number of targets; see `head_loss` for the arguments."""
        return head_loss(hidden, targets, weight, bias, before=before)


WHOLE = Vocabulary()
