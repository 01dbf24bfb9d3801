"""The options of the collectives benchmark, checked before any rank starts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field

import torch

from farandole.bench.collectives.operations import OPERATIONS, Operation
from farandole.bench.options import PICTURES, BenchError, check_choice, check_output
from farandole.comm.dtypes import REDUCTION_NAMES
from farandole.data.wording import counted
from farandole.data.wording import size as in_words
from farandole.launch.control_groups import available_memory

DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    )
}
LARGE = 8 << 10
"""For sizes above this number of bytes, fewer iterations are run."""
_BITS = ("and", "or", "xor")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class CollectivesSetup:
    """Options of the collectives benchmark.

    Sizes double from `min` to at most `max` bytes.  If `iterations` or `warmup` is None, the number of iterations
    depends on the size.  If `backends` is empty, all available backends are measured.  `left_out` maps each backend
    that cannot be measured to the reason.
    """

    operations: tuple[str, ...] = ("all_reduce",)
    backends: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    min: int = 8
    max: int = 4 << 20
    dtype: str = "float32"
    reduction: str = "sum"
    iterations: int | None = None
    warmup: int | None = None
    full: bool = False
    validate: bool = False
    overlap: bool = False
    pin: bool = False
    json: str | None = None
    picture: str | None = None

    @property
    def kind(self) -> torch.dtype:
        """Return the dtype of the elements."""
        return DTYPES[self.dtype]

    def sizes(self, operation: Operation, ranks: int) -> list[int]:
        """Return the message sizes in bytes, or [0] for an operation without a message size.

        Each size is rounded down to a multiple of `operation.unit`, so that the buffers contain complete elements and
        can be divided into equal parts for all ranks.
        """
        if not operation.sized:
            return [0]
        unit = operation.unit(ranks, self.kind.itemsize)
        sizes, size = [], self.min
        while size <= self.max:
            sizes += [size // unit * unit] if size >= unit else []
            size *= 2
        return sizes

    def counts(self, operation: Operation, size: int) -> tuple[int, int]:
        """Return the number of iterations and the number of warm-up iterations.

        The defaults are the same as in the OSU Micro-Benchmarks.
        """
        if operation.is_bandwidth:
            iterations, warmup = (20, 2) if size > LARGE else (100, 10)
        else:
            iterations, warmup = (100, 10) if size > LARGE else (1000, 100)
        return (
            iterations if self.iterations is None else self.iterations,
            warmup if self.warmup is None else self.warmup,
        )

    def check(self, ranks: int) -> None:
        """Raise BenchError for values or combinations of options that no backend supports."""
        for name in self.operations:
            check_choice("--op", name, OPERATIONS)
        check_choice("--dtype", self.dtype, DTYPES)
        check_choice("--reduction", self.reduction, REDUCTION_NAMES)
        if self.reduction in _BITS and self.kind.is_floating_point:
            raise BenchError(
                f"--reduction {self.reduction} requires an integer dtype: add --dtype int32, or use --reduction max"
            )
        for option, number, least in (
            ("--min", self.min, 1),
            ("--iterations", self.iterations, 1),
            ("--warmup", self.warmup, 0),
        ):
            if number is not None and number < least:
                raise BenchError(f"{option}: expected at least {least}, got {number}")
        if self.max < self.min:
            raise BenchError(
                f"--max {in_words(self.max)} is less than --min {in_words(self.min)}; change one of them"
            )
        for name in self.operations:
            self._check_operation(OPERATIONS[name], ranks)
        if self.overlap and (self.full or self.validate):
            raise BenchError("--overlap cannot be combined with --full or --validate: run them separately")
        self._check_files()

    def _check_operation(self, operation: Operation, ranks: int) -> None:
        if operation.messages and ranks < 2:
            raise BenchError(f"--op {operation.name} requires two ranks, got {ranks}; use --ranks 2")
        if operation.messages and self.overlap:
            collectives = ", ".join(name for name, each in OPERATIONS.items() if not each.messages)
            raise BenchError(f"--overlap does not support --op {operation.name}; it supports {collectives}")
        if not self.sizes(operation, ranks):
            unit = operation.unit(ranks, self.kind.itemsize)
            raise BenchError(
                f"--min {self.min} and --max {self.max}: expected a size of at least {unit} bytes for {operation.name} "
                f"of {self.dtype} among {counted(ranks, 'rank')}; use --min {unit} --max {max(unit, self.max)}"
            )

    def _check_files(self) -> None:
        check_output("--json", self.json)
        check_output("--picture", self.picture, PICTURES)
        if self.picture is not None and not any(OPERATIONS[name].sized for name in self.operations):
            raise BenchError(
                f"--picture {self.picture} plots results against sizes, but a barrier has no size; omit --picture"
            )

    def check_memory(self, ranks: int, here: int, copies: int) -> None:
        """Raise BenchError if this host has too little memory for buffers of the largest size.

        Args:
            ranks: the number of ranks in the job.
            here: the number of ranks on this host.
            copies: the number of backends for which each rank allocates buffers in host memory.
        """
        have = available_memory()
        for name in self.operations:
            operation = OPERATIONS[name]
            size = max(self.sizes(operation, ranks))
            need = here * operation.bytes_per_rank(size, ranks) * copies * (1 + self.validate)
            if need > have:
                fits = 1 << max(0, (size * have // need).bit_length() - 1)
                raise BenchError(
                    f"--max {in_words(self.max)}: {name} needs {in_words(need)} for the buffers of "
                    f"{counted(here, 'rank')}, but this host has only {in_words(have)}; use --max "
                    f"{short_size(fits)}"
                )

    def dump(self) -> str:
        """Return the setup as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> CollectivesSetup:
        """Convert the result of `dump` back to a setup."""
        fields = json.loads(text)
        for name in ("operations", "backends"):
            fields[name] = tuple(fields[name])
        return CollectivesSetup(**fields)


def parse_size(option: str, text: str) -> int:
    """Parse a size in bytes such as 8, 1K, 4M or 2G, where 1K is 1024.

    Raises:
        BenchError: if `text` is not a size; the message names `option`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BenchError(f"{option}: expected a size in bytes such as 8, 64K, 4M or 1G, got {text!r}")
    number, suffix = match.groups()
    return int(number) << 10 * " KMGT".index(suffix.upper() or " ")


def short_size(size: int) -> str:
    """Format a size as on the command line: 512, 64K, 4M."""
    for shift, suffix in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size >> shift and size % (1 << shift) == 0:
            return f"{size >> shift}{suffix}"
    return str(size)
