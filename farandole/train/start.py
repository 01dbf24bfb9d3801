"""Parse a training command, and check everything that can be checked before the ranks start.

The launching process or rank 0 runs the checks once for all ranks.  The checks do not change existing files.  This
module does not import torch, so that mistakes in the command are reported at once.
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from farandole.data.errors import DataError
from farandole.data.sources import find_source
from farandole.data.wording import counted
from farandole.launch.limits import offered_ranks
from farandole.memory.disk import OffloadError
from farandole.plan import MODEL_AXES, PlanError
from farandole.train.config import (
    ConfigError,
    TrainConfig,
    known_keys,
    load_config,
    parse_config,
    plan_config_error,
    presets,
    saved_config,
    with_overrides,
)
from farandole.train.run_folder import (
    BASE,
    TOKENIZER,
    CheckpointError,
    DiskError,
    check_complete,
    check_out,
    checkpoint_to_resume,
    has_results,
    new_run,
    read_metadata,
    weights_file,
)
from farandole.train.tasks import task_path

REFUSALS = (ConfigError, DataError, CheckpointError, DiskError, OffloadError, FloatingPointError)
"""The types of errors that the user can fix.  They are reported without a stack trace."""

CHANGEABLE = (
    "name",
    "out",
    "steps",
    "profile",
    "checkpoint.",
    "evaluate.",
    "log.",
    "sample.",
    "data.cache",
    "plan.data",
    "plan.pipeline",
    "plan.schedule",
    "plan.micro_batches",
    "plan.stage_bytes",
    "plan.tensor",
    "plan.sequence",
    "plan.context",
    "plan.ring",
    "plan.expert",
    "plan.zero",
    "plan.data_shard",
    "plan.recompute",
    "plan.activation_bytes",
    "plan.swap",
    "plan.offload",
)
"""The keys, or prefixes of keys, that can be changed when a run is resumed.  Other changes would affect the results."""


@dataclass(frozen=True)
class Request:
    """A parsed command: at most one preset or file, at most one folder, and `key=value` arguments."""

    source: str | None
    folder: Path | None
    overrides: list[str]
    resume: bool


@dataclass(frozen=True)
class Start:
    """A validated run on `ranks` ranks.  The run starts from `checkpoint`, or from the beginning if this is None.

    `is_newest` means that `checkpoint` was selected because no checkpoint of the run is newer.
    """

    config: TrainConfig
    ranks: int
    checkpoint: Path | None = None
    is_newest: bool = False


def task_config(config: TrainConfig, checkpoint: Path | None) -> TrainConfig:
    """Return the configuration to pass to `make_task`.

    A resumed run uses the tokenizer of its checkpoint, and its own copies of the model folder's files.  The run can
    therefore be resumed even if the original folders have been moved.
    """
    if checkpoint is None:
        return config
    has_tokenizer = not config.model.folder and (checkpoint / TOKENIZER).is_file()
    changes: dict[str, Any] = {"weights": str(checkpoint)} if config.weights or has_tokenizer else {}
    base = checkpoint.parent.parent / BASE
    if config.model.folder and base.is_dir():
        changes["model"] = config.model.restored(base)
    return config.model_copy(update=changes)


@dataclass(frozen=True)
class TrainingJobSpec:
    """The job specification sent to every rank: the configuration, the run's folder and the checkpoint to resume.

    If `is_newest`, the job must not start once another job has saved a newer checkpoint.
    """

    config: TrainConfig
    run: Path
    checkpoint: Path | None = None
    is_newest: bool = False

    def dump(self) -> str:
        """Return the job specification as JSON."""
        return json.dumps(
            [self.config.model_dump(), str(self.run), str(self.checkpoint or ""), self.is_newest]
        )

    @staticmethod
    def load(text: str) -> TrainingJobSpec:
        """Parse the result of `dump`."""
        config, run, checkpoint, is_newest = json.loads(text)
        return TrainingJobSpec(
            parse_config(config), Path(run), Path(checkpoint) if checkpoint else None, is_newest
        )


def read_request(words: Sequence[str], resume: bool) -> Request:
    """Parse the arguments of a training command.  Raises `ConfigError`.

    Args:
        resume: whether the command contains --resume.
    """
    overrides = [word for word in words if "=" in word]
    rest = [word for word in words if "=" not in word]
    folders = [word for word in rest if _is_folder(word, resume)]
    sources = [word for word in rest if word not in folders]
    if keys := [word for word in sources if word in known_keys()]:
        raise ConfigError(f"{keys[0]} is a key without a value; use {keys[0]}=VALUE")
    if len(sources) > 1:
        raise ConfigError(
            f"expected one preset or configuration file, got {len(sources)}: {', '.join(sources)}"
        )
    if len(folders) > 1:
        raise ConfigError(f"expected one run to resume, got {len(folders)}: {', '.join(folders)}")
    if folders and not resume:
        raise ConfigError(
            f"{folders[0]} is a folder: to train on its text, use data.path={folders[0]}; "
            f"to resume the run in it, add --resume"
        )
    folder = Path(folders[0]) if folders else None
    return Request(sources[0] if sources else None, folder, overrides, resume)


def _is_folder(word: str, resume: bool) -> bool:
    """Return whether the argument `word` names a folder.  With `resume`, the folder may be missing."""
    path, is_preset = Path(word).expanduser(), word in presets()
    if resume:
        return path.is_dir() or not (path.is_file() or is_preset)
    return path.is_dir() and not is_preset


def check(request: Request, ranks: int | None = None) -> Start:
    """Check a request, and return the run to start.  No files are left behind.

    Args:
        ranks: the number of ranks.  Defaults to `default_ranks` for a new run, and to the number in the
            checkpoint for a resumed run.

    Raises:
        ConfigError: if the configuration is invalid.
        DataError: if the training text is missing.
        CheckpointError: if the checkpoint is damaged or belongs to another configuration.
    """
    if request.resume:
        start = _resumed(request, ranks)
    else:
        config = load_config(request.source, request.overrides)
        start = Start(config, ranks or default_ranks(config))
        _check_ranks(start.config, start.ranks)
        check_out(config)
    task_path(start.config.task)
    if start.config.log.wandb:
        check_wandb()
    if start.checkpoint is None:
        weights_file(start.config)
    if start.config.task in ("text", "masked-text", "sft"):
        find_source(start.config.data.path, start.config.data.field)
    return start


def check_wandb() -> None:
    """Raise `ConfigError` if Weights & Biases cannot be used.

    The package must be installed.  A login is also required, unless `WANDB_MODE` selects a mode without a login.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "log.wandb=true requires Weights & Biases: pip install wandb, or use log.wandb=false"
        )
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    if any(os.environ.get(f"WANDB_{name}") for name in ("API_KEY", "IDENTITY_TOKEN_FILE")):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        logins = None
    if logins is None or logins.authenticators(host) is None:
        raise ConfigError(
            f"log.wandb=true requires a login to {host}: run wandb login, set WANDB_API_KEY, or use WANDB_MODE=offline"
        )


def default_ranks(config: TrainConfig) -> int:
    """Return the number of ranks that `plan.data` implies, or else the largest suitable number on this host.

    A suitable number is a multiple of the product of the plan's other axes.  Ranks that process the same samples form a
    group; the batch must be divisible by the number of groups.
    """
    together, experts = config.plan.ranks_per_sample, config.plan.expert
    if config.plan.data:
        return config.plan.data * experts * together
    sizes = config.batch // (config.micro_batch or 1)
    most = offered_ranks() // together
    return together * max((n for n in range(experts, most + 1, experts) if sizes % n == 0), default=experts)


def job_spec(start: Start) -> TrainingJobSpec:
    """Return the job specification of a run, and create the folder of a new run.  Raises `ConfigError`."""
    if start.checkpoint is not None:
        return TrainingJobSpec(
            start.config, start.checkpoint.parent.parent, start.checkpoint, start.is_newest
        )
    return TrainingJobSpec(start.config, new_run(start.config))


def _resumed(request: Request, ranks: int | None) -> Start:
    folder = (request.folder or _folder_of_runs(request)).expanduser()
    checkpoint = checkpoint_to_resume(folder)
    run = checkpoint.parent.parent
    if checkpoint.parent.name != "checkpoints" or not (run / "config.toml").is_file():
        raise CheckpointError(
            f"checkpoint {checkpoint} is not in the folder of a run: expected RUN/checkpoints/{checkpoint.name}"
        )
    check_complete(checkpoint)
    saved = read_metadata(checkpoint)
    before = saved_config(saved.config)
    if request.source is None:
        config = with_overrides(before, request.overrides)
    else:
        config = load_config(request.source, request.overrides)
    ranks = ranks or saved.ranks
    if before.plan.compression != "none":
        kept = f"residuals of plan.compression={before.plan.compression}"
        if ranks != saved.ranks:
            raise CheckpointError(
                f"checkpoint {checkpoint} has {kept} for {counted(saved.ranks, 'rank')}, but this job has {ranks}: "
                f"resume with --ranks {saved.ranks}"
            )
        for axis in ("pipeline", "schedule", *MODEL_AXES):
            if (old := getattr(before.plan, axis)) != (new := getattr(config.plan, axis)):
                raise CheckpointError(
                    f"checkpoint {checkpoint} has {kept} for plan.{axis}={old}, but this job has plan.{axis}={new}: "
                    f"resume with plan.{axis}={old}"
                )
    together = config.plan.ranks_per_sample
    if config.batch * together % ranks and config.batch == before.batch:
        fitting = [n for n in range(1, max(ranks, saved.ranks) + 1) if config.batch * together % n == 0]
        raise CheckpointError(
            f"--ranks {ranks}: the batch of checkpoint {checkpoint} is {config.batch}, which is not divisible by "
            f"{ranks} and cannot be changed; resume with --ranks {' or '.join(map(str, fitting))}"
        )
    _check_ranks(config, ranks)
    if changed := _changes(before, config):
        raise CheckpointError(
            f"checkpoint {checkpoint} belongs to another configuration: {'; '.join(changed)}. "
            f"Restore these values, or start a new run; only {', '.join(CHANGEABLE)} can be changed"
        )
    if saved.step > config.steps or (saved.step == config.steps and has_results(checkpoint)):
        raise CheckpointError(
            f"checkpoint {checkpoint} is at step {saved.step} of {config.steps}: the run is complete; "
            f"to train longer, use steps={2 * saved.step}"
        )
    return Start(config, ranks, checkpoint, is_newest=checkpoint != folder)


def _check_ranks(config: TrainConfig, ranks: int) -> None:
    """Raise `ConfigError` if the batch or the plan is invalid for `ranks` ranks."""
    try:
        config.plan.plan("fp32" if config.plan.precision == "auto" else config.plan.precision).sizes(ranks)
    except PlanError as error:
        raise plan_config_error(error) from None
    config.micro_batches(ranks)


def _folder_of_runs(request: Request) -> Path:
    """Return the folder of runs that the key `out` specifies."""
    # the other overrides are not validated, because they may depend on the checkpoint
    words = [override for override in request.overrides if override.partition("=")[0].strip() == "out"]
    out = load_config(request.source, words).out
    if not Path(out).expanduser().exists():
        raise CheckpointError(
            f"there is no run to resume: folder {out} does not exist; start a new run without --resume, "
            f"or name a run with --resume RUN"
        )
    return Path(out)


def _changes(before: TrainConfig, now: TrainConfig) -> list[str]:
    """Return `key was A, is B` for each changed key that affects the results."""
    old, new = before.flat(), now.flat()
    return [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not key.startswith(CHANGEABLE)
    ]
