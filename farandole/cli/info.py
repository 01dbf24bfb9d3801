"""The command `farandole info`: show versions, hardware, and how ranks on this machine would communicate."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import Annotated

import typer

PACKAGES = (
    "numpy",
    "typer",
    "pydantic",
    "mpi4py",
    "transformers",
    "accelerate",
    "lightning",
    "peft",
    "torchao",
    "deepspeed",
    "tensorflow",
    "keras",
    "horovod",
)
"""The packages whose versions are reported."""

PREFIXES = (
    "FARANDOLE_",
    "HOROVOD_",
    "OMP_",
    "MKL_",
    "GLOO_",
    "NCCL_",
    "CUDA_",
    "TORCH_",
    "KMP_",
    "LD_PRELOAD",
)
"""The prefixes of the environment variables that are reported."""


def info(
    report: Annotated[
        bool,
        typer.Option("--report", help="Print more details without secrets, as Markdown for a bug report."),
    ] = False,
) -> None:
    """Show versions and hardware.

    The command also shows how ranks on this machine would communicate.

    \b
      farandole info                            this machine
      farandole info --report                   for a bug report
      mpirun -n 2 python -m farandole info      the environment of each rank
    """
    lines = [f"{name:<14} {value}" for name, value in _properties() + (_details() if report else [])]
    if report:
        lines = ["```", *(line.replace(str(Path.home()), "~") for line in lines), "```"]
    typer.echo("\n".join(lines))


def _properties() -> list[tuple[str, str]]:
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


def _details() -> list[tuple[str, str]]:
    """Return the names and values that --report adds."""
    from farandole.data.wording import size
    from farandole.launch.control_groups import available_memory
    from farandole.launch.cores import processor_name

    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    files, processes = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    )
    variables = sorted(name for name in os.environ if name.startswith(PREFIXES))
    return [
        ("kernel", platform.release()),
        ("libc", " ".join(platform.libc_ver())),
        ("processor", processor_name()),
        ("memory", f"{size(available_memory())} available"),
        ("/dev/shm", "missing" if shared is None else f"{size(shared.free)} of {size(shared.total)} free"),
        ("limits", f"{_limit(files)} open files, {_limit(processes)} processes"),
        ("package", str(Path(__file__).parent.parent)),
        ("packages", _versions()),
        ("variables", ", ".join(f"{name}={_shown(name)}" for name in variables) or "none"),
    ]


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _shown(name: str) -> str:
    """Return the value of the environment variable `name`, or "(hidden)" if the name suggests a secret."""
    secret = any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
    return "(hidden)" if secret else os.environ[name]


def _cores() -> str:
    from farandole.launch.control_groups import processor_quota
    from farandole.launch.cores import affinity, physical_cores

    processors = affinity()
    cores, quota = len(physical_cores(processors)), processor_quota()
    text = f"{cores} usable ({len(processors)} of {os.cpu_count()} logical processors)"
    return text if quota is None else f"{text}, limited to {quota:g} CPUs by a control group"


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
        return f"{found.launcher}: a job of 1 rank"
    return f"{found.launcher}: rank {found.rank} of {found.size}"


def _launchers() -> str:
    """Return the launchers on PATH and in the folder of this Python interpreter."""
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
