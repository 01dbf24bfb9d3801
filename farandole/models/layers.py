"""Provide common transformer layers: normalization, embeddings, self-attention, feed-forward networks and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.models.attention import attention
from farandole.models.derivatives import first_order
from farandole.models.dropout import ShardedDropout
from farandole.models.replaceable import replaceable
from farandole.models.rotary import Rotary
from farandole.models.sequence import SequenceInfo
from farandole.models.vocabulary import WHOLE, Vocabulary

_GELU_TANH = partial(F.gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
}
"""Activation functions, keyed by their names in Hugging Face configurations."""


# ---- normalization ----


class _RMSNorm(torch.autograd.Function):
    """A fused RMS normalization for CPUs, on which `F.rms_norm` takes 5 times as long (measured)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = square.div_(x.shape[-1]).add_(epsilon).rsqrt_().to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (outer,) = grad_outputs
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            products = (outer * normal).reshape(-1, x.shape[-1])
            weight_gradient = products.sum(0, dtype=torch.float32).to(weight.dtype)
        inner = outer * weight
        # d/dx of x s with s = (mean(x^2) + epsilon)^(-1/2):  s (g - n mean(g n)) with n = x s
        mean = (inner * normal).sum(-1, keepdim=True, dtype=torch.float32).div_(x.shape[-1]).to(x.dtype)
        return inner.sub_(normal.mul_(mean)).mul_(scale), weight_gradient, None


@replaceable
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight, of shape (..., width)."""
    weight = weight.to(x.dtype)
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normal: Tensor = _RMSNorm.apply(x, weight, epsilon)
    return normal


class RMSNorm(nn.Module):
    """Root-mean-square normalization (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization")."""

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` (..., width) along the last dimension."""
        return rms_norm(x, self.weight, self.epsilon)


# ---- attention ----


class SelfAttention(nn.Module):
    """Multi-head self-attention with a fused projection of queries, keys and values.

    `forward` derives the number of heads from the width of the projection.  A module with a shard of the weights
    therefore computes a shard of the heads.

    Args:
        width: the width of the hidden states.
        heads: the number of query heads.
        kv_heads: the number of key-value heads, by default `heads`.
        head_width: the width per head, by default width / heads.
        bias: whether the query, key and value projections have biases.
        out_bias: whether the output projection has a bias, by default `bias`.
        rotary: the rotary positions for queries and keys.
        window: the number of most recent positions that a position attends to, including itself; None for no limit.
        norm: a function that takes the head width and returns a normalization for queries or keys (Qwen 3).  By
            default, queries and keys are not normalized.
        scale: the factor applied to the scores, by default 1 / sqrt(head width).

    Raises:
        ValueError: if `heads` is not a multiple of `kv_heads`.
    """

    sharded_dropout: ShardedDropout | None = None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = True,
        rotary: Rotary | None = None,
        window: int | None = None,
        norm: Callable[[int], nn.Module] | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if heads % kv_heads:
            raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; change one of them")
        self.head_width = head_width or width // heads
        self.group = heads // kv_heads
        self.causal, self.rotary, self.window = causal, rotary, window
        self.scale, self.dropout = scale, dropout
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias=bias)
        self.out = nn.Linear(heads * self.head_width, width, bias=bias if out_bias is None else out_bias)
        self.norm_query = norm(self.head_width) if norm else None
        self.norm_key = norm(self.head_width) if norm else None

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Return the attention output (batch, positions, width) for `x`, which has the same shape."""
        info = info or SequenceInfo()
        batch, positions, _ = x.shape
        projected = self.qkv(x).view(batch, positions, -1, self.head_width).transpose(1, 2)
        kv_heads = projected.shape[1] // (self.group + 2)
        heads = self.group * kv_heads
        if self.norm_query is not None and self.norm_key is not None:
            query, key = projected[:, :heads], projected[:, heads:-kv_heads]
            query, key = self.norm_query(query), self.norm_key(key)
            if self.rotary is not None:
                query, key = self.rotary(query, info), self.rotary(key, info)
        elif self.rotary is not None:
            query, key = self.rotary(projected[:, :-kv_heads], info).split((heads, kv_heads), 1)
        else:
            query, key = projected[:, :heads], projected[:, heads:-kv_heads]
        value = projected[:, -kv_heads:]
        if info.cache is not None:
            key, value = info.cache.append(self, key, value)
        mixed = attention(
            query,
            key,
            value,
            info,
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            dropout=self.dropout if self.training else 0.0,
            heads=self.sharded_dropout,
        )
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, -1))
        return result


# ---- feed-forward networks ----


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, inner: int, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Return the network's output for `x`, both of shape (..., width)."""
        result: Tensor = self.down(self.activation(self.up(x)))
        return result


class _SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up, and stores only the input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (outer,) = grad_outputs
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        gradient = torch.empty_like(both)
        to_gate, to_up = gradient.chunk(2, -1)
        torch.mul(outer, F.silu(gate), out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(outer * up, gate))
        return gradient


@replaceable
def gated(both: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up.

    `both`, of shape (..., 2 width), is the concatenation of gate and up.
    """
    if ACTIVATIONS[activation] is F.silu:
        product: Tensor = _SwiGLU.apply(both)
        return product
    gate, up = both.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


class GatedFeedForward(nn.Module):
    """A gated feed-forward network (Shazeer, 2020, "GLU Variants Improve Transformer").

    The gate and up projections are fused.
    """

    def __init__(self, width: int, inner: int, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Return the network's output for `x`, both of shape (..., width)."""
        result: Tensor = self.down(gated(self.gate_up(x), self.activation))
        return result


# ---- blocks ----


class TransformerBlock(nn.Module):
    """One layer: attention and a feed-forward network, each with pre-normalization and a residual connection.

    Args:
        norm: a function that returns a normalization for a given width.
        attention, feed_forward: modules that map (batch, positions, width) to the same shape, given a `SequenceInfo`.
        dropout: the dropout probability for the outputs of both modules.
    """

    def __init__(
        self,
        width: int,
        norm: Callable[[int], nn.Module],
        attention: nn.Module,
        feed_forward: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm_attention = norm(width)
        self.attention = attention
        self.norm_feed_forward = norm(width)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Return the block's output for `x`, both of shape (batch, positions, width)."""
        x = x + self.dropout(self.attention(self.norm_attention(x), info))
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x), info))


class Embedding(nn.Module):
    """Token embeddings, and learned position embeddings if `context` is given.

    Args:
        padding: a token whose embedding receives no gradient, as in `nn.Embedding`.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        context: int | None = None,
        dropout: float = 0.0,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding)
        self.positions = nn.Embedding(context, width) if context else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Map int64 tokens (batch, positions) to embeddings (batch, positions, width)."""
        embedded: Tensor = self.tokens(tokens)
        if self.positions is not None:
            embedded = embedded + position_embeddings(self.positions, tokens, info)
        dropped: Tensor = self.dropout(embedded)
        return dropped


def position_embeddings(table: nn.Embedding, tokens: Tensor, info: SequenceInfo | None) -> Tensor:
    """Return the position embeddings (positions, width) or (batch, positions, width) for `tokens`.

    Raises:
        ValueError: if there are more positions than embeddings, in a sequence or (on the CPU) in a packed document.
    """
    count = tokens.shape[1]
    start = info.cache.length if info is not None and info.cache is not None else 0
    if info is None or (info.positions is None and info.documents is None):
        check_context(start + count, table.num_embeddings)
        if info is None or start == 0:
            return table.weight[:count]
    positions = info.positions_of(count, tokens.device)
    try:
        embedded: Tensor = table(positions)
    except IndexError:  # torch does not name the position
        check_context(int(positions.max()) + 1, table.num_embeddings)
        raise
    return embedded


def check_context(count: int, context: int) -> None:
    """Raise ValueError if `count` positions exceed the model's context."""
    if count > context:
        raise ValueError(f"expected at most {context} positions (the model's context), got {count}")


def check_padding(padding: int | None, vocabulary: int) -> None:
    """Raise ValueError if the padding token is not in the vocabulary."""
    if padding is not None and not 0 <= padding < vocabulary:
        raise ValueError(
            f"expected padding to be a token from 0 to {vocabulary - 1} (vocabulary={vocabulary}), got {padding}"
        )


class Head(nn.Module):
    """The final normalization and the output projection.

    Args:
        weight: the token embedding (vocabulary, width), for a tied head.  By default, the head has its own weight.
    """

    vocabulary: Vocabulary = WHOLE

    def __init__(
        self,
        width: int,
        vocabulary: int,
        norm: Callable[[int], nn.Module],
        weight: Tensor | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.norm = norm(width)
        self.weight = weight if weight is not None else nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias else None

    def forward(self, x: Tensor, info: SequenceInfo | None = None, targets: Tensor | None = None) -> Any:
        """Return the logits (..., vocabulary), or the summed loss and the number of targets if `targets` is given."""
        if targets is not None:
            return self.vocabulary.loss(x, targets, self.weight, self.bias, self.norm)
        return self.vocabulary.logits(self.norm(x), self.weight, self.bias)


# ---- initial weights ----


@torch.no_grad()
def initialize(model: nn.Module, deviation: float = 0.02) -> None:
    """Initialize weights from a normal distribution, biases to zero, and normalizations to the identity.

    For L layers, the standard deviation of the output projections (`out` and `down`) is divided by sqrt(2 L).  The
    variance of the residual stream therefore does not grow with L (Radford et al., 2019).
    """
    layers = sum(isinstance(module, TransformerBlock) for module in model.modules())
    residual = deviation / math.sqrt(2 * max(1, layers))
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=residual if last in ("out", "down") else deviation)
        elif isinstance(module, Head) and not _is_tied(model, module.weight):
            nn.init.normal_(module.weight, std=deviation)
        for kind, parameter in module.named_parameters(recurse=False):
            if kind == "bias":
                nn.init.zeros_(parameter)
            elif parameter.ndim == 3:  # stacked experts
                nn.init.normal_(parameter, std=residual if kind == "down" else deviation)


def _is_tied(model: nn.Module, weight: Tensor) -> bool:
    return any(module.weight is weight for module in model.modules() if isinstance(module, nn.Embedding))
