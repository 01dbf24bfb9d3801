"""Define tasks, which specify the model, the samples and the loss.

Built-in tasks have names.  `task = "MODULE:FUNCTION"` names a function or class that takes the configuration and
returns a `Task`:

    class Sines(Task):                          # in sines.py: farandole train task=sines:Sines options.points=1000
        def __init__(self, config):
            self.train, self.validation = SineDataset(config.options["points"]), SineDataset(100)

        def build(self, config):
            return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))

        def loss(self, output, batch):
            return (output - batch[1]).square().sum(), len(output)

Every rank creates its own copy of the task.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farandole.data.cache import Progress
from farandole.train.config import ConfigError, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

Mean = tuple["Tensor", "Tensor | float"]
"""A sum, and the number of summands."""

TASKS = {
    "text": "farandole.train.text:TextTask",
    "masked-text": "farandole.train.text:MaskedTextTask",
    "images": "farandole.train.images:ImagesTask",
    "sft": "farandole.train.text:ChatTask",
    "classify": "farandole.train.classify:ClassifyTask",
}


class Samples(Protocol):
    """A map-style dataset, such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`.  Every call must return the same sample."""


class Task:
    """The base class for all tasks.  Subclasses define `train`, `validation`, `build` and `loss`."""

    train: Samples
    validation: Samples

    unit = "samples"
    """The unit shown in the progress line."""
    units_per_sample = 1
    """The number of units per sample.  For each sample, `loss` should return a count close to this number."""
    also_train: tuple[str, ...] = ()
    """Patterns for modules that are trained in full with LoRA, such as a new head; see `farandole.LoRA`."""

    def __init__(self, config: TrainConfig) -> None:
        """Create the task for this configuration."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of positions in each training sample, or in each sample of a representative subset.

        The model FLOP/s utilization of a transformer is computed from these numbers.
        """
        return np.array([self.units_per_sample])

    def build(self, config: TrainConfig) -> nn.Module:
        """Create the model.  The caller has seeded torch's random generator."""
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Mean:
        """Return the sum of the losses in a micro-batch, and the number of losses."""
        raise NotImplementedError

    def batch(self, samples: Samples, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> Any:
        """Return the samples at the indices `numbers` as one micro-batch.  `epochs` contains each sample's epoch."""
        from torch.utils.data import default_collate

        return default_collate([samples[int(number)] for number in numbers])

    def inputs(self, batch: Any) -> Any:
        """Return the model's arguments for `batch`: one argument, a tuple, or a mapping of keyword arguments."""
        return batch[0] if isinstance(batch, tuple | list) else batch

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Mean]:
        """Return the evaluation metrics other than the loss, each as a sum and a count."""
        return {}

    def report(self, model: nn.Module) -> str:
        """Return a report about the trained model as text.  Rank 0 prints the report.  Collective call."""
        return ""

    def files(self) -> Mapping[str, Path]:
        """Return a mapping from file names in the checkpoint to the files to copy into each checkpoint."""
        return {}


def make_task(config: TrainConfig, progress: Progress = lambda what, share: None) -> Task:
    """Create the task for a configuration.

    Raises:
        ConfigError: if the task does not exist or is incomplete.
        DataError: if the task's data cannot be read.
    """
    name = config.task
    factory = _find_task(name)
    task = factory(config, progress) if name in TASKS else factory(config)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task={name!r}: expected {factory.__name__}(config) to return a farandole.train.tasks.Task, got "
            f"{type(task).__name__}"
        )
    missing = [part for part in ("build", "loss") if getattr(type(task), part) is getattr(Task, part)]
    missing += [part for part in ("train", "validation") if not hasattr(task, part)]
    if missing:
        raise ConfigError(
            f"task={name!r}: {type(task).__name__} has no {', '.join(missing)}; a Task must define build, loss, train and "
            f"validation"
        )
    for part in ("train", "validation"):
        if not len(getattr(task, part)):
            raise ConfigError(
                f"task={name!r}: expected at least one sample in {part}, found none; provide more data"
            )
    return task


def task_path(name: str) -> tuple[str, str]:
    """Return the module and the attribute that a task's name specifies.  Raises `ConfigError`."""
    module_name, colon, attribute = TASKS.get(name, name).partition(":")
    if not (module_name and colon and attribute):
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(TASKS)}, or MODULE:FUNCTION"
        raise ConfigError(f"unknown task={name!r}; {hint}")
    return module_name, attribute


def _find_task(name: str) -> Callable[..., Any]:
    """Import and return a task's function or class."""
    module_name, attribute = task_path(name)
    # console scripts do not search the current folder
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the error occurred inside the module
        raise ConfigError(
            f"task={name!r}: there is no module {error.name} in {Path.cwd()} or on PYTHONPATH; add its folder to "
            "PYTHONPATH, or correct the name"
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, known, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else "name a subclass of Task, or a function that returns a Task"
        )
        problem = f"module {module_name} has no {attribute}"
        if found is not None:
            problem = f"expected {module_name}.{attribute} to be callable, got {type(found).__name__}"
        raise ConfigError(f"task={name!r}: {problem}; {hint}")
    result: Callable[..., Any] = found
    return result


def checked_mean(config: TrainConfig, returned: Any, what: str = "loss") -> Mean:
    """Return `returned` if it is a sum and a count; raise `ConfigError` otherwise."""
    import torch

    if isinstance(returned, tuple) and len(returned) == 2:
        total, count = returned
        counts = isinstance(count, int | float) or (isinstance(count, torch.Tensor) and count.numel() == 1)
        if isinstance(total, torch.Tensor) and total.dim() == 0 and counts:
            return total, count
    found = (
        f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else repr(returned)
    )
    raise ConfigError(
        f"task={config.task!r}: expected {what}(output, batch) to return a sum (a scalar tensor) and a count, "
        f"got {found[:200]}"
    )
