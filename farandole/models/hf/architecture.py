"""Define model families, each with a configuration, a builder and a tensor table."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
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
        table: a function that returns the tensor table.
        matches: a function that returns whether a configuration belongs to this family, if several families share a type.
        adapt: a function that adapts the configuration to the tensors in a folder, if some tensors are optional.
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
    """Read the rotary positions from a configuration, for heads with `width` values.

    Reads `rope_parameters` (transformers 5), or `rope_theta`, `rope_scaling` and `partial_rotary_factor` (earlier
    versions).

    Args:
        partial: whether transformers applies `partial_rotary_factor` in this family, so that a part of each head is
            rotated.

    Raises:
        FolderError: if the scaling or the rotation of a part is not supported.
    """
    found = dict(fields.take("rope_parameters", None, kind=dict) or {})
    older = dict(fields.take("rope_scaling", None, kind=dict) or {})
    theta = fields.take("rope_theta", base, kind=float)
    share = fields.take("partial_rotary_factor", 1.0, kind=float)
    context = fields.take("max_position_embeddings", None, kind=int)
    own = Fields({**older, **found}, f"{fields.where}, rope_parameters,")
    kind = own.take("rope_type", None, kind=str) or own.take("type", "default", kind=str)
    own.skip("type")
    theta = own.take("rope_theta", theta, kind=float)
    share = own.take("partial_rotary_factor", share, kind=float)
    if share != 1 and not partial:
        raise FolderError(
            f"{own.where} has partial_rotary_factor={share}, which transformers ignores in this family: expected 1"
        )
    options: dict[str, Any] = {"base": float(theta), "interleaved": interleaved}
    if kind == "linear":
        options |= {"scaling": kind, "factor": float(own.take("factor", kind=float))}
    elif kind == "dynamic":
        own.skip("original_max_position_embeddings")
        options |= {
            "scaling": kind,
            "factor": float(own.take("factor", kind=float)),
            "original": _context(fields),
        }
    elif kind == "llama3":
        options |= {
            "scaling": kind,
            "factor": float(own.take("factor", kind=float)),
            "original": own.size("original_max_position_embeddings"),
            "slow": float(own.take("low_freq_factor", kind=float)),
            "fast": float(own.take("high_freq_factor", kind=float)),
        }
    elif kind == "yarn":
        original = own.size("original_max_position_embeddings", context)
        factor = float(own.take("factor", (context or original) / original, kind=float))
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
            "slow": float(own.take("beta_slow", 1.0, kind=float)),
            "fast": float(own.take("beta_fast", 32.0, kind=float)),
            "magnitude": float(magnitude),
            "truncate": own.take("truncate", True, kind=bool),
        }
    elif kind == "longrope":
        original = own.size("original_max_position_embeddings", context)
        factor = float(own.take("factor", (context or original) / original, kind=float))
        recommended = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        options |= {
            "scaling": kind,
            "factor": factor,
            "original": original,
            "magnitude": float(own.take("attention_factor", recommended, kind=float)),
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
    """Return YaRN's recommended sine and cosine magnitude for an extension by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def write_rotary(rotary: Rotary, width: int) -> dict[str, Any]:
    """Return `rope_parameters`, and the equivalent fields for earlier versions of transformers."""
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
