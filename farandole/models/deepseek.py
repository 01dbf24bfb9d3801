"""DeepSeek-V3: multi-head latent attention, mixture-of-experts layers with a shared expert, and multi-token prediction.

The model follows DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report".  Queries, keys and values are expanded from
low-rank latent vectors.  Each query and key head has a non-rotary part and a rotary part.  All heads share the rotary
part of the key.  The first layers are dense, and the other layers use a mixture of experts (`moe.GroupedRouter`).

With `predicted` > 0, the head has modules that predict additional tokens during training (section 2.2 of the report).
Module k combines the hidden state at position i with the embedding of token i + k, runs one more layer, and predicts
token i + k + 1 with the model's embedding and output weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.attention import attention
from farandole.models.dropout import ShardedDropout
from farandole.models.layers import (
    Embedding,
    GatedFeedForward,
    Head,
    RMSNorm,
    TransformerBlock,
    check_padding,
    initialize,
)
from farandole.models.moe import Balance, Experts, GroupedRouter, MixtureOfExperts
from farandole.models.rotary import Rotary
from farandole.models.sequence import SequenceInfo, Transformer


@dataclass(frozen=True)
class DeepSeekConfig:
    """The configuration of a DeepSeek-V3 model.

    Args:
        inner: the feed-forward width in dense layers.
        query_rank, kv_rank: the widths of the latent vectors; query_rank=0 projects queries directly.
        plain_width: the width of the non-rotary part of each query and key head.
        rotary: the settings of rotary positions, including the width of the rotary part.
        value_width: the width of a value head.
        dense: the number of dense layers at the start.
        experts, top, groups, top_groups, normalized, route_scale: the options of `moe.GroupedRouter`.
        shared: the number of shared experts, which form one network of width `shared` * `expert_inner`.
        expert_inner: the width of an expert.
        attention_scale: a positive factor applied to the attention scores in addition to 1 / sqrt(head width).  A
            factor other than 1 requires rotary positions with `yarn` scaling and `factor` > 1.
        predicted: the number of modules that predict additional tokens.
        predicted_weight: the factor applied to the mean of the modules' losses.
        balance: the settings for balancing the load of the experts.
        padding: the token whose embedding receives no gradient, as in `nn.Embedding`.

    Raises:
        ValueError: if the padding token is not in the vocabulary, or `attention_scale` is not supported.
    """

    vocabulary: int
    layers: int
    heads: int
    width: int
    inner: int
    rotary: Rotary
    query_rank: int
    kv_rank: int
    plain_width: int
    value_width: int
    experts: int
    expert_inner: int
    top: int
    dense: int = 0
    shared: int = 1
    groups: int = 1
    top_groups: int = 1
    normalized: bool = True
    route_scale: float = 1.0
    attention_scale: float = 1.0
    attention_bias: bool = False
    attention_dropout: float = 0.0
    activation: str = "silu"
    epsilon: float = 1e-6
    tied: bool = False
    predicted: int = 0
    predicted_weight: float = 0.3
    balance: Balance = Balance()
    padding: int | None = None

    def __post_init__(self) -> None:
        check_padding(self.padding, self.vocabulary)
        if self.attention_scale <= 0:
            raise ValueError(f"expected attention_scale above 0, got {self.attention_scale}")
        # Hugging Face configurations store the factor as a field of YaRN
        if self.attention_scale != 1 and not (self.rotary.scaling == "yarn" and self.rotary.factor > 1):
            raise ValueError(
                "expected attention_scale=1 without rotary scaling='yarn' and factor > 1, "
                f"got attention_scale={self.attention_scale}, scaling={self.rotary.scaling!r} and "
                f"factor={self.rotary.factor}; set attention_scale=1"
            )


class LatentAttention(nn.Module):
    """Multi-head latent attention.

    The norm layers of the latent vectors always use an epsilon of 1e-6, as in the `transformers` library.
    """

    sharded_dropout: ShardedDropout | None = None

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        bias = config.attention_bias
        self.plain, self.value_width, self.rotary = config.plain_width, config.value_width, config.rotary
        head_width = self.plain + config.rotary.width
        self.scale = head_width**-0.5 * config.attention_scale
        self.dropout = config.attention_dropout
        if config.query_rank:
            self.query_down = nn.Linear(config.width, config.query_rank, bias=bias)
            self.norm_query = RMSNorm(config.query_rank)
        self.query = nn.Linear(config.query_rank or config.width, config.heads * head_width, bias=False)
        self.kv_down = nn.Linear(config.width, config.kv_rank + config.rotary.width, bias=bias)
        self.norm_kv = RMSNorm(config.kv_rank)
        self.kv = nn.Linear(config.kv_rank, config.heads * (self.plain + self.value_width), bias=False)
        self.out = nn.Linear(config.heads * self.value_width, config.width, bias=bias)

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        info = info or SequenceInfo()
        batch, positions, _ = x.shape
        latent = self.norm_query(self.query_down(x)) if hasattr(self, "query_down") else x
        head_width = self.plain + self.rotary.width
        query = self.query(latent).view(batch, positions, -1, head_width).transpose(1, 2)
        compressed, shared_key = self.kv_down(x).split((self.norm_kv.weight.shape[0], self.rotary.width), -1)
        expanded = self.kv(self.norm_kv(compressed))
        expanded = expanded.view(batch, positions, -1, self.plain + self.value_width).transpose(1, 2)
        plain_key, value = expanded.split((self.plain, self.value_width), -1)
        rotated_key = self.rotary(shared_key[:, None], info).expand(-1, expanded.shape[1], -1, -1)
        query = torch.cat((query[..., : self.plain], self.rotary(query[..., self.plain :], info)), -1)
        key = torch.cat((plain_key, rotated_key), -1)
        if info.cache is not None:
            key, value = info.cache.append(self, key, value)
        dropout = self.dropout if self.training else 0.0
        mixed = attention(
            query, key, value, info, scale=self.scale, dropout=dropout, heads=self.sharded_dropout
        )
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, -1))
        return result


def _layer(config: DeepSeekConfig, number: int) -> TransformerBlock:
    if number < config.dense:
        feed_forward: nn.Module = GatedFeedForward(config.width, config.inner, config.activation)
    else:
        inner = config.shared * config.expert_inner
        feed_forward = MixtureOfExperts(
            GroupedRouter(
                config.width,
                config.experts,
                config.top,
                config.groups,
                config.top_groups,
                config.normalized,
                config.route_scale,
            ),
            Experts(config.experts, config.width, config.expert_inner, config.activation),
            GatedFeedForward(config.width, inner, config.activation) if inner else None,
            config.balance,
        )
    norm = partial(RMSNorm, epsilon=config.epsilon)
    return TransformerBlock(config.width, norm, LatentAttention(config), feed_forward)


class TokenPrediction(nn.Module):
    """Computes the hidden state that predicts one more token.

    The module combines the hidden state at each position with the embedding of the next token.
    """

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        norm = partial(RMSNorm, epsilon=config.epsilon)
        self.norm_embedding, self.norm_hidden = norm(config.width), norm(config.width)
        self.project = nn.Linear(2 * config.width, config.width, bias=False)
        self.layer = _layer(config, config.layers)
        self.norm = norm(config.width)

    def forward(self, hidden: Tensor, embedded: Tensor, info: SequenceInfo) -> Tensor:
        """Map hidden states and next-token embeddings, both (batch, positions, width), to hidden states."""
        both = torch.cat((self.norm_embedding(embedded), self.norm_hidden(hidden)), -1)
        result: Tensor = self.layer(self.project(both), info)
        return result


class PredictionHead(Head):
    """A head whose modules predict additional tokens.  The modules run only if `forward` receives `targets`."""

    def __init__(self, config: DeepSeekConfig, embedding: Tensor) -> None:
        norm = partial(RMSNorm, epsilon=config.epsilon)
        super().__init__(config.width, config.vocabulary, norm, embedding if config.tied else None)
        self.embedding = embedding
        self.predictions = nn.ModuleList(TokenPrediction(config) for _ in range(config.predicted))
        self.predicted_weight = config.predicted_weight

    def forward(self, x: Tensor, info: SequenceInfo | None = None, targets: Tensor | None = None) -> Any:
        """Return the logits, or the summed loss and the number of targets if `targets` is given.

        The target at position i is token i + 1, so `targets` also contains the tokens that the modules embed.  The
        targets of module k are `targets`, shifted by k positions within each document.  Module k has fewer targets than
        the next-token loss, so its summed loss is scaled to the number of next-token targets.
        """
        if targets is None or not self.predictions:
            return super().forward(x, info, targets)
        info = info or SequenceInfo()
        total, count = super().forward(x, info, targets)
        # shift the targets of the complete sequences, because this process may have only some of the positions
        shard = info.shard
        documents = info.documents if shard is None else shard.documents
        here = targets if shard is None or shard.targets is None else shard.targets
        every = (here >= 0).sum()
        hidden, further = self.norm(x), x.new_zeros((), dtype=torch.float32)
        for prediction in self.predictions:
            assert isinstance(prediction, TokenPrediction)
            inputs = here if shard is None else here[:, shard.index]
            embedded = self.vocabulary.embed(inputs.clamp(min=0), self.embedding)
            hidden = prediction(hidden, embedded, info)
            following = torch.full_like(here, -1)
            following[:, :-1] = here[:, 1:]
            if documents is not None:
                following[:, :-1] = following[:, :-1].where(documents[:, 1:] == documents[:, :-1], -1)
            here = following.where(here >= 0, -1)
            wanted = here if shard is None else here[:, shard.index]
            loss, _ = self.vocabulary.loss(hidden, wanted, self.weight, before=prediction.norm)
            some = (here >= 0).sum().clamp(min=1)
            further = further + loss * (every / some)
        return total + self.predicted_weight * further / len(self.predictions), count


def deepseek(config: DeepSeekConfig) -> Transformer:
    """Return a DeepSeek-V3 model without the weight initialization of `build_deepseek`."""
    embedding = Embedding(config.vocabulary, config.width, padding=config.padding)
    blocks = [_layer(config, number) for number in range(config.layers)]
    if config.predicted:
        head: nn.Module = PredictionHead(config, embedding.tokens.weight)
    else:
        weight = embedding.tokens.weight if config.tied else None
        head = Head(config.width, config.vocabulary, partial(RMSNorm, epsilon=config.epsilon), weight)
    model = Transformer(embedding, *blocks, head)
    model.config = config
    return model


def build_deepseek(config: DeepSeekConfig) -> Transformer:
    """Return a DeepSeek-V3 model with initial weights drawn from torch's global generator."""
    model = deepseek(config)
    initialize(model)
    return model
