"""Split the modules of a model according to their rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from farandole.layout import Shard
from farandole.memory.call_wrappers import wrap_calls
from farandole.models.deepseek import PredictionHead
from farandole.models.dropout import ShardedDropout
from farandole.models.layers import Head
from farandole.models.sequence import Transformer
from farandole.parallel.axes import AxisCommunicator, Layouts, Position
from farandole.parallel.lora.layer import LoRALinear
from farandole.parallel.tensor.regions import AXIS, Region, SharedBias, enter_at
from farandole.parallel.tensor.rules import EMBEDDINGS, Indivisible, Rule, rule_of
from farandole.parallel.tensor.tokens import ShareTokens, TokenBlock, TokenDropout, TokenRegion, Tokens
from farandole.parallel.tensor.vocabulary import ParallelEmbedding, ParallelVocabulary
from farandole.plan import Plan, PlanError


def apply(model: nn.Module, position: Position, plan: Plan, layouts: Layouts) -> None:
    """Split each module of `model` that has a rule; the parts are distributed over the ranks of the tensor axis.

    Raises:
        PlanError: if no module has a rule, or if a module cannot be split over this number of ranks; the message
            contains the nearest possible sizes of the axis.
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
    for parameter in _with_equal_gradients(model, found, sequence=plan.sequence):
        layouts.equal_gradients(parameter, AXIS)
    tokens = Tokens(position.comm(AXIS)) if plan.sequence else None
    if tokens is not None:
        _share_tokens(model, found, tokens)
    for path, (module, rule) in found.items():
        try:
            _split(module, rule, position, layouts)
        except Indivisible as error:
            near = sorted(error.nearest, key=lambda n: abs(n - ranks))[:2]
            raise PlanError(
                f"tensor={ranks}: {path} has {error}, which cannot be split over {ranks} ranks; nearest plans: "
                + ", ".join(f"tensor={n}" for n in sorted(near))
            ) from error
    comm = position.comm(AXIS)
    for path, (module, rule) in found.items():
        if rule.region and not any(
            path.startswith(f"{other}.") and found[other][1].region for other in found
        ):
            wrap_calls(module, _region(module, rule, comm, plan) if tokens is None else TokenRegion(tokens))
        if rule.vocabulary:
            _split_vocabulary(module, rule, position, layouts, tokens)


def _region(module: nn.Module, rule: Rule, comm: AxisCommunicator | None, plan: Plan) -> Region:
    # pipeline schedules compute input gradients before weight gradients, but a fused layer computes both together
    if rule.overlaps and plan.pipeline == 1 and enter_at(module.get_submodule(next(iter(rule.column))), comm):
        return Region(comm, 0)
    return Region(comm, rule.inputs)


def _with_equal_gradients(
    model: nn.Module, found: Mapping[str, tuple[nn.Module, Rule]], *, sequence: bool
) -> list[nn.Parameter]:
    """Return the parameters whose gradients are equal on all ranks; other gradients are partial sums."""
    if sequence:  # only the embedding processes all tokens
        return [p for module, _ in found.values() if type(module) in EMBEDDINGS for p in module.parameters()]
    inside = {id(p) for module, rule in found.values() if rule.region for p in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in inside]


def _share_tokens(model: nn.Module, found: Mapping[str, tuple[nn.Module, Rule]], tokens: Tokens) -> None:
    """Let each rank process its shard of the tokens between regions."""
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
            wrap_calls(module, TokenDropout(tokens))
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
                outputs = max(parameter.dim() - 2, 0)  # in a stack of experts, dimension 0 is the expert
                layouts.shard(parameter, AXIS, Shard(outputs, parts[path]), position)
        linear.out_features = linear.weight.shape[-2]  # type: ignore[assignment, index]
    for path in rule.row:
        linear = module.get_submodule(path)
        for name in ("weight", "lora_A"):
            if (parameter := linear._parameters.get(name)) is not None:
                layouts.shard(parameter, AXIS, Shard(parameter.dim() - 1, parts[path]), position)
        if isinstance(linear, LoRALinear):
            assert isinstance(linear.weight, nn.Parameter)
            first = layouts.of(linear.weight).boxes(position.mesh, position.cell)[0][1][0]
            linear.sharded_dropout = ShardedDropout(1, first, linear.in_features)
        linear.in_features = linear.weight.shape[-1]  # type: ignore[assignment, index]
        if linear._parameters.get("bias") is not None:
            wrap_calls(linear, SharedBias(ranks))
    for name, (dim, _) in rule.tensors.items():
        layouts.shard(module.get_parameter(name), AXIS, Shard(dim, parts[name]), position)


def _split_vocabulary(
    module: nn.Module, rule: Rule, position: Position, layouts: Layouts, tokens: Tokens | None
) -> None:
    comm, vocabulary = position.comm(AXIS), None
    for name in rule.vocabulary:
        child: Any = getattr(module, name)
        parameter: Any = child.weight if isinstance(child, nn.Embedding) else child
        if parameter is None:
            continue
        layouts.shard(parameter, AXIS, Shard(0), position)
        vocabulary = ParallelVocabulary(comm, layouts.of(parameter).shape[0], position, tokens)
        if isinstance(child, nn.Embedding):
            child.num_embeddings = len(child.weight)
            child.padding_idx = vocabulary.local_index(child.padding_idx)
            wrap_calls(child, ParallelEmbedding(vocabulary))
    if vocabulary is not None and hasattr(module, "vocabulary"):
        module.__dict__["vocabulary"] = vocabulary
