"""Define model families, each with a configuration, a builder and a tensor table."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from farandole.models.hf.fields import Fields, FolderError
from farandole.models.hf.mapping import Table
from farandole.models.rotary import SCALINGS, Rotary
from farandole.models.sequence import Transformer


@dataclass(frozen=True)
class Architecture:
    """A model family.

    Args:
        name: the `model_type` in configurations.
        classes: the `transformers` classes that a configuration may name.  The first class is the default, and the
            others must have the same tensors.
        config: the configuration type.
        read: a function that converts the fields in `config.json` to the model's configuration.
        write: a function that converts the model's configuration to `config.json` fields.
        build: a function that returns the model.
        table: a function that returns the table of tensor names in the model and in the folder.
        matches: a function that returns whether a configuration belongs to this family.  Only families that share a
            configuration type need this function.
        adapt: a function that adapts the configuration to the tensors in a folder.  Only families with optional tensors
            need this function.
        defaults: the values that transformers assumes for missing fields, if `read` assumes other values.  A field that
            is null is not missing.
    """

    name: str
    classes: tuple[str, ...]
    config: type
    read: Callable[[Fields], Any]
    write: Callable[[Any], dict[str, Any]]
    build: Callable[[Any], Transformer]
    table: Callable[[Any], Table]
    matches: Callable[[Any], bool] = lambda config: True
    adapt: Callable[[Any, Collection[str]], Any] = lambda config, names: config
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_decoder(self) -> bool:
        """Return whether the models predict the next token."""
        return self.classes[0].endswith(("ForCausalLM", "LMHeadModel"))


# ---- rotary positions ----


def read_rotary(
    fields: Fields,
    width: int,
    *,
    base: float = 10_000.0,
    interleaved: bool = False,
    partial: bool = False,
) -> Rotary:
    """Read the RoPE parameters from a configuration, for heads of dimension `width`.

    Reads `rope_parameters` (transformers 5), or `rope_theta`, `rope_scaling` and `partial_rotary_factor` (earlier
    versions).

    Args:
        partial: whether transformers applies `partial_rotary_factor` in this family, so that only part of each head
            is rotated.

    Raises:
        FolderError: if the scaling is not supported, or if `partial` is false and `partial_rotary_factor` is not 1.
    """
    found = dict(fields.take("rope_parameters", None, kind=dict) or {})
    older = dict(fields.take("rope_scaling", None, kind=dict) or {})
    theta = fields.positive("rope_theta", base)
    share = fields.positive("partial_rotary_factor", 1.0)
    context = fields.take("max_position_embeddings", None, kind=int)
    own = Fields({**older, **found}, f"{fields.where}, rope_parameters,")
    kind = own.take("rope_type", None, kind=str) or own.take("type", "default", kind=str)
    own.skip("type")
    theta = own.positive("rope_theta", theta)
    share = own.positive("partial_rotary_factor", share)
    if share != 1 and not partial:
        raise FolderError(
            f"{own.where} has partial_rotary_factor={share}, which transformers ignores for this model "
            "family: expected 1"
        )
    options: dict[str, Any] = {"base": theta, "interleaved": interleaved}
    if kind == "linear":
        options |= {"scaling": kind, "factor": own.positive("factor")}
    elif kind == "dynamic":
        own.skip("original_max_position_embeddings")
        options |= {
            "scaling": kind,
            "factor": own.positive("factor"),
            "original": _context(fields),
        }
    elif kind == "llama3":
        options |= {
            "scaling": kind,
            "factor": own.positive("factor"),
            "original": own.size("original_max_position_embeddings"),
            "slow": own.positive("low_freq_factor"),
            "fast": own.positive("high_freq_factor"),
        }
    elif kind == "yarn":
        original = own.size("original_max_position_embeddings", context)
        factor = own.positive("factor", (context or original) / original)
        magnitude = own.take("attention_factor", None, kind=float)
        one, all_widths = (own.take(name, None, kind=float) for name in ("mscale", "mscale_all_dim"))
        if magnitude is None:
            magnitude = yarn_magnitude(factor)
            if one and all_widths:
                magnitude = yarn_magnitude(factor, one) / yarn_magnitude(factor, all_widths)
        options |= {
            "scaling": kind,
            "factor": factor,
            "original": original,
            "slow": own.positive("beta_slow", 1.0),
            "fast": own.positive("beta_fast", 32.0),
            "magnitude": float(magnitude),
            "truncate": own.take("truncate", True, kind=bool),
        }
    elif kind == "longrope":
        original = own.size("original_max_position_embeddings", context)
        factor = own.positive("factor", (context or original) / original)
        recommended = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        options |= {
            "scaling": kind,
            "factor": factor,
            "original": original,
            "magnitude": own.positive("attention_factor", recommended),
            "short_factors": tuple(map(float, own.take("short_factor", kind=list))),
            "long_factors": tuple(map(float, own.take("long_factor", kind=list))),
        }
    elif kind != "default":
        raise FolderError(
            f"{own.where} has rope_type={kind!r}, which is not supported (supported: default, {', '.join(SCALINGS)})"
        )
    own.finish()
    return Rotary(int(width * share), **options)


def _context(fields: Fields) -> int:
    return fields.size("max_position_embeddings")


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's recommended scale of sines and cosines for a context that is extended by a factor of `factor`.

    `scale` is `mscale` or `mscale_all_dim` in the configuration.
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def write_rotary(rotary: Rotary, width: int) -> dict[str, Any]:
    """Return the configuration fields for rotary positions, for heads of dimension `width`.

    The fields are `rope_parameters`, and with dynamic scaling also `max_position_embeddings`.
    """
    found: dict[str, Any] = {"rope_type": rotary.scaling or "default", "rope_theta": rotary.base}
    if rotary.width != width:
        found["partial_rotary_factor"] = rotary.width / width
    if rotary.scaling is not None:
        found["factor"] = rotary.factor
    if rotary.scaling in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = rotary.original
    if rotary.scaling in ("yarn", "longrope"):
        found["attention_factor"] = rotary.magnitude
    if rotary.scaling == "longrope":
        found |= {"short_factor": list(rotary.short_factors), "long_factor": list(rotary.long_factors)}
    if rotary.scaling == "yarn":
        found |= {"beta_slow": rotary.slow, "beta_fast": rotary.fast}
        found |= {} if rotary.truncate else {"truncate": False}
    if rotary.scaling == "llama3":
        found |= {"low_freq_factor": rotary.slow, "high_freq_factor": rotary.fast}
    context = {"max_position_embeddings": rotary.original} if rotary.scaling == "dynamic" else {}
    return {"rope_parameters": found, **context}
