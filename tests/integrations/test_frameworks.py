"""Training loops of other frameworks, unchanged, over our backend in place of Gloo: the same losses."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from farandole._autoload import REPLACE_GLOO
from tests.launch.jobs import run, write

PROGRAMS = Path(__file__).parent / "programs"
# The same ranks run a program over Gloo and then over farandole, because most of the time is spent on imports.  A
# second group over Gloo would read the addresses of the first, which stay in torchrun's store: each program has its own
# job.
# The programs' objects are kept, because DDP's reducer destroys its Gloo group while it holds the GIL, for which the
# thread of the group can wait forever.
# The operators of torchvision's wheel for CUDA do not load next to torch for the CPU: see tests/torchvision_models.py.
START = f"""
import os, runpy, sys
import tests.torchvision_models
import torch.distributed as dist
from accelerate.state import AcceleratorState

kept = []
for replace in "01":
    os.environ["{REPLACE_GLOO}"] = replace
    kept.append(runpy.run_path(sys.argv[1], run_name="__main__"))
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
"""


@pytest.mark.parametrize("program", ["accelerate_loop.py", "trainer.py", "lightning_fit.py"])
def test_losses_equal_those_over_gloo(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [write(tmp_path, START, "start.py"), str(PROGRAMS / program)]
    status, out, err = run(command, tmp_path, fork_ranks=True, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert status == 0, err[-4000:]
    lines = [line.split(" ", 1) for line in out.splitlines() if line.endswith("]")]
    (reference, over_gloo), (backend, over_ours) = [
        (name, ast.literal_eval(values)) for name, values in lines
    ]
    assert (reference, backend) == ("gloo", "farandole")
    assert over_ours == pytest.approx(over_gloo, rel=1e-6)
