"""Count the floating-point operations of a transformer's forward and backward passes.

A weight in a matrix product needs 6 operations per position: 2 in the forward pass, 2 for the gradient of the input and
2 for the gradient of the weight.  A frozen weight needs 4.  Attention also needs operations for each pair of positions
(Chowdhery et al., 2022, "PaLM", appendix B); masked pairs are counted too.  Recomputation is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from farandole.models.bert import MaskedTokenHead
from farandole.models.deepseek import LatentAttention, PredictionHead, TokenPrediction
from farandole.models.layers import Head, SelfAttention
from farandole.models.moe import GroupedRouter, MixtureOfExperts, TopKRouter
from farandole.models.sequence import Transformer
from farandole.models.t5 import CrossAttention, T5Attention, T5Head
from farandole.models.vit import PatchEmbedding
from farandole.parallel.lora.layer import Adaptable
from farandole.parallel.lora.targets import find_targets, find_trained
from farandole.plan import LoRA, PlanError


@dataclass(frozen=True)
class Flops:
    """The number of floating-point operations in a forward and a backward pass.

    Args:
        position: operations per position of a sequence.  In an encoder-decoder model, the source and target sequences
            are assumed to have equal lengths.
        pair: operations per pair of positions in a sequence.
        target: operations of the output projection per loss target.  The output projection is computed only at
            positions with a target.
    """

    position: float = 0.0
    pair: float = 0.0
    target: float = 0.0

    def of(self, lengths: NDArray[np.int64], samples: float, targets: float) -> float:
        """Return the number of operations for `samples` samples that have `targets` targets in total.

        Args:
            lengths: the lengths of representative sequences.  Each sample is assumed to need the mean number of
                operations of these sequences.
        """
        positions = lengths.astype(np.float64)
        each = float((self.position * positions + self.pair * positions**2).mean())
        return samples * each + targets * self.target


def count_flops(model: nn.Module, lora: LoRA | None = None) -> Flops | None:
    """Return the operation counts of an unsharded transformer, or None for other models.

    Args:
        model: the model before `parallelize`, which may be on the meta device.
        lora: the adapters that `parallelize` will add.

    Raises:
        PlanError: if a pattern of `lora` matches nothing.
    """
    if not isinstance(model, Transformer):
        return None
    adapted, trains = _trained(model, lora)
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    selected: dict[nn.Module, int] = {}  # the number of experts that a position uses, by stack
    for mixture in mixtures:
        selected |= dict.fromkeys((mixture.experts.gate_up, mixture.experts.down), mixture.router.top)
    head = set(model[-1].modules())
    for module in model[-1].modules():
        if isinstance(module, TokenPrediction):  # processes all positions
            head -= set(module.modules())
    position = pair = target = 0.0
    for module in model.modules():
        total = sum(
            share * weight.numel() * (6 if trains(weight) else 4) for weight, share in _products(module)
        )
        if isinstance(module, PatchEmbedding):  # the gradients of images are not computed
            weight, positions = module.patches.weight, module.positions.shape[1]
            total += weight.numel() * (4 if trains(weight) else 2) * (positions - 1) / positions
        if lora is not None and isinstance(module, Adaptable) and module in adapted:
            total += 6 * lora.rank * (module.in_features + module.out_features) * selected.get(module, 1)
        if module in head:
            target += total
        else:
            position += total
        pair += 6 * _scores(module)
    return Flops(position, pair, target)


def _trained(model: nn.Module, lora: LoRA | None) -> tuple[set[nn.Module], Callable[[Tensor], bool]]:
    """Return the layers that get adapters, and a function that returns whether a weight is trained."""
    if lora is None:
        return set(), lambda weight: weight.requires_grad
    try:
        adapted: set[nn.Module] = set(find_targets(model, lora).values())
        modules = find_trained(model, lora).values()
    except ValueError as error:
        raise PlanError(str(error)) from error
    trained = {parameter for module in modules for parameter in module.parameters()}
    return adapted, lambda weight: weight in trained


def _products(module: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Yield each weight matrix of `module`, and the mean number of times that it is applied to a position."""
    if isinstance(module, nn.Linear | MaskedTokenHead | T5Head | TopKRouter | GroupedRouter):
        yield module.weight, 1
    elif isinstance(module, Head):
        yield module.weight, 1 + (len(module.predictions) if isinstance(module, PredictionHead) else 0)
    elif isinstance(module, MixtureOfExperts):
        experts, router = module.experts, module.router
        assert isinstance(router, TopKRouter | GroupedRouter)
        for weight in (experts.gate_up.weight, experts.down.weight):
            yield weight, router.top / experts.count


def _scores(module: nn.Module) -> int:
    """Return the number of multiplications per pair of positions in attention's two matrix products."""
    if isinstance(module, SelfAttention | T5Attention | CrossAttention):
        return 2 * module.out.in_features
    if isinstance(module, LatentAttention):
        return module.query.out_features + module.out.in_features
    return 0
