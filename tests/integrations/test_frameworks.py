"""Training loops of other frameworks, unchanged, over our backend in place of Gloo: the same losses."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from farandole._autoload import REPLACE_GLOO
from tests.launch.jobs import run, write

PROGRAMS = Path(__file__).parent / "programs"
# The same ranks run all programs over Gloo and then over farandole, because most of the time is spent on imports.
# The operators of torchvision's wheel for CUDA do not load next to torch for the CPU: see tests/torchvision_models.py.
START = f"""
import os, runpy, sys
import tests.torchvision_models
import torch.distributed as dist
from accelerate.state import AcceleratorState

for program in sys.argv[1:]:
    for replace in "01":
        os.environ["{REPLACE_GLOO}"] = replace
        runpy.run_path(program, run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
"""


NAMES = ("accelerate_loop.py", "trainer.py", "lightning_fit.py")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[float]]]:
    """The backends and the values that rank 0 of 2 printed: of each program, over Gloo and over farandole."""
    folder = tmp_path_factory.mktemp("frameworks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [write(folder, START, "start.py"), *(str(PROGRAMS / name) for name in NAMES)]
    status, out, err = run(command, folder, fork_ranks=True, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert status == 0, err[-4000:]
    lines = [line.split(" ", 1) for line in out.splitlines() if line.endswith("]")]
    return [(backend, ast.literal_eval(values)) for backend, values in lines]


@pytest.mark.parametrize("program", NAMES)
def test_losses_equal_those_over_gloo(program: str, printed: list[tuple[str, list[float]]]) -> None:
    first = 2 * NAMES.index(program)
    (reference, over_gloo), (backend, over_ours) = printed[first : first + 2]
    assert (reference, backend) == ("gloo", "farandole")
    assert over_ours == pytest.approx(over_gloo, rel=1e-6)
