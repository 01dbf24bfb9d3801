"""Check every CUDA path on one NVIDIA GPU.

python -m benchmarks.gpu                          all checks; ends with 0 where there is no GPU
python -m benchmarks.gpu --only zero --only routing.ddp
python -m benchmarks.gpu --device cpu             the checks that make sense on a CPU
python -m benchmarks.gpu wheels FOLDER            download the wheels that another machine lacks
python -m benchmarks.gpu report FILE              write the results in FILE into docs/guides/gpu.md
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
"""Seconds for all checks."""


def main(arguments: list[str]) -> int:
    """Run a command and return the exit status: 0, 1 if a check failed, 2 for a mistake or a missing package."""
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
        "--only", action="append", default=[], metavar="NAME", help="a check or an area; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument(
        "--timeout", type=float, default=TOTAL_S, metavar="S", help="seconds for all checks (%(default)g)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="the device under test (%(default)s)"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="install missing packages from there first"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    environment.use_carried()
    if options.timeout <= 0:
        raise ValueError(f"--timeout {options.timeout:g}: expected seconds above 0")
    if importlib.util.find_spec("torch") is None:
        return _without_torch(options.device)
    if options.device == "cuda" and not options.list and (why := _no_gpu()):
        print(f"no GPU: {why}; no check has run (--device cpu runs those that make sense on a CPU)")
        return 0
    if options.wheels is not None:
        installed = environment.install(options.wheels)
        print(f"installed from {options.wheels}: {', '.join(installed) or 'nothing, as nothing was missing'}")
    lacking = environment.missing()
    if lacking:
        print(f"missing packages: {', '.join(lacking)}; checks that need them are skipped (see --wheels)")
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
        print("no GPU: this machine has no NVIDIA driver; no check has run")
        return 0
    raise environment.SetupError(
        f"{sys.executable} has no torch; give another interpreter: make gpu PYTHON=..."
    )


def _no_gpu() -> str:
    """Return why there is no GPU to check, or nothing."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""


def describe_machine(device: str) -> dict[str, Any]:
    """Return what the results depend on."""
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
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", help="further packages, such as torchao for fp8")
    parser.add_argument("--python", default="3.12", help="the version of Python there (%(default)s)")
    parser.add_argument(
        "--checks", action="store_true", help="only what checks need, instead of all dependencies"
    )
    options = parser.parse_args(arguments)
    environment.download(options.folder, options.python, options.packages, only_checked=options.checks)
    print(
        f"{len(list(options.folder.glob('*.whl')))} wheels in {options.folder}; there: make gpu WHEELS={options.folder}"
    )
    return 0


def _report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu report", description="Write results into docs/guides/gpu.md."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    results, machine = table.load(options.file.read_text())
    table.fill(options.page, table.markdown(results, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
