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
# The operators of torchvision's wheel for CUDA do not load next to torch for the CPU: see tests/torchvision_models.py.
START = "import runpy, sys, tests.torchvision_models; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def run(program: str, replace: str, folder: Path) -> tuple[str, list[float]]:
    """Run a program on 2 ranks; return the backend and the values that rank 0 printed."""
    starter = folder / "start.py"
    starter.write_text(START)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        REPLACE_GLOO: replace, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [*command, starter, PROGRAMS / program],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    backend, values = next(line for line in done.stdout.splitlines() if line.endswith("]")).split(" ", 1)
    return backend, ast.literal_eval(values)


@pytest.mark.parametrize("program", ["accelerate_loop.py", "trainer.py", "lightning_fit.py"])
def test_losses_equal_those_over_gloo(program: str, tmp_path: Path) -> None:
    reference, over_gloo = run(program, "0", tmp_path)
    backend, over_ours = run(program, "1", tmp_path)
    assert (reference, backend) == ("gloo", "farandole")
    assert over_ours == pytest.approx(over_gloo, rel=1e-6)
