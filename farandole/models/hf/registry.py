"""Register model families and look them up by name."""

from __future__ import annotations

from functools import cache

from farandole.models.hf.architecture import Architecture


@cache
def families() -> dict[str, Architecture]:
    """Return all model families, keyed by name."""
    # imported here, because only programs that read or write Hugging Face folders need all models
    from farandole.models.hf import decoders, encoders

    return {family.name: family for family in (*decoders.FAMILIES, *encoders.FAMILIES)}


def register(architecture: Architecture) -> None:
    """Add a family, or replace the family with the same name."""
    families()[architecture.name] = architecture


def decoder_names() -> tuple[str, ...]:
    """Return the names of the families that predict the next token."""
    return tuple(name for name, architecture in families().items() if architecture.is_decoder)
