"""Check a model when an engine is created and before updates."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farandole._troubleshooting import see
from farandole.parallel.data import has_engine


def check_model(model: nn.Module, *, moved: bool) -> None:
    """Raise ValueError if an engine would train `model` differently than a single process.

    Args:
        moved: whether the engine moves parameters into flat buffers.
    """
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(f"{name} is not initialized: run the model once before parallelize")
        if has_engine(parameter):
            raise ValueError(
                f"{name} belongs to an engine already: call close() on that engine before creating another "
                f"engine for the model{see('belongs-to-an-engine-already')}"
            )
    if moved and (pair := _overlapping(named)):
        raise ValueError(
            f"{pair[0]} and {pair[1]} are different parameters that share memory, but the engine would "
            "store them separately: use the same nn.Parameter in both places, or copy one of them"
        )


def check_gradients(model: nn.Module, trained: Collection[int]) -> None:
    """Raise RuntimeError if a parameter that the engine does not train has a gradient.

    Args:
        trained: the identities of the parameters that the engine trains.
    """
    for parameter in model.parameters():
        if parameter.grad is not None and id(parameter) not in trained:
            name = next(name for name, known in model.named_parameters() if known is parameter)
            raise RuntimeError(
                f"{name} has a gradient that ranks do not average, because the parameter was frozen, or not in the "
                "model, when the engine was created; close() the engine, and create another engine after "
                f"changing requires_grad or the model{see('has-a-gradient-that-ranks-do-not-average')}"
            )


def _overlapping(named: dict[str, nn.Parameter]) -> tuple[str, str] | None:
    """Return the names of two parameters that share memory, or None."""
    extents = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in named.items()
        if type(p.data) is Tensor and not p.is_meta and p.numel() and _is_dense(p)
    )
    for (device, _, end, name), (other_device, start, _, other) in zip(extents, extents[1:], strict=False):
        if device == other_device and start < end:
            return name, other
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill consecutive memory, in any order."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()
