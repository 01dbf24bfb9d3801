"""Map a model's tensors to the tensors in a Hugging Face folder, for reading and writing.

    table = Table()
    table.copy("0.tokens.weight", "model.embed_tokens.weight")
    table.rows("1.attention.qkv.weight", {"...q_proj.weight": 64, "...k_proj.weight": 16, "...v_proj.weight": 16})

Each tensor in the folder fills a box in one model tensor, either unchanged or transposed.  Therefore, any box in a
model tensor can be read separately, and any tensor in the folder can be assembled from the ranks' shards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Box = tuple[tuple[int, int], ...]
"""A range `(start, end)` for each dimension of a tensor."""

Index = int | tuple[int, int]
"""A range `(start, end)` in a dimension of a model tensor, or an index if the folder's tensor lacks this dimension."""


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - start for start, end in box)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if the intersection is empty."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(start < end for start, end in common) else None


@dataclass(frozen=True)
class Part:
    """A tensor in a folder, which fills a box of a model tensor.

    Args:
        name: the name of the tensor in the folder.
        index: the box's ranges or indices in the leading dimensions.  The box spans all other dimensions.
        transposed: whether the last two dimensions are swapped in the folder.
    """

    name: str
    index: tuple[Index, ...] = ()
    transposed: bool = False

    def box(self, shape: Sequence[int]) -> Box:
        """Return the box that this part fills in a model tensor with shape `shape`."""
        ranges = [(each, each + 1) if isinstance(each, int) else each for each in self.index]
        return (*ranges, *((0, length) for length in shape[len(ranges) :]))

    def dropped(self) -> int:
        """Return the number of leading dimensions of the model tensor that the folder's tensor lacks."""
        return sum(isinstance(each, int) for each in self.index)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the folder's tensor, for a model tensor with shape `shape`."""
        own = tuple(end - start for start, end in self.box(shape))[self.dropped() :]
        return (*own[:-2], own[-1], own[-2]) if self.transposed else own


@dataclass
class Table:
    """Maps each model tensor to one or more tensors in the folder.

    Args:
        prefix: a prefix of tensor names, which is missing in folders that were saved without the model's head.
        ignored: regular expressions for tensors in the folder that the model does not use.
        renamed: pairs (regular expression, replacement) that convert names in older files to names in the table.
        modules: pairs (regular expression, replacement) that convert module names in a folder to module names in
            `transformers`.
    """

    prefix: str = ""
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set, init=False, repr=False)
    _known_parts: int = field(default=0, init=False, repr=False)

    def copy(self, ours: str, theirs: str, *, transposed: bool = False) -> None:
        """Map the model tensor `ours` to the tensor `theirs` in the folder."""
        self.parts[ours] = (Part(theirs, (), transposed),)

    def rows(self, ours: str, theirs: Mapping[str, int]) -> None:
        """Map the model tensor `ours` to tensors in the folder, concatenated along dimension 0.

        `theirs` maps each tensor's name in the folder to its number of rows.
        """
        self.parts[ours] = tuple(Part(name, (span,)) for name, span in _spans(theirs))

    def stack(self, ours: str, theirs: Sequence[Mapping[str, int]]) -> None:
        """Map the model tensor `ours` (n, rows, ...) to a stack of n concatenations of tensors in the folder.

        `theirs[i]` describes the slice `ours[i]`.  It maps each tensor's name to its number of rows.
        """
        self.parts[ours] = tuple(
            Part(name, (number, span)) for number, rows in enumerate(theirs) for name, span in _spans(rows)
        )

    def linear(self, ours: str, theirs: str, *, bias: bool = False, transposed: bool = False) -> None:
        """Map a linear layer or a normalization to its counterpart in the folder."""
        self.copy(f"{ours}.weight", f"{theirs}.weight", transposed=transposed)
        if bias:
            self.copy(f"{ours}.bias", f"{theirs}.bias")

    def linears(self, ours: str, theirs: Mapping[str, int], *, bias: bool = False) -> None:
        """Map the fused linear layer `ours` to several layers in the folder.

        `theirs` maps each layer's name in the folder to its number of outputs.
        """
        for kind in ("weight", "bias") if bias else ("weight",):
            self.rows(f"{ours}.{kind}", {f"{name}.{kind}": rows for name, rows in theirs.items()})

    def is_ignored(self, name: str) -> bool:
        """Return whether an expression in `ignored` matches the tensor name."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def standard(self, name: str) -> str:
        """Convert a tensor name in a folder to the corresponding name in the table.

        The folder may use an older name or omit `prefix`.
        """
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        if self.prefix and not name.startswith(self.prefix) and self._is_known(self.prefix + name):
            return self.prefix + name
        return name

    def module(self, path: str) -> str:
        """Convert a module name from a folder's tensor names to the corresponding module name in `transformers`."""
        for pattern, replacement in self.modules:
            path = re.sub(pattern, replacement, path)
        return path

    def _is_known(self, name: str) -> bool:
        if self._known_parts != len(self.parts):
            self._known = {part.name for parts in self.parts.values() for part in parts}
            self._known_parts = len(self.parts)
        return name in self._known


def _spans(rows: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    start = 0
    for name, count in rows.items():
        yield name, (start, start + count)
        start += count
