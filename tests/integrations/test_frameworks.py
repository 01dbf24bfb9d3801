"""Training loops of other frameworks, unchanged, over our backend in place of Gloo: the same losses."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole._autoload import REPLACE_GLOO

PROGRAMS = Path(__file__).parent / "programs"
# The same ranks run a program over Gloo and then over farandole, because most of the time is spent on imports.
# The operators of torchvision's wheel for CUDA do not load next to torch for the CPU: see tests/torchvision_models.py.
START = f"""
import os, runpy, sys
import tests.torchvision_models
import torch.distributed as dist
from accelerate.state import AcceleratorState

for replace in "01":
    os.environ["{REPLACE_GLOO}"] = replace
    runpy.run_path(sys.argv[1], run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
"""


def run(program: str, folder: Path) -> list[tuple[str, list[float]]]:
    """Run a program on 2 ranks, over Gloo and over farandole; return the backends and the values that rank 0 printed."""
    starter = folder / "start.py"
    starter.write_text(START)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [*command, starter, PROGRAMS / program],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split(" ", 1) for line in done.stdout.splitlines() if line.endswith("]")]
    return [(backend, ast.literal_eval(values)) for backend, values in lines]


@pytest.mark.parametrize("program", ["accelerate_loop.py", "trainer.py", "lightning_fit.py"])
def test_losses_equal_those_over_gloo(program: str, tmp_path: Path) -> None:
    (reference, over_gloo), (backend, over_ours) = run(program, tmp_path)
    assert (reference, backend) == ("gloo", "farandole")
    assert over_ours == pytest.approx(over_gloo, rel=1e-6)
