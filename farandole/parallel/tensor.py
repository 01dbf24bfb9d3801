"""Tensor parallelism: the ranks of an axis compute each layer together (Shoeybi et al., 2019, "Megatron-LM").

A *region* is a module, such as attention or a feed-forward network, whose first linear layers are split by columns (each
rank computes some of the outputs, such as some heads) and whose last layer is split by rows (each rank computes a
partial sum of the output).  Only the boundaries of a region communicate:

              outside             enter a region           leave a region
    default   complete copies     identity                 all-reduce
    sequence  shards of tokens    all-gather               reduce-scatter

The backward pass runs the transposed collectives.  With `sequence=True`, normalization, dropout and residual connections
process a shard of the tokens (Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models").

Inside a region, each rank's gradient of a replicated parameter is a partial sum.  Outside, gradients are equal on all ranks,
or partial sums with `sequence=True`.  The layouts declare this, and the engine does the rest.

`RULES` describes the region of each kind of module; `register` adds a rule for another model's modules:

    register(MyAttention, Rule(column={"qkv": my_parts}, row={"out": my_heads}))

The token embedding and the output projection are split by words (`Words`).  With targets, no rank holds the logits of all
words.  Without targets, the model returns the logits of all words, which are gathered, or within `sharded_logits`, the
logits of this rank's words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from farandole.layout import Part, Shard, chunk
from farandole.memory.call_wrappers import wrap_calls
from farandole.models.bert import BERTEmbedding, MaskedTokenHead
from farandole.models.deepseek import LatentAttention, PredictionHead
from farandole.models.dropout import ShardedDropout
from farandole.models.layers import Embedding, FeedForward, GatedFeedForward, Head, SelfAttention
from farandole.models.loss import VocabularyShard, head_loss
from farandole.models.moe import Experts, MixtureOfExperts
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.models.t5 import CrossAttention, RelativeBias, T5Attention, T5Embedding, T5Head
from farandole.models.vocabulary import Vocabulary
from farandole.parallel.axes import AxisCommunicator, Layouts, Position
from farandole.parallel.collectives import (
    copy_to_all,
    gather_and_reduce,
    gather_same,
    own_rows,
    reduce_and_gather,
    slice_of_same,
    sum_of_all,
)
from farandole.parallel.lora.layer import LoRALinear
from farandole.plan import Plan, PlanError

AXIS = "tensor"

Parts = Callable[[Any, int], Sequence[Part]]
"""A function of a module and the number of ranks that returns the parts of the split dimension, or raises `Indivisible`."""


class Indivisible(ValueError):
    """Raised if a module cannot be split over the ranks; `nearest` are the numbers of ranks that can split the module."""

    def __init__(self, what: str, nearest: Iterable[int]) -> None:
        super().__init__(what)
        self.nearest = sorted(set(nearest))


@dataclass(frozen=True)
class Rule:
    """How a kind of module is split.

    Args:
        column: the linear layers whose outputs are split, by path, with the parts of the outputs.
        row: the linear layers whose inputs are split, by path, with the parts of the inputs.
        tensors: other split parameters of the module: the dimension and its parts.
        words: the embeddings (by path) and parameters that are split by words.
        region: whether the module is a region.  If not, it communicates nothing or is inside another region.
        inputs: the number of leading arguments that enter the region.
        adjust: a function that is called with the module, before it is split, and the position, for example to change
            the number of query heads per key-value head.
    """

    column: Mapping[str, Parts] = field(default_factory=dict)
    row: Mapping[str, Parts] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, Parts]] = field(default_factory=dict)
    words: Sequence[str] = ()
    region: bool = True
    inputs: int = 1
    adjust: Callable[[Any, Position], None] | None = None


# ---- the parts of our layers ----


def _heads(module: SelfAttention) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads of the complete module."""
    every = module.qkv.out_features // module.head_width
    kv_heads = every // (module.group + 2)
    return every - 2 * kv_heads, kv_heads


def _query_units(module: SelfAttention, ranks: int) -> Part:
    heads, kv_heads = _heads(module)
    width = module.head_width
    if ranks <= kv_heads:  # whole groups of query heads, and uneven numbers of them if necessary
        return Part(heads * width, module.group * width)
    if ranks % kv_heads or heads % ranks or kv_heads * width % ranks:
        most = [n for n in range(1, heads + 1) if n <= kv_heads or (n % kv_heads == 0 and heads % n == 0)]
        raise Indivisible(f"{heads} query heads and {kv_heads} key-value heads", most)
    return Part(heads * width, width)


def _query_key_value(module: SelfAttention, ranks: int) -> Sequence[Part]:
    query, (_, kv_heads) = _query_units(module, ranks), _heads(module)
    # with fewer key-value heads than ranks, a rank projects a part of a head (`_GatherHead`)
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
        return (_units(module.down.shape[2], 1, "units per expert", ranks),) * copies

    return parts


def _share_dropout(module: Any, position: Position) -> None:
    """Let attention draw the dropout mask of all heads."""
    heads = module.out.in_features // (
        module.value_width if isinstance(module, LatentAttention) else module.head_width
    )
    unit = 1
    if isinstance(module, SelfAttention) and position.size(AXIS) <= _heads(module)[1]:
        unit = module.group
    first, _ = chunk(heads, position.size(AXIS), position.coordinate(AXIS), unit)
    module.sharded_dropout = ShardedDropout(1, first, heads)


def _adjust_attention(module: SelfAttention, position: Position) -> None:
    _share_dropout(module, position)
    ranks = position.size(AXIS)
    heads, kv_heads = _heads(module)
    if ranks > kv_heads:
        module.group = heads // ranks
        wrap_calls(module.qkv, _GatherHead(module, position, ranks // kv_heads))


def _share_router_losses(module: MixtureOfExperts, position: Position) -> None:
    """Divide the gradients of router losses, because all ranks compute the router and their gradients are summed."""
    module.router.copies = position.size(AXIS)


RULES: dict[type[nn.Module], Rule] = {
    SelfAttention: Rule({"qkv": _query_key_value}, {"out": _attention_output}, adjust=_adjust_attention),
    LatentAttention: Rule(
        {
            "query": _latent(lambda m: m.plain + m.rotary.width),
            "kv": _latent(lambda m: m.plain + m.value_width),
        },
        {"out": _latent(lambda m: m.value_width)},
        adjust=_share_dropout,
    ),
    FeedForward: Rule({"up": _inner()}, {"down": _inner()}),
    GatedFeedForward: Rule({"gate_up": _inner(2)}, {"down": _inner()}),
    MixtureOfExperts: Rule(adjust=_share_router_losses),
    Experts: Rule(tensors={"gate_up": (1, _expert_inner(2)), "down": (2, _expert_inner())}, region=False),
    T5Attention: Rule({"qkv": _t5_heads(3)}, {"out": _t5_heads(1)}, adjust=_share_dropout),
    CrossAttention: Rule(
        {"query": _t5_heads(1), "kv": _t5_heads(2)}, {"out": _t5_heads(1)}, inputs=2, adjust=_share_dropout
    ),
    RelativeBias: Rule(tensors={"biases.weight": (1, _bias_heads)}, region=False),
    Embedding: Rule(words=("tokens",), region=False),
    BERTEmbedding: Rule(words=("tokens",), region=False),
    T5Embedding: Rule(words=("tokens",), region=False),
    Head: Rule(words=("weight", "bias"), region=False),
    PredictionHead: Rule(words=("weight", "bias"), region=False),
    MaskedTokenHead: Rule(words=("weight", "bias"), region=False),
    T5Head: Rule(words=("weight",), region=False),
}
"""The rule for each kind of module; a subclass needs its own rule."""


_EMBEDDINGS = (Embedding,)
"""The embeddings after which ranks can share the tokens."""


def register(kind: type[nn.Module], rule: Rule) -> None:
    """Add the rule for modules of this class."""
    RULES[kind] = rule


# ---- apply ----


def apply(model: nn.Module, position: Position, plan: Plan, layouts: Layouts) -> None:
    """Split the modules of `model` that have a rule over the ranks of the tensor axis.

    Raises:
        PlanError: if no module has a rule, or one cannot be split over this number of ranks; the message contains the
            nearest numbers that can.
    """
    ranks = position.size(AXIS)
    if ranks == 1:
        return
    found = {path: (module, rule) for path, module in model.named_modules() if (rule := _rule(module))}
    if not any(rule.region for _, rule in found.values()):
        raise PlanError(
            f"tensor={ranks}: {type(model).__name__} has no module with a rule for tensor parallelism; nearest plan: "
            "tensor=1, or add rules with farandole.parallel.tensor.register"
        )
    for parameter in _with_equal_gradients(model, found, sequence=plan.sequence):
        layouts.equal_gradients(parameter, AXIS)
    tokens = _Tokens(position.comm(AXIS)) if plan.sequence else None
    if tokens is not None:
        _share_tokens(model, found, tokens)
    for path, (module, rule) in found.items():
        try:
            _split(module, rule, position, layouts)
        except Indivisible as error:
            near = sorted(error.nearest, key=lambda n: abs(n - ranks))[:2]
            raise PlanError(
                f"tensor={ranks}: {path} has {error}, which {ranks} ranks cannot divide; nearest plans: "
                + ", ".join(f"tensor={n}" for n in sorted(near))
            ) from error
    comm = position.comm(AXIS)
    for path, (module, rule) in found.items():
        if rule.region and not any(
            path.startswith(f"{other}.") and found[other][1].region for other in found
        ):
            wrap_calls(module, _Region(comm, rule.inputs) if tokens is None else _TokenRegion(tokens))
        if rule.words:
            _split_words(module, rule, position, layouts, tokens)


@contextmanager
def sharded_logits(model: nn.Module) -> Iterator[slice]:
    """Return a context in which `model` returns the logits of this rank's words only, and does not gather logits.

        with sharded_logits(model) as words:
            logits = engine(tokens)  # (batch, positions, words): logits[..., words] of the complete logits

    The backward pass expects, on each rank, the gradient of the total loss with respect to the rank's logits.

    Yields:
        The slice of the vocabulary that contains this rank's words.  Without tensor parallelism, it contains all words.
    """
    found = [module.__dict__.get("vocabulary") for module in model.modules()]
    shards = [words for words in found if isinstance(words, Words)]
    for words in shards:
        words.gathered = False
    try:
        yield shards[-1].words if shards else slice(None)
    finally:
        for words in shards:
            words.gathered = True


def _rule(module: nn.Module) -> Rule | None:
    kind = type(module)
    return RULES.get(getattr(kind, "_plain", kind))


def _with_equal_gradients(
    model: nn.Module, found: Mapping[str, tuple[nn.Module, Rule]], *, sequence: bool
) -> list[nn.Parameter]:
    """Return the parameters whose gradients are equal on all ranks; other gradients are partial sums."""
    if sequence:  # only the embedding processes all tokens
        return [p for module, _ in found.values() if type(module) in _EMBEDDINGS for p in module.parameters()]
    inside = {id(p) for module, rule in found.values() if rule.region for p in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in inside]


def _share_tokens(model: nn.Module, found: Mapping[str, tuple[nn.Module, Rule]], tokens: _Tokens) -> None:
    """Let each rank process its shard of the tokens between regions."""
    kinds = [type(module) for module, rule in found.values() if rule.words]
    transformers = [module for module in model.modules() if isinstance(module, Transformer)]
    if (
        len(transformers) != 1
        or len(kinds) != 2
        or kinds[0] not in _EMBEDDINGS
        or kinds[1] not in (Head, PredictionHead)
    ):
        raise PlanError(
            f"sequence=True: expected a model with an Embedding and a Head, got {type(model).__name__} with "
            f"{', '.join(kind.__name__ for kind in kinds) or 'neither'}; nearest plan: sequence=False"
        )
    inner = {id(child) for module, rule in found.values() if rule.region for child in module.modules()}
    for module, rule in list(found.values()):
        if rule.words and type(module) in _EMBEDDINGS:
            inner |= {id(child) for child in module.modules()}
            wrap_calls(module, _ShareTokens(tokens))
    for module in model.modules():
        if isinstance(module, Transformer):
            for block in module:
                if id(block) not in inner:
                    wrap_calls(block, _TokenBlock(tokens))
        if isinstance(module, nn.Dropout) and id(module) not in inner:
            wrap_calls(module, _TokenDropout(tokens))
        elif isinstance(module, LoRALinear) and id(module) not in inner:
            module.sharded_dropout = tokens.dropout


def _split(module: nn.Module, rule: Rule, position: Position, layouts: Layouts) -> None:
    ranks = position.size(AXIS)
    parts = {
        path: tuple(function(module, ranks)) for path, function in (*rule.column.items(), *rule.row.items())
    }
    parts |= {name: tuple(function(module, ranks)) for name, (_, function) in rule.tensors.items()}
    if rule.adjust is not None:
        rule.adjust(module, position)
    for path in rule.column:
        linear = module.get_submodule(path)
        for name in ("weight", "bias", "lora_B"):
            if (parameter := linear._parameters.get(name)) is not None:
                layouts.shard(parameter, AXIS, Shard(0, parts[path]), position)
        linear.out_features = len(linear.weight)  # type: ignore[assignment, arg-type]
    for path in rule.row:
        linear = module.get_submodule(path)
        for name in ("weight", "lora_A"):
            if (parameter := linear._parameters.get(name)) is not None:
                layouts.shard(parameter, AXIS, Shard(1, parts[path]), position)
        if isinstance(linear, LoRALinear):
            assert isinstance(linear.weight, nn.Parameter)
            first = layouts.of(linear.weight).boxes(position.mesh, position.cell)[0][1][0]
            linear.sharded_dropout = ShardedDropout(1, first, linear.in_features)
        linear.in_features = linear.weight.shape[1]  # type: ignore[assignment, index]
        if linear._parameters.get("bias") is not None:
            wrap_calls(linear, _SharedBias(ranks))
    for name, (dim, _) in rule.tensors.items():
        layouts.shard(module.get_parameter(name), AXIS, Shard(dim, parts[name]), position)


def _split_words(
    module: nn.Module, rule: Rule, position: Position, layouts: Layouts, tokens: _Tokens | None
) -> None:
    comm, words = position.comm(AXIS), None
    for name in rule.words:
        child: Any = getattr(module, name)
        parameter: Any = child.weight if isinstance(child, nn.Embedding) else child
        if parameter is None:
            continue
        layouts.shard(parameter, AXIS, Shard(0), position)
        words = Words(comm, layouts.of(parameter).shape[0], position, tokens)
        if isinstance(child, nn.Embedding):
            child.num_embeddings = len(child.weight)
            child.padding_idx = words.place(child.padding_idx)
            wrap_calls(child, _EmbedWords(words))
    if words is not None and hasattr(module, "vocabulary"):
        module.__dict__["vocabulary"] = words


# ---- calls ----


class _Region:
    """Wraps a region: its inputs enter, and its output is the sum of all ranks' outputs."""

    def __init__(self, comm: AxisCommunicator | None, inputs: int) -> None:
        self._comm, self._inputs = comm, inputs

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs, rest, kwargs = _leading(module, self._inputs, args, kwargs)
        entering = [copy_to_all(each, self._comm) for each in inputs]
        return sum_of_all(call(*entering, *rest, **kwargs), self._comm)


def _leading(
    module: nn.Module, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the first `count` arguments of a call, some of which may be named, the other positional arguments, and named ones."""
    if len(args) < count and kwargs:
        names = list(inspect.signature(module.forward).parameters)
        kwargs = dict(kwargs)
        while len(args) < count and names[len(args)] in kwargs:
            args = (*args, kwargs.pop(names[len(args)]))
    if len(args) < count:
        raise TypeError(
            f"{type(module).__name__}: expected {count} inputs of a tensor-parallel region, got {len(args)}; pass them "
            "first, or name them as `forward` does"
        )
    return args[:count], args[count:], kwargs


class _Tokens:
    """The tokens that ranks share: those of (batch, positions), numbered along both dimensions.

    The shape belongs to a forward pass, so it is that of the pass's `SequenceInfo`.  Passes may overlap: a recomputation runs a
    block of an earlier pass.  A pipeline stage without the embedding has the shape, too.
    """

    def __init__(self, comm: AxisCommunicator | None) -> None:
        self.comm = comm
        self._shape = (0, 0)  # in the running block

    @contextmanager
    def of_pass(self, args: Iterable[Any]) -> Iterator[None]:
        """Return a context for the call of a block; its arguments `args` contain the `SequenceInfo` of the pass."""
        before = self._shape
        shapes = [each.shape for each in args if isinstance(each, SequenceInfo)]
        self._shape = next((shape for shape in shapes if shape is not None), before)
        try:
            yield
        finally:
            self._shape = before

    @property
    def count(self) -> int:
        """The number of tokens of all ranks."""
        return self._shape[0] * self._shape[1]

    def gather(self, shard: Tensor) -> Tensor:
        """Return the hidden states (batch, positions, width) of all tokens; gradients are summed."""
        return gather_and_reduce(shard, self.count, self.comm).view(*self._shape, -1)

    def reduce(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens (tokens, width) of the sum of all ranks' hidden states."""
        return reduce_and_gather(hidden.flatten(0, 1), self.comm)

    def take(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens (tokens, width) of hidden states that are equal on all ranks."""
        return slice_of_same(hidden.flatten(0, 1), self.comm)

    def dropout(self, x: Tensor, probability: float, training: bool = True) -> Tensor:
        """Drop elements of this rank's tokens (tokens, width), with the mask that one process would draw for all tokens."""
        first = own_rows(self.count, self.comm).start if self.comm is not None else 0
        return ShardedDropout(0, first, self.count)(x, probability, training)


class _ShareTokens:
    """Wraps the embedding: each rank continues with its shard of the tokens."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._tokens.take(call(*args, **kwargs))


class _TokenBlock:
    """Wraps a block, in which each rank has its shard of the tokens."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._tokens.of_pass((*args, *kwargs.values())):
            return call(*args, **kwargs)


class _TokenRegion:
    """Wraps a region: the tokens of all ranks enter, and each rank leaves with its tokens of the sum."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        (shard,), rest, kwargs = _leading(module, 1, args, kwargs)
        with self._tokens.of_pass((*rest, *kwargs.values())):  # a recomputation may run the region alone
            return self._tokens.reduce(call(self._tokens.gather(shard), *rest, **kwargs))


class _TokenDropout:
    """Wraps dropout between regions: each rank draws the mask of all tokens, and applies its part."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert isinstance(module, nn.Dropout)
        (x,), _, _ = _leading(module, 1, args, kwargs)
        return self._tokens.dropout(x, module.p, module.training)


class _SharedBias:
    """Wraps a linear layer that is split by rows: each rank adds an equal part of the bias."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bias = module._parameters["bias"]
        assert bias is not None
        module._parameters["bias"] = bias / self._ranks  # type: ignore[assignment]
        try:
            return call(*args, **kwargs)
        finally:
            module._parameters["bias"] = bias


class _GatherHead:
    """Wraps a projection of queries, keys and values if several ranks share a key-value head.

    Each of these ranks projects a part of the head's keys and values, and receives the other parts from the other ranks.
    """

    def __init__(self, attention: SelfAttention, position: Position, ranks: int) -> None:
        self._width, self._ranks = attention.head_width, ranks
        first = position.coordinate(AXIS) // ranks * ranks
        self._comm = position.part_of(AXIS, range(first, first + ranks))

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        projected: Tensor = call(*args, **kwargs)
        part = self._width // self._ranks
        query, own = projected.split((projected.shape[-1] - 2 * part, 2 * part), -1)
        every = gather_and_reduce(own[None], self._ranks, self._comm)  # (ranks, ..., keys and values)
        both = every.unflatten(-1, (2, part)).movedim(0, -2)  # (..., 2, ranks, part)
        return torch.cat((query, both.flatten(-3)), -1)


class Words(Vocabulary):
    """The operations on a vocabulary of `count` words that is split over ranks; this rank has the slice `words` of it."""

    gathered = True
    """Whether `logits` returns the logits of all words, instead of this rank's words (`sharded_logits`)."""

    def __init__(
        self,
        comm: AxisCommunicator | None,
        count: int,
        position: Position,
        tokens: _Tokens | None = None,
    ) -> None:
        self.comm, self.count, self.tokens = comm, count, tokens
        ranks = position.size(AXIS)
        self.words = slice(*chunk(count, ranks, position.coordinate(AXIS)))
        self._shard = VocabularyShard(self.words.start, count, -(-count // ranks), self._all_statistics)

    def place(self, word: int | None) -> int | None:
        """Return the index of a word among this rank's words, or None if another rank has the word."""
        if word is None or not self.words.start <= word < self.words.stop:
            return None
        return word - self.words.start

    def _all_statistics(self, own: Tensor) -> Tensor:
        if self.comm is None:
            return own[None]
        every = own.new_empty((self.comm.size, *own.shape))
        self.comm.all_gather(every, own.contiguous())
        return every

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the embeddings of tokens."""
        hidden = self.embed_with(lambda places: nn.functional.embedding(places, weight), tokens, len(weight))
        return hidden if self.tokens is None else self.tokens.take(hidden)

    def embed_with(self, embed: Callable[[Tensor], Tensor], tokens: Tensor, count: int) -> Tensor:
        """Return the embeddings of tokens, where `embed` maps indices into this rank's `count` words to embeddings."""
        self._shard.check(tokens)
        places, outside = self._shard.local(tokens, count)
        return sum_of_all(embed(places).masked_fill(outside[..., None], 0), self.comm)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of all words, or of this rank's words."""
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
        """Return the summed cross-entropy and the number of targets."""

        def enter(x: Tensor) -> Tensor:
            return self._enter(x if before is None else before(x))

        if self.tokens is not None:
            return head_loss(enter(hidden), targets, weight, bias, shard=self._shard)
        return head_loss(hidden, targets, weight, bias, before=enter, shard=self._shard)

    def _enter(self, hidden: Tensor) -> Tensor:
        return copy_to_all(hidden, self.comm) if self.tokens is None else self.tokens.gather(hidden)


class _EmbedWords:
    """Wraps an embedding that is split by words."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert isinstance(module, nn.Embedding)
        (tokens,), _, _ = _leading(module, 1, args, kwargs)
        return self._words.embed_with(call, tokens, module.num_embeddings)
