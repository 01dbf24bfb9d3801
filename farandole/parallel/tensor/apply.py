"""Split the modules of a model according to their rules."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from farandole.layout import Layout, Part, Shard
from farandole.memory.call_wrappers import wrap_calls
from farandole.models.deepseek import PredictionHead
from farandole.models.dropout import DropoutWrapper, ShardedDropout
from farandole.models.layers import Head
from farandole.models.sequence import Transformer
from farandole.parallel.axes import AxisCommunicator, Layouts, Position
from farandole.parallel.lora.layer import LoRALinear
from farandole.parallel.tensor.random_draws import warn_of_draws
from farandole.parallel.tensor.regions import AXIS, Region, SharedBias, enter_at
from farandole.parallel.tensor.rules import (
    BUILT_IN,
    EMBEDDINGS,
    Indivisible,
    Parts,
    Rule,
    Split,
    parts_of,
    rule_of,
    vocabulary_of,
)
from farandole.parallel.tensor.tokens import ShareTokens, TokenBlock, TokenRegion, Tokens
from farandole.parallel.tensor.vocabulary import ParallelEmbedding, ParallelVocabulary
from farandole.plan import Plan, PlanError

Found = Mapping[str, tuple[nn.Module, Rule]]
"""The modules that have a rule, with the rule, by path."""


def apply(model: nn.Module, position: Position, plan: Plan, layouts: Layouts) -> None:
    """Shard the modules of `model` over the tensor axis, according to their rules.

    Raises:
        PlanError: if no module has a rule, if a region contains dropout that its rule does not describe, or if a module
            cannot be split over this number of ranks; the message contains the nearest possible sizes of the axis.
    """
    ranks = position.size(AXIS)
    if ranks == 1:
        return
    found = {path: (module, rule) for path, module in model.named_modules() if (rule := rule_of(module))}
    if not any(rule.region for _, rule in found.values()):
        raise PlanError(
            f"tensor={ranks}: {type(model).__name__} has no module with a rule for tensor parallelism; nearest plan: "
            "tensor=1, or add rules with farandole.parallel.tensor.register"
        )
    described = _described(found)
    _check_dropout(found, described, ranks)
    parts = _parts_of_all(found, ranks)
    for parameter in _with_equal_gradients(model, found, sequence=plan.sequence):
        layouts.equal_gradients(parameter, AXIS)
    tokens = Tokens(position.comm(AXIS)) if plan.sequence else None
    if tokens is not None:
        _share_tokens(model, found, tokens)
    for path, (module, rule) in found.items():
        _split(module, rule, parts[path], position, layouts)
    comm = position.comm(AXIS)
    for path, (module, rule) in found.items():
        if rule.region and rule not in BUILT_IN:
            layers = [layer for layer in module.modules() if id(layer) in described]
            warn_of_draws(module, path or type(module).__name__, layers)
        if rule.region and not any(
            path.startswith(f"{other}.") and found[other][1].region for other in found
        ):
            wrap_calls(module, _region(module, rule, comm, plan) if tokens is None else TokenRegion(tokens))
        if rule.vocabulary:
            _split_vocabulary(module, rule, position, layouts, tokens)


def _check_dropout(found: Found, described: Mapping[int, tuple[int, Parts] | None], ranks: int) -> None:
    """Raise `PlanError` unless the rules describe all dropout layers in regions."""
    # ranks with different shards need different masks
    for path, (module, rule) in found.items():
        for name, layer in module.named_modules() if rule.region else ():
            if not isinstance(layer, _DropoutNd) or not layer.p:
                continue
            where = f"tensor={ranks}: {f'{path}.{name}'.lstrip('.')} in a {type(module).__name__}"
            if id(layer) not in described:
                raise PlanError(
                    f"{where} is a dropout layer with p={layer.p}, but the rule does not describe its input; nearest plan: "
                    f"tensor=1, or add {name!r} to Rule.dropout: the split dimension and its parts, or None if the "
                    "input is not split"
                )
            if described[id(layer)] is not None and not isinstance(layer, nn.Dropout):
                raise PlanError(
                    f"{where}: expected nn.Dropout for a split input, got {type(layer).__name__}; nearest plan: tensor=1, "
                    "or use nn.Dropout"
                )


def _described(found: Found) -> dict[int, tuple[int, Parts] | None]:
    """Return a dict that maps the `id` of each dropout layer that a rule describes to the split of its input."""
    return {
        id(module.get_submodule(path)): split
        for module, rule in found.values()
        for path, split in rule.dropout.items()
    }


def _parts_of_all(found: Found, ranks: int) -> dict[str, Split]:
    """Return a dict that maps each module's path to the parts of its split layers and parameters."""
    parts = {}
    for path, (module, rule) in found.items():
        try:
            parts[path] = parts_of(module, rule, ranks)
        except Indivisible as error:
            by_distance = sorted(error.nearest, key=lambda n: abs(n - ranks))
            near = sorted(islice((n for n in by_distance if _can_split(found, n)), 2)) or [1]
            raise PlanError(
                f"tensor={ranks}: {path or type(module).__name__} has {error}, which cannot be split over {ranks} "
                f"ranks; nearest {'plan' if len(near) == 1 else 'plans'}: "
                + ", ".join(f"tensor={n}" for n in near)
            ) from error
    return parts


def _can_split(found: Found, ranks: int) -> bool:
    try:
        for module, rule in found.values():
            parts_of(module, rule, ranks)
    except Indivisible:
        return False
    return True


def _region(module: nn.Module, rule: Rule, comm: AxisCommunicator | None, plan: Plan) -> Region:
    # pipeline schedules compute input gradients before weight gradients, but a fused layer computes both together
    if rule.overlaps and plan.pipeline == 1 and enter_at(module.get_submodule(next(iter(rule.column))), comm):
        return Region(comm, 0)
    return Region(comm, rule.inputs)


def _with_equal_gradients(model: nn.Module, found: Found, *, sequence: bool) -> list[nn.Parameter]:
    """Return the parameters whose gradients are equal on all ranks; other gradients are partial sums."""
    if sequence:  # only the embedding processes all tokens
        return [p for module, _ in found.values() if type(module) in EMBEDDINGS for p in module.parameters()]
    inside = {id(p) for module, rule in found.values() if rule.region for p in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in inside]


def _share_tokens(model: nn.Module, found: Found, tokens: Tokens) -> None:
    """Make each rank process only its shard of the tokens between regions."""
    kinds = [type(module) for module, rule in found.values() if rule.vocabulary]
    transformers = [module for module in model.modules() if isinstance(module, Transformer)]
    if (
        len(transformers) != 1
        or len(kinds) != 2
        or kinds[0] not in EMBEDDINGS
        or kinds[1] not in (Head, PredictionHead)
    ):
        raise PlanError(
            f"sequence=True: expected a model with an Embedding and a Head, got {type(model).__name__} with "
            f"{', '.join(kind.__name__ for kind in kinds) or 'neither'}; nearest plan: sequence=False"
        )
    inner = {id(child) for module, rule in found.values() if rule.region for child in module.modules()}
    for module, rule in list(found.values()):
        if rule.vocabulary and type(module) in EMBEDDINGS:
            inner |= {id(child) for child in module.modules()}
            wrap_calls(module, ShareTokens(tokens))
    for module in model.modules():
        if isinstance(module, Transformer):
            for block in module:
                if id(block) not in inner:
                    wrap_calls(block, TokenBlock(tokens))
        if isinstance(module, nn.Dropout) and id(module) not in inner:
            wrap_calls(module, DropoutWrapper(tokens.dropout))
        elif isinstance(module, LoRALinear) and id(module) not in inner:
            module.sharded_dropout = tokens.dropout


def _split(module: nn.Module, rule: Rule, parts: Split, position: Position, layouts: Layouts) -> None:
    if rule.adjust is not None:
        rule.adjust(module, position)
    for path in rule.column:
        linear = module.get_submodule(path)
        for name in ("weight", "bias", "lora_B"):
            if (parameter := linear._parameters.get(name)) is not None:
                outputs = max(parameter.dim() - 2, 0)  # in a stack of experts, dimension 0 is the expert
                layouts.shard(parameter, AXIS, Shard(outputs, parts[path]), position)
        linear.out_features = linear.weight.shape[-2]  # type: ignore[assignment, index]
    for path in rule.row:
        linear = module.get_submodule(path)
        for name in ("weight", "lora_A"):
            if (parameter := linear._parameters.get(name)) is not None:
                layouts.shard(parameter, AXIS, Shard(parameter.dim() - 1, parts[path]), position)
        if isinstance(linear, LoRALinear):
            linear.sharded_dropout = _sharded_dropout(1, parts[path], position)
        linear.in_features = linear.weight.shape[-1]  # type: ignore[assignment, index]
        if linear._parameters.get("bias") is not None:
            wrap_calls(linear, SharedBias(position.size(AXIS)))
    for name, (dim, _) in rule.tensors.items():
        layouts.shard(module.get_parameter(name), AXIS, Shard(dim, parts[name]), position)
    for path, split in rule.dropout.items():
        layer = module.get_submodule(path)
        if split is not None and isinstance(layer, nn.Dropout):
            wrap_calls(layer, DropoutWrapper(_sharded_dropout(split[0], parts[path], position)))


def _sharded_dropout(dim: int, parts: tuple[Part, ...], position: Position) -> ShardedDropout:
    """Return the dropout for this rank's shard of dimension `dim`; the whole dimension consists of `parts`."""
    total = sum(part.size for part in parts)
    boxes = Layout("dropout", (total,), shards=((AXIS, Shard(0, parts)),)).boxes(position.mesh, position.cell)
    return ShardedDropout(dim, tuple(box[0] for box in boxes), total)


def _split_vocabulary(
    module: nn.Module, rule: Rule, position: Position, layouts: Layouts, tokens: Tokens | None
) -> None:
    comm, vocabulary = position.comm(AXIS), None
    for child, parameter in vocabulary_of(module, rule):
        layouts.shard(parameter, AXIS, Shard(0), position)
        vocabulary = ParallelVocabulary(comm, layouts.of(parameter).shape[0], position, tokens)
        if isinstance(child, nn.Embedding):
            child.num_embeddings = len(child.weight)
            child.padding_idx = vocabulary.local_index(child.padding_idx)
            wrap_calls(child, ParallelEmbedding(vocabulary))
    if vocabulary is not None and hasattr(module, "vocabulary"):
        module.__dict__["vocabulary"] = vocabulary
