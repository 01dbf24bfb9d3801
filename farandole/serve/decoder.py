"""Compute a step of a decoder in one call to the C core.

The call computes all layers and the logits in one parallel region, which avoids the overhead between operations.
It supports decoders with RMS normalization, rotary embeddings and a gated feed-forward network: Llama, Mistral, Qwen 2
and Qwen 3.  For other models, and for models that are sharded over ranks, `FusedDecoder.of` returns None.

Hidden states and activations are fp32, even if the weights are bf16.  As in `rows.py`, no row of a result depends on
the other rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole import native
from farandole.models.layers import (
    ACTIVATIONS,
    GatedFeedForward,
    Head,
    RMSNorm,
    SelfAttention,
    TransformerBlock,
)
from farandole.models.rotary import Rotary
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.models.vocabulary import WHOLE
from farandole.serve.rows import IndependentRows, check_status
from farandole.serve.store import Memory
from farandole.serve.threads import thread_count

POSITIONS = 512
"""The smallest number of positions for which sines and cosines are computed."""


class _Matrix(ctypes.Structure):
    """`struct frd_matrix`."""

    _fields_ = [("packed", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("type", c_int)]


class _Layer(ctypes.Structure):
    """`struct frd_layer`."""

    _fields_ = [
        *((name, c_void_p) for name in ("norm_attention", "norm_feed_forward", "norm_query", "norm_key")),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    ]


class _Decoder(ctypes.Structure):
    """`struct frd_decoder`."""

    _fields_ = [
        ("layers", POINTER(_Layer)),
        *((name, c_size_t) for name in ("layer_count", "width", "heads", "kv_heads", "head_width", "inner")),
        ("vocabulary", c_size_t),
        ("norm", c_void_p),
        ("head", _Matrix),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("epsilon", c_float),
        ("scale", c_float),
        ("is_bf16", c_int),
    ]


class _Step(ctypes.Structure):
    """`struct frd_step`."""

    _fields_ = [
        *((name, c_void_p) for name in ("hidden", "positions", "table", "selected", "logits", "workspace")),
        *((name, c_size_t) for name in ("rows", "selected_count", "table_width", "block_length")),
    ]


class FusedDecoder:
    """Computes the steps of a model whose weights no longer change.  Use `of` to create a decoder.

    Args:
        model: a model for which `_is_supported` returns True.
        rows: the packed weights.
    """

    def __init__(self, model: Transformer, rows: IndependentRows) -> None:
        blocks: list[Any] = list(model)
        self._embedding, self._head = blocks[0], blocks[-1]
        self._rows = rows
        self._tensors: list[Tensor] = []  # kept alive, because the structures contain their addresses
        self._layers = (_Layer * (len(blocks) - 2))(*map(self._layer, blocks[1:-1]))
        attention, feed_forward = blocks[1].attention, blocks[1].feed_forward
        self._rotary: Rotary = attention.rotary
        outputs, width = attention.qkv.weight.shape
        kv_heads = outputs // attention.head_width // (attention.group + 2)
        self._decoder = _Decoder(
            layers=self._layers,
            layer_count=len(self._layers),
            width=width,
            heads=attention.group * kv_heads,
            kv_heads=kv_heads,
            head_width=attention.head_width,
            inner=feed_forward.down.weight.shape[1],
            vocabulary=len(self._head.weight),
            norm=self._float(self._head.norm.weight),
            head=self._matrix(self._head.weight, self._head.bias),
            epsilon=self._head.norm.epsilon,
            scale=attention.head_width**-0.5 if attention.scale is None else attention.scale,
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._positions = 0  # the number of positions with sines and cosines
        self._keys: list[Tensor] | None = None  # the keys whose addresses `_layers` contains

    @classmethod
    def of(cls, model: Transformer, rows: IndependentRows) -> FusedDecoder | None:
        """Return a decoder, or None if the C core does not support the model."""
        return cls(model, rows) if _is_supported(model) else None

    def run(
        self, memory: Memory, tokens: Tensor, positions: Tensor, table: Tensor, selected: Sequence[int]
    ) -> Tensor:
        """Store the keys and values of `tokens`, and return fp32 logits of shape (selected tokens, vocabulary).

        Args:
            memory: the KV cache.
            tokens, positions: int64 of shape (tokens).
            table: int32 of shape (tokens, blocks), the KV cache blocks of each token's sequence.
            selected: the indices of the tokens whose logits are required.
        """
        core = native.library()
        self._use(memory)
        self._extend_rotary(int(positions.max()) + 1)
        hidden = self._embedding(tokens[None], SequenceInfo(positions=positions[None])).float().contiguous()
        size: int = core.frd_decoder_bytes(byref(self._decoder), len(tokens))
        if size > len(self._workspace):
            self._workspace = torch.empty(size, dtype=torch.uint8)
        logits = torch.empty(len(selected), self._decoder.vocabulary)
        chosen = torch.tensor(selected, dtype=torch.int64)
        step = _Step(
            *(each.data_ptr() for each in (hidden, positions, table, chosen, logits, self._workspace)),
            len(tokens),
            len(selected),
            table.shape[1],
            memory.values[0].shape[2],
        )
        check_status(core.frd_decoder_step(byref(self._decoder), byref(step), thread_count()))
        return logits

    def _use(self, memory: Memory) -> None:
        """Set the pointers of the layers to the keys and values in `memory`."""
        # when the size of `memory` changes, its tensors are replaced
        if self._keys is memory.keys:
            return
        self._keys = memory.keys
        self._decoder.is_bf16 = memory.keys[0].dtype == torch.bfloat16
        for layer, keys, values in zip(self._layers, memory.keys, memory.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def _extend_rotary(self, positions: int) -> None:
        """Compute sines and cosines for at least `positions` positions."""
        if positions <= self._positions:
            return
        self._positions = max(POSITIONS, 2 * positions)
        with self._rows:
            tables = self._rotary.table(torch.arange(self._positions)[None], torch.float32)
        self._cosine, self._sine = (table.contiguous() for table in tables)
        self._decoder.cosine, self._decoder.sine = self._cosine.data_ptr(), self._sine.data_ptr()

    def _layer(self, block: Any) -> _Layer:
        attention, feed_forward = block.attention, block.feed_forward
        norms = (block.norm_attention, block.norm_feed_forward, attention.norm_query, attention.norm_key)
        linears = (attention.qkv, attention.out, feed_forward.gate_up, feed_forward.down)
        return _Layer(
            *(None if norm is None else self._float(norm.weight) for norm in norms),
            *(self._matrix(linear.weight, linear.bias) for linear in linears),
            window=attention.window or 0,
        )

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> _Matrix:
        packed = self._rows.packed(weight)
        self._tensors += [packed.values] if packed.scales is None else [packed.values, packed.scales]
        return _Matrix(
            packed.values.data_ptr(),
            None if packed.scales is None else packed.scales.data_ptr(),
            None if bias is None else self._float(bias),
            packed.type,
        )

    def _float(self, values: Tensor) -> int:
        """Convert `values` to a contiguous fp32 tensor, keep this tensor alive, and return its address."""
        self._tensors.append(values.detach().float().contiguous())
        return self._tensors[-1].data_ptr()


def _is_supported(model: Transformer) -> bool:
    """Return whether the C core supports `model`."""
    blocks: list[Any] = list(model)
    layers, head = blocks[1:-1], blocks[-1]
    if not layers or not _is_plain(head, Head) or head.vocabulary is not WHOLE or not _is_norm(head.norm):
        return False
    if not all(_is_plain(each, TransformerBlock) for each in layers):
        return False
    traits = {_traits(each, head.norm.epsilon) for each in layers}
    return len(traits) == 1 and None not in traits


def _traits(block: Any, epsilon: float) -> tuple[object, ...] | None:
    """Return the properties that must be equal in all layers, or None if `block` is not supported."""
    attention, feed_forward = block.attention, block.feed_forward
    if not _is_plain(attention, SelfAttention) or not _is_plain(feed_forward, GatedFeedForward):
        return None
    rotary = attention.rotary
    if rotary is None or rotary.interleaved or rotary.width != attention.head_width or not attention.causal:
        return None
    if ACTIVATIONS[feed_forward.activation] is not F.silu:
        return None
    norms = [block.norm_attention, block.norm_feed_forward]
    if attention.norm_query is not None or attention.norm_key is not None:
        norms += [attention.norm_query, attention.norm_key]
    if not all(_is_norm(norm) and norm.epsilon == epsilon for norm in norms):
        return None
    linears = (attention.qkv, attention.out, feed_forward.gate_up, feed_forward.down)
    if not all(_is_plain(linear, nn.Linear) for linear in linears):
        return None
    shapes = tuple(linear.weight.shape for linear in linears)
    return shapes, attention.head_width, attention.group, attention.scale, rotary


def _is_norm(module: Any) -> bool:
    return _is_plain(module, RMSNorm)


def _is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Return whether `type(module)` is `kind`, its `forward` is not replaced, and it has no forward hooks."""
    # tensor parallelism, for example, replaces `forward`
    return type(module) is kind and not (
        "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    )
