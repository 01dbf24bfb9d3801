"""Horovod's environment variables, as Horovod 0.28 documents them, read once in `hvd.init()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNSUPPORTED = {
    "HOROVOD_AUTOTUNE": "set HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME by hand",
    "HOROVOD_AUTOTUNE_LOG": "there is no autotuner",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "ranks of a host reduce in shared memory by themselves",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "ranks of a host gather in shared memory by themselves",
    "HOROVOD_GPU_OPERATIONS": "farandole.init(backend) chooses what carries device tensors",
    "HOROVOD_CPU_OPERATIONS": "farandole.init(backend) chooses what carries CPU tensors",
    "HOROVOD_CONTROLLER": "negotiation runs over the process group of farandole.init()",
    "HOROVOD_DISABLE_GROUP_FUSION": "groups are fused; HOROVOD_FUSION_THRESHOLD=0 turns fusion off",
}
"""Variables that change something here is nothing like, and what to do instead."""


@dataclass(frozen=True)
class Settings:
    """How the engine behaves; times in seconds, sizes in bytes."""

    cycle_time_s: float = 0.001
    fusion_threshold: int = 128 << 20
    cache_capacity: int = 1024
    timeline: str = ""
    timeline_marks_cycles: bool = False
    stall_check_s: float | None = 60.0
    stall_shutdown_s: float = 0.0

    @staticmethod
    def read(environ: Mapping[str, str]) -> Settings:
        """Read the settings from environment variables; raise ValueError for a value that is not a number or out of range."""
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
    """Return a sentence for every variable that is set and has no effect here."""
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
        raise ValueError(f"{name}={text!r} is not a number") from None
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name}={text} must be 0 or more")
    return number
