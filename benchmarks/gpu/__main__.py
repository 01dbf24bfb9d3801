"""Check all CUDA code paths on one NVIDIA GPU.

python -m benchmarks.gpu                          run all checks; without a GPU, exit with status 0
python -m benchmarks.gpu --only zero --only routing.ddp
python -m benchmarks.gpu --device cpu             run only the checks that also support a CPU
python -m benchmarks.gpu wheels FOLDER            download wheels for a machine without a network
python -m benchmarks.gpu report FILE              copy the results from FILE into docs/guides/gpu.md
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import environment, table
from benchmarks.gpu.registry import select
from benchmarks.gpu.runner import Result, run_checks

PAGE = environment.ROOT / "docs" / "guides" / "gpu.md"
TOTAL_S = 480.0
"""The time limit for all checks together, in seconds."""


def main(arguments: list[str]) -> int:
    """Run a command; return 0 on success, 1 if a check failed, and 2 for invalid arguments or a failed setup."""
    try:
        if arguments[:1] == ["wheels"]:
            return _wheels(arguments[1:])
        if arguments[:1] == ["report"]:
            return _report(arguments[1:])
        return _run(_parser().parse_args(arguments))
    except (ValueError, OSError, environment.SetupError) as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run only this check or area; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TOTAL_S,
        metavar="S",
        help="time limit for all checks, in seconds (default %(default)g)",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device under test (default %(default)s)"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="first install missing packages from FOLDER"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    environment.use_carried()
    if options.timeout <= 0:
        raise ValueError(f"--timeout: expected seconds above 0, got {options.timeout:g}")
    if importlib.util.find_spec("torch") is None:
        return _without_torch(options.device)
    if options.device == "cuda" and not options.list and (why := _no_gpu()):
        print(f"no GPU: {why}; no checks were run (--device cpu runs the checks that also support a CPU)")
        return 0
    if options.wheels is not None:
        installed = environment.install(options.wheels)
        print(
            f"installed from {options.wheels}: {', '.join(installed) or 'nothing, because no package was missing'}"
        )
    lacking = environment.missing()
    if lacking:
        print(
            f"missing packages: {', '.join(lacking)}; checks that need these packages are skipped (see --wheels)"
        )
    selected = select(options.only)
    if options.list:
        for each in selected:
            print(f"{each.name:<40} {each.ranks} rank{'s' * (each.ranks > 1)}: {each.what}")
        return 0
    environment.build_core()
    machine = describe_machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    width = max(len(each.name) for each in selected)
    print(table.header(width), flush=True)

    def report(result: Result) -> None:
        print(table.line(result, width), flush=True)

    results = run_checks(
        selected, options.device, options.timeout - (time.monotonic() - began), report=report
    )
    machine["seconds"] = round(time.monotonic() - began)
    if text := table.failures(results):
        print(f"\n{text}")
    print(f"\n{table.summary(results)} on {options.device}, {machine['seconds']} s")
    if options.json is not None:
        options.json.write_text(table.dump(results, machine))
    return int(any(result.status == "failed" for result in results))


def _without_torch(device: str) -> int:
    if device == "cuda" and not Path("/dev/nvidiactl").exists():
        print("no GPU: this machine has no NVIDIA driver; no checks were run")
        return 0
    raise environment.SetupError(
        f"{sys.executable} cannot import torch; use another interpreter: make gpu PYTHON=..."
    )


def _no_gpu() -> str:
    """Return why no GPU can be checked, or an empty string."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""


def describe_machine(device: str) -> dict[str, Any]:
    """Return the device, the versions and the number of cores, on which the results depend."""
    import torch

    import farandole

    machine: dict[str, Any] = {"device": device}
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        machine["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        machine |= {"CUDA": torch.version.cuda, "NCCL": nccl}
    return machine | {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "farandole": farandole.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.date.today().isoformat(),
    }


def _wheels(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu wheels", description="Download wheels for a machine without a network."
    )
    parser.add_argument("folder", type=Path, help="folder for the wheels")
    parser.add_argument("packages", nargs="*", help="additional packages, such as torchao for fp8")
    parser.add_argument(
        "--python", default="3.12", help="Python version on that machine (default %(default)s)"
    )
    parser.add_argument(
        "--checks",
        action="store_true",
        help="download only the packages that checks need, instead of all dependencies",
    )
    options = parser.parse_args(arguments)
    environment.download(options.folder, options.python, options.packages, only_checked=options.checks)
    print(
        f"{len(list(options.folder.glob('*.whl')))} wheels in {options.folder}; "
        f"on the other machine, run: make gpu WHEELS={options.folder}"
    )
    return 0


def _report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu report", description="Copy the results into docs/guides/gpu.md."
    )
    parser.add_argument("file", type=Path, help="results from --json")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to update (default %(default)s)")
    options = parser.parse_args(arguments)
    results, machine = table.load(options.file.read_text())
    table.fill(options.page, table.markdown(results, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
