"""Compute the rows of a batch so that each result is bitwise independent of the other rows.

A library selects a matrix-product algorithm based on the number of rows, and algorithms sum in different orders.
Vectorized functions such as `exp` compute the last elements of a tensor with a different approximation.  Without
`IndependentRows`, the logits of a request would therefore depend on the other requests in its batch.  Within
`IndependentRows`, for fp32,

- `F.linear` sums in an order that depends on the weight only, and adds the updates of the rows' LoRA adapters;
- activations and trigonometric functions run on whole SIMD vectors.

Normalization, softmax and additions are already independent.  `ragged_attention` computes each query separately.

The C core computes products, attention, normalization, gated activations and rotary embeddings.  Without the C core,
torch computes products of 16 rows at a time, and attention for one query at a time, which is slow.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farandole import native
from farandole.models.layers import gated, rms_norm
from farandole.models.rotary import rotate
from farandole.native import WeightType
from farandole.parallel.processor import read_processor
from farandole.serve import elements
from farandole.serve.store import TILE
from farandole.serve.threads import thread_count, torch_threads

BLOCK = 16
"""The number of rows in each product that torch computes."""
VECTOR = 64
"""A multiple of the number of elements that a vectorized function computes per iteration."""
PIECE = 1 << 14
"""The maximum number of elements for which torch computes a function in one thread."""
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # "bf16" is the flag on Arm
MAX_BF16_ROWS: int | None = 32 if read_processor().flags & _BF16_FLAGS else None
"""The largest number of rows for which the core computes bf16 products faster than torch.

The value is None, for no limit, if the processor lacks the bf16 instructions that torch would use.
"""

WeightKey = tuple[int, torch.Size]
"""The address and the shape of a weight."""
Updates = Mapping[WeightKey, tuple[Tensor, Tensor]]
"""Low-rank updates of weights: A (rank, inputs) and B (outputs, rank)."""

_FUSED: dict[Any, Callable[..., Tensor | None]] = {
    rms_norm: elements.rms_norm,
    gated: elements.gated,
    rotate: elements.rotate,
}
"""The functions of the model that one call to the core replaces."""
_ELEMENTWISE = (F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid, Tensor.cos, Tensor.sin)


def weight_key(weight: Tensor) -> WeightKey:
    """Return the address and the shape of a weight, as a dictionary key."""
    return weight.data_ptr(), weight.shape


@dataclass(frozen=True)
class Packed:
    """A weight in the core's format.

    Args:
        version: the counter `_version` of the weight when it was packed.
        scales: fp32 of shape (outputs), the scale of each output's int8 values; None for other types.
    """

    version: int
    type: WeightType
    values: Tensor
    scales: Tensor | None = None


class IndependentRows(TorchFunctionMode):
    """A context manager that makes each row of a model's fp32 results on the CPU independent of the other rows.

    The context manager keeps a packed copy of each weight.  In bf16, torch computes products with more than
    `MAX_BF16_ROWS` rows, because torch is then faster.

    Args:
        use_core: whether to use the C core; None uses the core if available.
    """

    def __init__(self, use_core: bool | None = None) -> None:
        super().__init__()
        self._use_core = native.available() if use_core is None else use_core
        self._packed: dict[WeightKey, Packed] = {}
        self.groups: Sequence[tuple[Updates, Tensor]] = ()
        """The updates, each with the indices of the rows to which it applies."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, or a replacement if the results of `func` depend on the number of rows."""
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func in _FUSED:
            result = _FUSED[func](*args) if self._use_core else None
            if result is not None:
                return result
            with self:
                return inspect.unwrap(func)(*args)
        if func in _ELEMENTWISE and args[0].dtype == torch.float32:
            return _elementwise(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x weight^T + bias, of shape (..., outputs), for `x` of shape (..., inputs)."""
        rows = x.reshape(-1, x.shape[-1])
        result = self._product(rows, weight, bias)
        for updates, numbers in self.groups:
            if (update := updates.get(weight_key(weight))) is not None:
                low = self._product(rows[numbers], update[0])
                result[numbers] += self._product(low, update[1])
        return result.view(*x.shape[:-1], len(weight))

    def _product(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return rows weight^T + bias, of shape (rows, outputs), for `rows` of shape (rows, inputs)."""
        # do not pack a weight that only this step uses, such as a router's weight converted to fp32
        if not self._use_core or weight.is_inference():
            return (_block_linear if rows.dtype == torch.float32 else F.linear)(rows, weight, bias)
        if rows.dtype not in (torch.float32, torch.bfloat16):
            return F.linear(rows, weight, bias)
        packed = self._packed.get(weight_key(weight))
        is_quantized = packed is not None and packed.type is WeightType.INT8
        if rows.dtype == torch.bfloat16 and not is_quantized and len(rows) > (MAX_BF16_ROWS or len(rows)):
            with torch_threads():
                return F.linear(rows, weight, bias)
        return _core_linear(rows, self.packed(weight), bias, len(weight))

    def packed(self, weight: Tensor) -> Packed:
        """Return a weight in the core's format."""
        packed = self._packed.get(weight_key(weight))
        if packed is None or packed.version != weight._version:
            kind = WeightType.BF16 if weight.dtype == torch.bfloat16 else WeightType.F32
            self.convert(weight, kind, release=False)
            packed = self._packed[weight_key(weight)]
        return packed

    def convert(
        self, weight: Tensor, kind: WeightType, *, release: bool, largest: Tensor | None = None
    ) -> None:
        """Pack a weight that no longer changes.

        Args:
            weight: (outputs, inputs) or (matrices, outputs, inputs).
            kind: INT8, or the type of the weight.
            release: whether to free the weight's memory.  The values of `weight` are then NaN, and `weight` can be used
                only in products.
            largest: for INT8, the absolute value that is quantized to 127, for each output: fp32 of shape (outputs)
                or (matrices, outputs).  The default is the output's largest absolute weight.
        """
        values = weight.detach()
        stack = values[None] if values.dim() == 2 else values
        tops = [None] * len(stack) if largest is None else largest.reshape(len(stack), -1)
        packed = [
            Packed(weight._version, kind, *_pack(matrix, kind, top))
            for matrix, top in zip(stack, tops, strict=True)
        ]
        if release:
            one = torch.full((*weight.shape[:-2], 1, 1), torch.nan, dtype=weight.dtype)
            weight.data = one.expand(weight.shape)
        matrices = [weight] if weight.dim() == 2 else weight.detach().unbind()
        self._packed.update(zip(map(weight_key, matrices), packed, strict=True))


def largest_of(weight: Tensor) -> Tensor:
    """Return the largest absolute weight of each output in fp32, for `weight` (..., outputs, inputs)."""
    return weight.abs().amax(-1).float()


def _pack(weight: Tensor, kind: WeightType, largest: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a weight in the core's format, and the scales of its outputs if `kind` is INT8."""
    values, scales = weight.contiguous(), None
    if kind is WeightType.INT8:
        scales = (largest_of(values) if largest is None else largest) / 127
        values = (values.float() / scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    core = native.library()
    packed = torch.empty(core.frd_packed_size(*values.shape, kind), dtype=torch.uint8)
    core.frd_pack(packed.data_ptr(), values.data_ptr(), *values.shape, kind)
    return packed, scales


def _core_linear(rows: Tensor, packed: Packed, bias: Tensor | None, outputs: int) -> Tensor:
    own = rows.float().contiguous()
    result = own.new_empty(len(own), outputs)
    offsets = None if bias is None else bias.float().contiguous()
    check_status(
        native.library().frd_linear(
            result.data_ptr(),
            own.data_ptr(),
            packed.values.data_ptr(),
            None if packed.scales is None else packed.scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            *own.shape,
            outputs,
            packed.type,
            thread_count(),
        )
    )
    return result.to(rows.dtype)


def _block_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count = len(rows)
    if count % BLOCK:
        rows = F.pad(rows, (0, 0, 0, -count % BLOCK))
    products = [F.linear(block, weight, bias) for block in rows.split(BLOCK)]
    return (products[0] if len(products) == 1 else torch.cat(products))[:count]


def _elementwise(func: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
    """Apply `func` to whole SIMD vectors, in chunks that torch computes with one thread."""
    flat = x.reshape(-1)
    count = flat.numel()
    if count % VECTOR:
        flat = F.pad(flat, (0, -count % VECTOR))
    if len(flat) <= PIECE:
        result = func(flat, **options)
    else:
        result = torch.cat([func(piece, **options) for piece in flat.split(PIECE)])
    return result[:count].view(x.shape)


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    use_core: bool | None = None,
) -> Tensor:
    """Return the attention output of each query over the KV cache of its sequence.

    Args:
        query: (queries, heads, width).
        keys: (blocks, key-value heads, tiles, width, 16), fp32 or bf16.
        values: (blocks, key-value heads, block length, value width), like `keys`.
        table: int32 of shape (queries, maximum number of blocks), the block indices of each query's sequence.
        positions: int64 of shape (queries), the position of each query.  A query attends to the positions from 0 up
            to its own position.
        scale: the factor applied to the scores.
        window: the number of most recent positions that a query attends to.
        use_core: whether to use the C core; None uses the core if available.

    Returns:
        (queries, heads, value width).
    """
    if not (native.available() if use_core is None else use_core):
        return _attention_by_query(query, keys, values, table, positions, scale, window)
    kv_heads, length, value_width = values.shape[1:]
    own = query.float()
    if own.stride(2) != 1:
        own = own.contiguous()
    result = own.new_empty(*query.shape[:2], value_width)
    tensors = (result, own, keys, values, table, positions)
    sizes = (*query.shape[:2], kv_heads, query.shape[2], value_width, length, table.shape[1])
    is_bf16 = keys.dtype == torch.bfloat16
    check_status(
        native.library().frd_attend(
            *(tensor.data_ptr() for tensor in tensors),
            *sizes,
            *own.stride()[:2],
            window or 0,
            ctypes.c_float(scale),
            is_bf16,
            thread_count(),
        )
    )
    return result.to(query.dtype)


def _attention_by_query(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    kv_heads, length, value_width = values.shape[1:]
    result = query.new_empty(*query.shape[:2], value_width)
    for number, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        blocks = table[number, : position // length + 1].long()
        key = keys[blocks].permute(1, 0, 2, 4, 3).reshape(kv_heads, -1, query.shape[2])
        value = values[blocks].transpose(0, 1).reshape(kv_heads, -1, value_width)
        grouped = query[number].view(kv_heads, -1, query.shape[2])
        scores = grouped.float() @ key[:, first : position + 1].float().transpose(1, 2) * scale
        mixed = scores.softmax(-1) @ value[:, first : position + 1].float()
        result[number] = mixed.view(-1, value_width)
    return result


def write_positions(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    use_core: bool | None = None,
) -> None:
    """Store `key` and `value` (rows, heads, width) in `keys` and `values`; see `ragged_attention`."""
    kv_heads, length, value_width = values.shape[1:]
    if native.available() if use_core is None else use_core:
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        strides = (ctypes.c_int64 * 4)(*key.stride()[:2], *value.stride()[:2])
        tensors = (keys, values, key, value, table, positions)
        sizes = (len(key), kv_heads, key.shape[2], value_width, length, table.shape[1])
        is_bf16 = keys.dtype == torch.bfloat16
        native.library().frd_store(*(tensor.data_ptr() for tensor in tensors), *sizes, strides, is_bf16)
        return
    blocks = table.gather(1, (positions // length)[:, None])[:, 0].long()
    offsets = positions % length
    keys[blocks, :, offsets // TILE, :, offsets % TILE] = key
    values[blocks, :, offsets] = value


def check_status(status: int) -> None:
    """Raise MemoryError if `status`, returned by a kernel, is an error."""
    if status != native.Status.OK:
        raise MemoryError(
            f"a kernel of the C core failed with {native.Status(status).name}: out of memory; use a smaller batch"
        )
