"""`farandole info`: what this machine offers, and what is missing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from shutil import which

import typer


def info() -> None:
    """Show the versions, the cores, and how ranks would communicate here.

    \b
      farandole info                            this machine
      mpirun -n 2 python -m farandole info      what each rank would find
    """
    for name, value in _facts():
        typer.echo(f"{name:<14} {value}")


def _facts() -> list[tuple[str, str]]:
    import torch

    from farandole import __version__

    return [
        ("farandole", __version__),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("cores", _cores()),
        ("accelerators", _accelerators()),
        ("native core", _native()),
        ("placement", _placement()),
        ("launchers", _launchers()),
    ]


def _cores() -> str:
    from farandole.launch.control_groups import processor_quota
    from farandole.launch.cores import affinity, physical_cores

    processors = affinity()
    cores, quota = len(physical_cores(processors)), processor_quota()
    text = f"{cores} usable of {os.cpu_count()} logical processors"
    if len(processors) != cores:
        text += f", {len(processors)} hardware threads"
    return text if quota is None else f"{text}, limited to the time of {quota:g}"


def _accelerators() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _native() -> str:
    from farandole import native

    if not native.available():
        return f"not available: {native.why_unavailable()}; ranks communicate through Gloo"
    return f"available, {native.vector_level().name} code"


def _placement() -> str:
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import LaunchError

    try:
        found = find_placement(os.environ)
    except LaunchError as error:
        return str(error)
    if found.size == 1:
        return f"{found.launcher}: a world of one"
    return f"{found.launcher}: rank {found.rank} of {found.size}"


def _launchers() -> str:
    """Return the launchers on the path, and those next to this interpreter, as in an environment that is not activated."""
    next_to_python = str(Path(sys.executable).parent)
    on_path, off_path = [], []
    for name in ("farandole", "torchrun", "mpiexec", "mpirun", "srun"):
        if which(name):
            on_path.append(name)
        elif found := which(name, path=next_to_python):
            off_path.append(found)
    if off_path:
        on_path.append(f"not on the path: {' '.join(off_path)}")
    return ", ".join(on_path) or "none (python -m farandole launch works)"
