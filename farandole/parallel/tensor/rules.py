"""Rules that describe how each kind of module is split over the ranks of the tensor axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from farandole.data.wording import counted
from farandole.layout import Part, chunk
from farandole.memory.call_wrappers import wrap_calls
from farandole.models.bert import BERTEmbedding, MaskedTokenHead
from farandole.models.deepseek import LatentAttention, PredictionHead
from farandole.models.dropout import ShardedDropout
from farandole.models.layers import Embedding, FeedForward, GatedFeedForward, Head, SelfAttention
from farandole.models.moe import Experts, MixtureOfExperts
from farandole.models.t5 import CrossAttention, RelativeBias, T5Attention, T5Embedding, T5Head
from farandole.parallel.axes import Position
from farandole.parallel.tensor.regions import AXIS, GatherHead

Parts = Callable[[Any, int], Sequence[Part]]
"""A function (module, number of ranks) that returns the parts of the split dimension, or raises `Indivisible`."""


class Indivisible(ValueError):
    """Raised if a module cannot be split over the ranks.

    `nearest` contains the sizes of the tensor axis with which the module can be split.
    """

    def __init__(self, what: str, nearest: Iterable[int]) -> None:
        super().__init__(what)
        self.nearest = sorted(set(nearest))


@dataclass(frozen=True)
class Rule:
    """A rule that describes how a kind of module is split.

    Args:
        column: maps the paths of column-parallel linear layers to the parts of their outputs.
        row: maps the paths of row-parallel linear layers to the parts of their inputs.
        tensors: maps the names of other split parameters to (split dimension, parts of this dimension).
        vocabulary: the names of the embeddings and parameters that are split along the vocabulary.
        region: whether the module is a region; False for a module that is inside a region, is split only along the
            vocabulary, or does not communicate.
        inputs: the number of leading arguments that enter the region.
        overlaps: whether a single column-parallel layer uses the input of the region, so that the layer's backward
            pass can overlap with communication.
        adjust: a function that is called as `adjust(module, position)` before the module is split, for example to
            change the number of query heads per key-value head.
        dropout: maps the path of each `nn.Dropout` layer of a region to (split dimension of the layer's input, parts
            of this dimension), or to None if the input is not split (a complete tensor, or the output of a
            row-parallel layer).  Each rank applies its part of the mask that a single process would draw.
    """

    column: Mapping[str, Parts] = field(default_factory=dict)
    row: Mapping[str, Parts] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, Parts]] = field(default_factory=dict)
    vocabulary: Sequence[str] = ()
    region: bool = True
    inputs: int = 1
    overlaps: bool = False
    adjust: Callable[[Any, Position], None] | None = None
    dropout: Mapping[str, tuple[int, Parts] | None] = field(default_factory=dict)


Split = Mapping[str, tuple[Part, ...]]
"""The parts of a module's split layers and parameters, and of the inputs of its dropout layers, by path."""


def parts_of(module: nn.Module, rule: Rule, ranks: int) -> Split:
    """Return a dict that maps paths in `module` to the parts of split layers, parameters and dropout inputs.

    Raises:
        Indivisible: if a part has too few units, or the vocabulary too few tokens, for `ranks` ranks.
    """
    functions = {**rule.column, **rule.row}
    with_dimension = {**rule.tensors, **rule.dropout}.items()
    functions |= {name: split[1] for name, split in with_dimension if split is not None}
    split = {name: tuple(function(module, ranks)) for name, function in functions.items()}
    for name, parts in split.items():
        for part in parts:
            units, copies = part.size // part.unit, min(part.copies, ranks)
            if units < ranks // copies:
                raise Indivisible(
                    f"{counted(units, 'unit')} in {name}", range(copies, units * copies + 1, copies)
                )
    for _, parameter in vocabulary_of(module, rule):
        if (count := len(parameter)) < ranks:
            raise Indivisible(f"a vocabulary of {counted(count, 'token')}", range(1, count + 1))
    return split


def vocabulary_of(module: nn.Module, rule: Rule) -> Iterator[tuple[Any, nn.Parameter]]:
    """Yield (embedding, its weight) or (parameter, parameter) for each tensor that is split along the vocabulary."""
    for name in rule.vocabulary:
        child: Any = getattr(module, name)
        parameter: Any = child.weight if isinstance(child, nn.Embedding) else child
        if parameter is not None:
            yield child, parameter


# ---- the parts of the layers in `models` ----


def _heads(module: SelfAttention) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads of the unsplit module."""
    every = module.qkv.out_features // module.head_width
    kv_heads = every // (module.group + 2)
    return every - 2 * kv_heads, kv_heads


def _query_units(module: SelfAttention, ranks: int) -> Part:
    heads, kv_heads = _heads(module)
    width = module.head_width
    if ranks <= kv_heads:  # whole groups of query heads; ranks get different numbers of groups if necessary
        return Part(heads * width, module.group * width)
    # several ranks share a key-value head, and each projects an equal part of its width
    sharing = [
        n for n in range(kv_heads, heads + 1, kv_heads) if heads % n == 0 and kv_heads * width % n == 0
    ]
    if ranks not in sharing:
        what = f"{heads} query heads and {kv_heads} key-value heads of width {width}"
        raise Indivisible(what, [*range(1, kv_heads + 1), *sharing])
    return Part(heads * width, width)


def _query_key_value(module: SelfAttention, ranks: int) -> Sequence[Part]:
    query, (_, kv_heads) = _query_units(module, ranks), _heads(module)
    # with fewer key-value heads than ranks, a rank projects a part of a head (`GatherHead`)
    one = Part(kv_heads * module.head_width, module.head_width if ranks <= kv_heads else 1)
    return query, one, one


def _attention_output(module: SelfAttention, ranks: int) -> Sequence[Part]:
    return (_query_units(module, ranks),)


def _units(count: int, width: int, what: str, ranks: int) -> Part:
    if ranks > count:
        raise Indivisible(f"{count} {what}", range(1, count + 1))
    return Part(count * width, width)


def _latent(width_of: Callable[[LatentAttention], int]) -> Parts:
    def parts(module: LatentAttention, ranks: int) -> Sequence[Part]:
        heads = module.out.in_features // module.value_width
        return (_units(heads, width_of(module), "heads", ranks),)

    return parts


def _t5_heads(copies: int) -> Parts:
    def parts(module: T5Attention | CrossAttention, ranks: int) -> Sequence[Part]:
        heads = module.out.in_features // module.head_width
        return (_units(heads, module.head_width, "heads", ranks),) * copies

    return parts


def _bias_heads(module: RelativeBias, ranks: int) -> Sequence[Part]:
    return (_units(module.biases.embedding_dim, 1, "heads", ranks),)


def _inner(copies: int = 1) -> Parts:
    def parts(module: FeedForward | GatedFeedForward, ranks: int) -> Sequence[Part]:
        return (_units(module.down.in_features, 1, "feed-forward units", ranks),) * copies

    return parts


def _expert_inner(copies: int = 1) -> Parts:
    def parts(module: Experts, ranks: int) -> Sequence[Part]:
        return (_units(module.down.in_features, 1, "units per expert", ranks),) * copies

    return parts


def _share_dropout(module: Any, position: Position) -> None:
    """Make each rank draw the attention dropout mask for all heads, and use the slice for its own heads."""
    heads = module.out.in_features // (
        module.value_width if isinstance(module, LatentAttention) else module.head_width
    )
    unit = 1
    if isinstance(module, SelfAttention) and position.size(AXIS) <= _heads(module)[1]:
        unit = module.group
    own = chunk(heads, position.size(AXIS), position.coordinate(AXIS), unit)
    module.sharded_dropout = ShardedDropout(1, (own,), heads)


def _adjust_attention(module: SelfAttention, position: Position) -> None:
    _share_dropout(module, position)
    ranks = position.size(AXIS)
    heads, kv_heads = _heads(module)
    if ranks > kv_heads:
        module.group = heads // ranks
        wrap_calls(module.qkv, GatherHead(module, position, ranks // kv_heads))


def _share_router_losses(module: MixtureOfExperts, position: Position) -> None:
    """Divide the gradients of router losses by the number of ranks."""
    # all ranks of the axis compute the same router losses, and the engine sums the ranks' gradients
    module.router.copies = position.size(AXIS)


RULES: dict[type[nn.Module], Rule] = {
    SelfAttention: Rule(
        {"qkv": _query_key_value}, {"out": _attention_output}, overlaps=True, adjust=_adjust_attention
    ),
    LatentAttention: Rule(
        {
            "query": _latent(lambda m: m.plain + m.rotary.width),
            "kv": _latent(lambda m: m.plain + m.value_width),
        },
        {"out": _latent(lambda m: m.value_width)},
        adjust=_share_dropout,
    ),
    FeedForward: Rule({"up": _inner()}, {"down": _inner()}, overlaps=True),
    GatedFeedForward: Rule({"gate_up": _inner(2)}, {"down": _inner()}, overlaps=True),
    MixtureOfExperts: Rule(adjust=_share_router_losses),
    Experts: Rule({"gate_up": _expert_inner(2)}, {"down": _expert_inner()}, region=False),
    T5Attention: Rule({"qkv": _t5_heads(3)}, {"out": _t5_heads(1)}, adjust=_share_dropout),
    CrossAttention: Rule(
        {"query": _t5_heads(1), "kv": _t5_heads(2)}, {"out": _t5_heads(1)}, inputs=2, adjust=_share_dropout
    ),
    RelativeBias: Rule(tensors={"biases.weight": (1, _bias_heads)}, region=False),
    Embedding: Rule(vocabulary=("tokens",), region=False),
    BERTEmbedding: Rule(vocabulary=("tokens",), region=False),
    T5Embedding: Rule(vocabulary=("tokens",), region=False),
    Head: Rule(vocabulary=("weight", "bias"), region=False),
    PredictionHead: Rule(vocabulary=("weight", "bias"), region=False),
    MaskedTokenHead: Rule(vocabulary=("weight", "bias"), region=False),
    T5Head: Rule(vocabulary=("weight",), region=False),
}
"""The rule for each kind of module; a subclass needs its own rule."""

BUILT_IN = tuple(RULES.values())
"""The rules of the modules in `farandole.models`."""


EMBEDDINGS = (Embedding,)
"""The classes of embeddings after which tokens can be divided over ranks (`Plan.sequence`)."""


def register(kind: type[nn.Module], rule: Rule) -> None:
    """Register `rule` for modules of class `kind`, replacing any earlier rule."""
    RULES[kind] = rule


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule for a module, or None."""
    kind = type(module)
    return RULES.get(getattr(kind, "_plain", kind))
