"""Mixtral: Llama with mixtures of experts as feed-forward networks (Jiang et al., 2024, "Mixtral of Experts")."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.models.layers import initialize
from farandole.models.llama import LlamaConfig, llama
from farandole.models.moe import Balance, Experts, MixtureOfExperts, TopKRouter
from farandole.models.sequence import Transformer


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """The configuration of a Mixtral model.

    Args:
        experts: the number of experts per layer.  Each expert is a feed-forward network of width `inner`.
        top: the number of experts that process each token.
        jitter: the amplitude of the noise on the router's input during training; see `moe.TopKRouter`.
        balance: the settings for load balancing.
    """

    experts: int = 8
    top: int = 2
    jitter: float = 0.0
    balance: Balance = Balance()


def mixtral(config: MixtralConfig) -> Transformer:
    """Return a Mixtral model without the weight initialization of `build_mixtral`."""

    def experts() -> MixtureOfExperts:
        return MixtureOfExperts(
            TopKRouter(config.width, config.experts, config.top, config.jitter),
            Experts(config.experts, config.width, config.inner, config.activation),
            balance=config.balance,
        )

    return llama(config, experts)


def build_mixtral(config: MixtralConfig) -> Transformer:
    """Return a Mixtral model with initial weights drawn from torch's global generator."""
    model = mixtral(config)
    initialize(model)
    return model
