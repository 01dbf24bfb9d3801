"""Read the Horovod 0.28 environment variables for `hvd.init()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNSUPPORTED = {
    "HOROVOD_AUTOTUNE": "set HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME manually",
    "HOROVOD_AUTOTUNE_LOG": "farandole has no autotuner",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "ranks on one host always reduce in shared memory",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "ranks on one host always gather in shared memory",
    "HOROVOD_GPU_OPERATIONS": "select the backend for device tensors with farandole.init(backend)",
    "HOROVOD_CPU_OPERATIONS": "select the backend for CPU tensors with farandole.init(backend)",
    "HOROVOD_CONTROLLER": "negotiation uses the process group of farandole.init()",
    "HOROVOD_DISABLE_GROUP_FUSION": "groups are fused; HOROVOD_FUSION_THRESHOLD=0 disables fusion",
}
"""Variables that have no effect, with the reason or an alternative."""


@dataclass(frozen=True)
class Settings:
    """The engine options.  `fusion_threshold` is in bytes, and `cache_capacity` is a number of names."""

    cycle_time_s: float = 0.001
    fusion_threshold: int = 128 << 20
    cache_capacity: int = 1024
    timeline: str = ""
    timeline_marks_cycles: bool = False
    stall_check_s: float | None = 60.0
    stall_shutdown_s: float = 0.0

    @staticmethod
    def read(environ: Mapping[str, str]) -> Settings:
        """Read the settings from environment variables.

        Raises:
            ValueError: if a variable is not a number, is negative or is infinite.
        """
        disabled = _flag(environ, "HOROVOD_STALL_CHECK_DISABLE")
        return Settings(
            cycle_time_s=_number(environ, "HOROVOD_CYCLE_TIME", 1.0) / 1000,
            fusion_threshold=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", 128 << 20)),
            cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", 1024)),
            timeline=environ.get("HOROVOD_TIMELINE", ""),
            timeline_marks_cycles=_flag(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
            stall_check_s=None if disabled else _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
            stall_shutdown_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        )


def unsupported(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each set variable that has no effect."""
    return [
        f"{name}={environ[name]} has no effect: {instead}"
        for name, instead in UNSUPPORTED.items()
        if environ.get(name, "") not in ("", "0")
    ]


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "") not in ("", "0")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected {name} to be a number, got {text!r}") from None
    if not 0 <= number < float("inf"):
        raise ValueError(f"expected {name} to be finite and at least 0, got {text}")
    return number
