"""Tasks: the model, the samples and the loss that the trainer trains.

Built-in tasks have names; `task = "MODULE:FUNCTION"` names a function of the configuration that returns a `Task`:

    class Sines(Task):                          # in mine.py: farandole train task=mine:Sines options.points=1000
        def __init__(self, config):
            self.train, self.validation = SineDataset(config.options["points"]), SineDataset(100)

        def build(self, config):
            return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))

        def loss(self, output, batch):
            return (output - batch[1]).square().sum(), len(output)

Every rank makes the task, and all get the same one.
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
"""A sum, and the count of what it sums."""

TASKS = {
    "text": "farandole.train.text:TextTask",
    "masked-text": "farandole.train.masked_text:MaskedTextTask",
    "images": "farandole.train.images:ImagesTask",
}


class Samples(Protocol):
    """Samples by number, such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`, the same one each time."""


class Task:
    """The base of all tasks.  Subclasses define `train`, `validation`, `build` and `loss`."""

    train: Samples
    validation: Samples

    unit = "samples"
    """What the progress line counts."""
    units_per_sample = 1
    """The units in a sample.  The count that `loss` returns should be about this times the samples."""

    def __init__(self, config: TrainConfig) -> None:
        """Make the task of this configuration."""

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the model; torch's generator is seeded before."""
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Mean:
        """Return the sum of the losses of a micro-batch, and the count of what it sums."""
        raise NotImplementedError

    def batch(self, samples: Samples, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> Any:
        """Return the samples with these `numbers` as one micro-batch.  `epochs` says how often each was seen before."""
        from torch.utils.data import default_collate

        return default_collate([samples[int(number)] for number in numbers])

    def inputs(self, batch: Any) -> Any:
        """Return the model's arguments: one, a tuple of several, or a mapping of named ones."""
        return batch[0] if isinstance(batch, tuple | list) else batch

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Mean]:
        """Return what an evaluation measures besides the loss, each as a sum and a count."""
        return {}

    def report(self, model: nn.Module) -> str:
        """Return a text about the trained model.  All ranks call it together, and rank 0 shows the text."""
        return ""

    def files(self) -> Mapping[str, Path]:
        """Return files that a checkpoint contains besides the state, by their names in it."""
        return {}


def make_task(config: TrainConfig, progress: Progress = lambda what, share: None) -> Task:
    """Return the task of a configuration.

    Raises:
        ConfigError: if there is no such task, or it lacks a part.
        DataError: if its data cannot be read.
    """
    name = config.task
    factory = _find_task(name)
    task = factory(config, progress) if name in TASKS else factory(config)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task={name!r}: expected {factory.__name__}(config) to return a farandole.train.tasks.Task, got "
            f"{type(task).__name__}"
        )
    lacking = [part for part in ("build", "loss") if getattr(type(task), part) is getattr(Task, part)]
    lacking += [part for part in ("train", "validation") if not hasattr(task, part)]
    if lacking:
        raise ConfigError(
            f"task={name!r}: {type(task).__name__} has no {', '.join(lacking)}; a Task needs build, loss, train and "
            f"validation"
        )
    for part in ("train", "validation"):
        if not len(getattr(task, part)):
            raise ConfigError(f"task={name!r}: {part} has no samples")
    return task


def task_path(name: str) -> tuple[str, str]:
    """Return the module and the attribute that a task's name means.  Imports nothing.  Raises `ConfigError`."""
    module_name, colon, attribute = TASKS.get(name, name).partition(":")
    if not (module_name and colon and attribute):
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"tasks are {', '.join(TASKS)}, or MODULE:FUNCTION"
        raise ConfigError(f"task={name!r} is not known; {hint}")
    return module_name, attribute


def _find_task(name: str) -> Callable[..., Any]:
    """Return the function or class that makes the task of this name."""
    module_name, attribute = task_path(name)
    # a console script does not search the current folder
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an error inside the module
        raise ConfigError(
            f"task={name!r}: there is no module {error.name} in {Path.cwd()} or on PYTHONPATH"
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        has = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, has, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "name a subclass of Task, or a function that returns one"
        )
        what = "no" if found is None else f"{type(found).__name__}, not a function,"
        raise ConfigError(f"task={name!r}: module {module_name} has {what} {attribute}; {hint}")
    result: Callable[..., Any] = found
    return result


def checked_mean(config: TrainConfig, returned: Any, what: str = "loss") -> Mean:
    """Return what a task's `loss` returned if it is a sum and a count.  Raises `ConfigError`."""
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
        f"task={config.task!r}: expected {what}(output, batch) to return a sum (a tensor without dimensions) and a count, "
        f"got {found[:200]}"
    )
