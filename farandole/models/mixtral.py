"""Mixtral: a Llama with a mixture of experts in place of each feed-forward network (Jiang et al., 2024, "Mixtral of Experts")."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.models.layers import initialize
from farandole.models.llama import LlamaConfig, llama
from farandole.models.moe import Experts, MixtureOfExperts, TopKRouter
from farandole.models.sequence import Transformer


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """The shape of a Mixtral: `experts` networks of width `inner`, of which `top` process each token."""

    experts: int = 8
    top: int = 2
    jitter: float = 0.0


def mixtral(config: MixtralConfig) -> Transformer:
    """Return a Mixtral whose weights torch's layers have initialized."""

    def experts() -> MixtureOfExperts:
        return MixtureOfExperts(
            TopKRouter(config.width, config.experts, config.top, config.jitter),
            Experts(config.experts, config.width, config.inner, config.activation),
        )

    return llama(config, experts)


def build_mixtral(config: MixtralConfig) -> Transformer:
    """Return a Mixtral with initial weights drawn from torch's global generator."""
    model = mixtral(config)
    initialize(model)
    return model
