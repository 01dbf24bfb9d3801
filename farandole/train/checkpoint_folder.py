"""What a checkpoint is on the disk, for whoever looks without torch.

A checkpoint is a folder `step-000123` in `checkpoints/` of its run:

    train.json           step, samples consumed, ranks, precision, loss scale, configuration, topology: plain JSON
    state/               torch distributed checkpoint: weights, optimizer, random generators of all ranks
    model.safetensors    the weights alone
    tokenizer.json

A folder gets its name when all that is in it has been flushed, so that what has the name is whole, unless
somebody copied or deleted a part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.parallel.checkpoint.errors import CheckpointError

STATE, WEIGHTS, FACTS, TOKENIZER = "state", "model.safetensors", "train.json", "tokenizer.json"
STATE_INDEX = "state/.metadata"


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about its run besides tensors."""

    step: int
    consumed: int
    ranks: int
    precision: str
    loss_scale: float
    good_steps: int
    elapsed_s: float
    config: dict[str, Any]
    topology: dict[str, Any] = field(default_factory=dict)
    """The plan under which it was written, as `data` and `zero`: for people, as any other plan can go on from it."""


def read_facts(folder: Path) -> Facts:
    """The facts of checkpoint `folder`.  Raises `CheckpointError` where it is not a whole checkpoint."""
    try:
        return Facts(**json.loads((folder / FACTS).read_text()))
    except OSError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: {FACTS}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {FACTS} is damaged: {error}") from None


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((path for path in found if path.name.removeprefix("step-").isdecimal()), key=step_of)


def check_whole(folder: Path) -> None:
    """Raise `CheckpointError` where a part of checkpoint `folder` is missing or cut off, naming the one before it."""
    missing = [name for name in (FACTS, STATE_INDEX, WEIGHTS, TOKENIZER) if not (folder / name).is_file()]
    if missing:
        raise damaged(folder, f"{', '.join(missing)} missing")
    has, needs = (folder / WEIGHTS).stat().st_size, _length_of_safetensors(folder / WEIGHTS)
    if has != needs:
        raise damaged(folder, f"{WEIGHTS} has {has} bytes, and {needs or 'more'} by its header")


def damaged(folder: Path, why: str) -> CheckpointError:
    """The error of a checkpoint that cannot be read; it names the one before it."""
    before = [path for path in checkpoints(folder.parent.parent) if step_of(path) < step_of(folder)]
    advice = f"; the checkpoint before it: --resume {before[-1]}" if before else ""
    return CheckpointError(f"checkpoint {folder} is damaged: {why}{advice}")


def _length_of_safetensors(path: Path) -> int:
    """How long a file of tensors is by its header; 0 if that is not whole."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length < path.stat().st_size else {}
        except ValueError:
            return 0
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0) if header else 0


def folder_name(step: int) -> str:
    """What the checkpoint after `step` steps is called."""
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """After how many steps a checkpoint was made, by its name."""
    return int(checkpoint.name.removeprefix("step-"))
