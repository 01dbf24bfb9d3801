"""Describe token sequences for transformer blocks: positions, documents and a key-value cache.

Every block is called as `block(hidden, info)`.  `hidden` and the block's weights determine the numbers of positions and
heads, and `info` provides all other information.  Therefore, packed documents, padding, generation with a cache, and
sequence shards need no special model code.

    model = build_gpt(config)
    logits = model(tokens)                                           # positions 0, 1, ...
    logits = model(tokens, SequenceInfo(documents=documents))        # packed documents without attention between them
    total, count = model(tokens, SequenceInfo(), targets)            # the summed loss, without storing all logits
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from farandole.models.router_losses import RouterLosses

T = TypeVar("T")


@dataclass(frozen=True)
class SequenceShard:
    """This process's positions in sequences that are split over several processes.

    Args:
        index: the index of each position in the complete sequences, of shape (positions).
        length: the number of positions in the complete sequences.
        documents, targets: the documents and targets of the complete sequences, both (batch, `length`), or None.
        attend: a function that takes the arguments of `attention.attention`, and also attends to the other processes'
            keys.
        all_reduce: a function that sums a tensor in place over the processes that share the sequences.
    """

    index: Tensor
    length: int
    documents: Tensor | None
    targets: Tensor | None
    attend: Callable[..., Tensor]
    all_reduce: Callable[[Tensor], object]


@dataclass(frozen=True)
class SequenceInfo:
    """Describes the sequences in a batch, for all blocks of a model.

    Args:
        positions: int64 of shape (positions) or (batch, positions).  By default, positions start at 0 in each
            document, or at the cache length.
        documents: integers of shape (batch, positions).  A position attends only to positions with the same document
            number.  Padding is a separate document with a negative number, so its hidden states are finite but
            meaningless.
        cache: the keys and values of earlier positions, to which blocks append new keys and values.
        source: the encoder's sequences, for an encoder-decoder model.
        shard: the positions of this process, if sequences are split over several processes.
        router_losses: the sum of the router losses during training.
        shape: the numbers of sequences and positions that this process embeds, set by `Transformer.prepare`.

    Raises:
        ValueError: if both `documents` and `cache` are given.
    """

    positions: Tensor | None = None
    documents: Tensor | None = None
    cache: KeyValueCache | None = None
    source: SequenceInfo | None = None
    shard: SequenceShard | None = None
    router_losses: RouterLosses | None = None
    shape: tuple[int, int] | None = None
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.cache is not None and self.documents is not None:
            raise ValueError(
                "expected either documents or a cache, got both; a cache stores one document per sequence"
            )

    def shared(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return a value shared by all blocks, such as a mask.  The first call with `key` computes the value."""
        if key not in self._shared:
            self._shared[key] = compute()
        return cast(T, self._shared[key])

    def positions_of(self, count: int, device: torch.device) -> Tensor:
        """Return the int64 positions of `count` tokens per sequence, of shape (positions) or (batch, positions)."""
        if self.positions is not None:
            return self.positions
        if self.documents is not None:
            return self.shared("positions", self._in_documents)
        start = 0 if self.cache is None else self.cache.length
        return self.shared(
            ("positions", start, count), lambda: torch.arange(start, start + count, device=device)
        )

    def _in_documents(self) -> Tensor:
        """Return positions that restart at 0 in each run of equal document numbers."""
        assert self.documents is not None
        index = torch.arange(self.documents.shape[1], device=self.documents.device).expand_as(self.documents)
        is_first = torch.ones_like(self.documents, dtype=torch.bool)
        is_first[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return index - (index * is_first).cummax(1).values

    def spans(self) -> list[tuple[int, int, int]] | None:
        """Return (sequence, start, end) for each run of equal document numbers.

        Return None if a document number has several runs in a sequence.  This method copies `documents` to the host.
        """
        return self.shared("spans", self._spans)

    def _spans(self) -> list[tuple[int, int, int]] | None:
        assert self.documents is not None
        found = []
        for number, row in enumerate(self.documents.tolist()):
            starts = [i for i in range(len(row)) if i == 0 or row[i] != row[i - 1]]
            if len({row[start] for start in starts}) < len(starts):
                return None
            found += [(number, a, b) for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]
        return found


class KeyValueCache:
    """Stores the keys and values of earlier positions for all attention layers.

    The allocated length doubles when the cache is full.  `Transformer.forward` advances `length` after the last block.
    """

    attend: Callable[..., Tensor] | None = None
    """Computes attention over the stored positions, for a cache whose sequences have different lengths.

    The arguments are those of `attention.attention`, with the keys and values that `append` returned.
    """

    def __init__(self) -> None:
        self.length = 0
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def append(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, positions, width), and return the keys and values of all positions."""
        end = self.length + key.shape[2]
        stored = self._stored.get(layer)
        if stored is None or stored[0].shape[2] < end:
            grown = tuple(
                new.new_empty(*new.shape[:2], max(64, 2 * end), new.shape[3]) for new in (key, value)
            )
            if stored is not None:
                for old, new in zip(stored, grown, strict=True):
                    new[:, :, : self.length] = old[:, :, : self.length]
            stored = self._stored[layer] = cast(tuple[Tensor, Tensor], grown)
        for place, new in zip(stored, (key, value), strict=True):
            place[:, :, self.length : end] = new
        return stored[0][:, :, :end], stored[1][:, :, :end]


class Transformer(nn.Sequential):
    """A transformer as a sequence of blocks: an embedding, layers and a head.

    The class derives from `nn.Sequential`, so recomputation, ZeRO and pipelines treat its children as blocks.  A slice
    such as `model[:-1]` is a transformer without a head.
    """

    config: Any = None
    """The configuration from which the model was built."""

    def forward(self, inputs: Any, info: SequenceInfo | None = None, targets: Tensor | None = None) -> Any:
        """Return the last block's output, or the loss if `targets` is given.

        Args:
            inputs: the first block's input, such as int64 tokens (batch, positions).
            targets: int64 of shape (batch, positions).  Negative targets are ignored.

        Returns:
            Logits (batch, positions, vocabulary).  With `targets`, the summed cross-entropy in nats as an fp32 scalar,
            and the number of targets that are not ignored.  In training mode, the sum includes the router losses.
        """
        info = self.prepare(inputs, info or SequenceInfo())
        if targets is not None and self.training:
            complete = info.shard or info
            every = targets if info.shard is None else info.shard.targets
            assert every is not None
            info = replace(info, router_losses=RouterLosses(every, complete.documents))
        hidden = inputs
        body = list(self) if targets is None else list(self)[:-1]
        for block in body:
            hidden = block(hidden, info)
        if targets is not None:
            hidden = self[-1](hidden, info, targets)
            if info.router_losses is not None:
                hidden = info.router_losses.add(hidden[0]), *hidden[1:]
        if info.cache is not None:
            info.cache.length += inputs.shape[1]
        return hidden

    def prepare(self, inputs: Any, info: SequenceInfo) -> SequenceInfo:
        """Return a copy of `info` for one forward pass, with `shape` set and without the values stored by `shared`.

        Subclasses may add information from the inputs, such as padding.
        """
        shape = inputs.shape if isinstance(inputs, Tensor) and inputs.dim() == 2 else None
        return replace(info, _shared={}, shape=None if shape is None else (shape[0], shape[1]))
