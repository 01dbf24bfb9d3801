"""Run a model on tokens of many sequences at once, and return the logits of selected tokens.

The tokens of all sequences form one row, each token with its own position.  All layers except attention compute
each token independently; attention reads the sequence's blocks in the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from farandole import native
from farandole.models.layers import Head
from farandole.models.moe import StackedLinear
from farandole.models.rotary import Rotary
from farandole.models.sequence import KeyValueCache, SequenceInfo, Transformer
from farandole.native import WeightType
from farandole.serve.decoder import FusedDecoder
from farandole.serve.lora import Adapter
from farandole.serve.request import RequestError
from farandole.serve.rows import (
    MAX_BF16_ROWS,
    IndependentRows,
    Updates,
    ragged_attention,
    weight_key,
    write_positions,
)
from farandole.serve.store import LayerShape, Memory

WEIGHTS = ("int8",)
"""The types that weights can be converted to."""


def check_weights(weights: str) -> None:
    """Raise RequestError if `weights` is not a supported weight type."""
    if weights not in WEIGHTS:
        raise RequestError("weights", f"expected one of {', '.join(WEIGHTS)}, got {weights!r}")


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence, to compute in one step.

    Args:
        tokens: the tokens.
        start: the position of the first token.
        blocks: the indices of the sequence's blocks.
        logits: the number of tokens at the end of the span whose logits are required.
        adapter: the name of the LoRA adapter, or None for the base model.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int
    adapter: str | None = None


class _StepCache(KeyValueCache):
    """Writes the keys and values of a step to the memory, and computes attention from the memory."""

    def __init__(
        self,
        memory: Memory,
        layers: dict[nn.Module, int],
        positions: Tensor,
        table: Tensor,
        use_core: bool | None,
    ) -> None:
        super().__init__()
        self._memory, self._layers, self._use_core = memory, layers, use_core
        self._positions, self._table = positions, table
        self._layer = 0

    def append(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store `key` and `value` (1, heads, tokens, width) for `layer`, and return both unchanged."""
        self._layer = self._layers[layer]
        keys, values = self._memory.keys[self._layer], self._memory.values[self._layer]
        write_positions(
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            keys,
            values,
            self._table,
            self._positions,
            self._use_core,
        )
        return key, value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Return the attention output (1, heads, tokens, value width) for the layer of the last `append`."""
        scale = query.shape[3] ** -0.5 if scale is None else scale
        keys, values = self._memory.keys[self._layer], self._memory.values[self._layer]
        mixed = ragged_attention(
            query[0].transpose(0, 1),
            keys,
            values,
            self._table,
            self._positions,
            scale,
            window,
            self._use_core,
        )
        return mixed.transpose(0, 1)[None]


class _Probe(KeyValueCache):
    """Records the shapes of all layers' keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[nn.Module, LayerShape] = {}

    def append(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Record the shapes."""
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return key, value


class Runner:
    """Computes the logits of a model.

    Args:
        model: a decoder on the CPU, whose weights no longer change.
        use_core: whether to use the C core; None uses the core if available.
        adapters: the LoRA adapters, keyed by name.
        weights: "int8" to compute products with int8 weights and a scale per output, or "" to use the weights of
            `model`.
        owned: whether the runner may free weights of `model` after converting them to another format.
        largest: for "int8" and a sharded model, the result of `ModelShards.largest_weights`.

    Raises:
        RequestError: if the model's results would depend on the other sequences in a batch, or its weights cannot be
            quantized.
    """

    ranks = 1
    """The number of ranks that compute one model, and whose KV caches may share the memory of this host."""
    heartbeat_s: float | None = None
    """The seconds after which an idle engine calls `beat`; None for never."""

    def __init__(
        self,
        model: Transformer,
        use_core: bool | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        weights: str = "",
        owned: bool = False,
        largest: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, Rotary) and value.depends_on_length:
                    raise RequestError(
                        "model",
                        f"rotary positions with scaling={value.scaling!r} depend on the length of all sequences in a "
                        "batch, which is not supported; use farandole generate --prompt",
                    )
        self.model = model.eval()
        self.vocabulary = _vocabulary(model)
        self._use_core = use_core
        self._rows = IndependentRows(use_core)
        uses_core = native.available() if use_core is None else use_core
        is_fp32 = next(model.parameters()).dtype == torch.float32
        self._max_fused_rows = None if is_fp32 or weights else MAX_BF16_ROWS
        if weights:
            self._check_weights(weights)
            self._convert(WeightType.INT8, largest, release=owned)
        elif owned and uses_core and self._max_fused_rows is None:
            self._convert(WeightType.F32 if is_fp32 else WeightType.BF16, {}, release=True)
        self.adapters = {name: _updates(model, adapter) for name, adapter in (adapters or {}).items()}
        with torch.inference_mode(), self._rows:
            probe = _Probe()
            self.model(torch.zeros(1, 1, dtype=torch.int64), SequenceInfo(cache=probe))
        self.shapes = list(probe.shapes.values())
        self.bytes_per_position = sum(shape.nbytes for shape in self.shapes)
        self._layers = {layer: number for number, layer in enumerate(probe.shapes)}
        fuses = uses_core and not self.adapters
        self._fused = FusedDecoder.of(model, self._rows) if fuses else None

    def _check_weights(self, weights: str) -> None:
        """Raise RequestError if `weights` is not a supported weight type, or if the C core is unavailable."""
        check_weights(weights)
        if not native.available() or self._use_core is False:
            raise RequestError("weights", f"{weights} requires the C core: {native.why_unavailable()}")

    def _convert(self, kind: WeightType, largest: Mapping[str, Tensor], *, release: bool) -> None:
        """Pack the matrices."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        modules = list(self.model.modules())
        embeddings = {id(each.weight) for each in modules if isinstance(each, nn.Embedding)}
        for module in modules:
            if isinstance(module, nn.Linear | Head | StackedLinear):
                number = id(module.weight)
                own = largest.get(names[number])
                self._rows.convert(
                    module.weight, kind, release=release and number not in embeddings, largest=own
                )

    def memory(self) -> Memory:
        """Return a new KV cache for the model."""
        return Memory(self.shapes)

    def run(self, memory: Memory, spans: Sequence[Span]) -> Tensor:
        """Run the model on `spans`, and store the keys and values in `memory`.  Call this method in inference mode.

        Returns:
            fp32 logits (selected tokens, vocabulary); see `Span.logits`.
        """
        tokens, positions, table = _place(spans)
        selected: list[int] = []
        end = 0
        for span in spans:
            end += len(span.tokens)
            selected += range(end - span.logits, end)
        if self._fused is not None and len(tokens) <= (self._max_fused_rows or len(tokens)):
            logits = self._fused.run(memory, tokens, positions, table, selected)
        else:
            logits = self._run_modules(memory, spans, tokens, positions, table, selected)
        return self._gathered(logits) if selected else torch.empty(0, self.vocabulary)

    def _run_modules(
        self,
        memory: Memory,
        spans: Sequence[Span],
        tokens: Tensor,
        positions: Tensor,
        table: Tensor,
        selected: Sequence[int],
    ) -> Tensor:
        """Call the modules of the model one by one; see `FusedDecoder.run` for the arguments."""
        with self._rows:
            cache = _StepCache(memory, self._layers, positions, table, self._use_core)
            info = SequenceInfo(positions=positions[None], cache=cache)
            self._rows.groups = self._groups(spans, [len(span.tokens) for span in spans])
            hidden: Any = tokens[None]
            for block in list(self.model)[:-1]:
                hidden = block(hidden, info)
            if not selected:
                return torch.empty(0, self.vocabulary)
            self._rows.groups = self._groups(spans, [span.logits for span in spans])
            logits: Tensor = self.model[-1](hidden[:, selected], info)
            return logits[0].float()

    def _groups(self, spans: Sequence[Span], counts: Sequence[int]) -> list[tuple[Updates, Tensor]]:
        """Return the LoRA updates and row indices of each adapter, given the number of rows of each span."""
        rows: dict[str, list[int]] = {}
        end = 0
        for span, count in zip(spans, counts, strict=True):
            start, end = end, end + count
            if span.adapter is not None and count:
                rows.setdefault(span.adapter, []).extend(range(start, end))
        return [(self.adapters[name], torch.tensor(numbers)) for name, numbers in rows.items()]

    def beat(self) -> None:
        """Check that the other ranks of this model are alive."""

    def close(self) -> None:
        """Stop the other ranks of this model."""

    def _gathered(self, logits: Tensor) -> Tensor:
        """Return complete logits (tokens, vocabulary), given the logits of this rank's shard."""
        return logits


def _place(spans: Sequence[Span]) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each token in `spans`, the token, its position and its sequence's blocks, zero-padded."""
    most = max(len(span.blocks) for span in spans)
    tokens, positions, table = array("q"), array("q"), array("i")
    for span in spans:
        tokens.extend(span.tokens)
        positions.extend(range(span.start, span.start + len(span.tokens)))
        row = array("i", span.blocks)
        row.extend([0] * (most - len(row)))
        table += row * len(span.tokens)
    blocks = torch.frombuffer(table, dtype=torch.int32).view(len(tokens), most)
    return torch.frombuffer(tokens, dtype=torch.int64), torch.frombuffer(positions, dtype=torch.int64), blocks


def _updates(model: nn.Module, adapter: Adapter) -> Updates:
    """Return a dict that maps the `weight_key` of each updated weight to its matrices A and B."""
    return {
        weight_key(model.get_parameter(f"{path}.weight")): (a.contiguous(), b.contiguous())
        for path, (a, b) in adapter.items()
    }


def _vocabulary(model: Transformer) -> int:
    weight = model[-1].weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]
