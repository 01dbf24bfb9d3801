"""Random models, plans and training loops give the result of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.random_programs.seeds import seeds
from tests.random_programs.training import Program, alone, parallel, random_program


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("size", [2, 4])
def test_one_process(ranks: Callable[..., Any], size: int, seed: int, tmp_path: Path) -> None:
    program = random_program(seed)
    ranks(size).run(_compare, program, tmp_path)


def _compare(rank: int, size: int, program: Program, folder: Path) -> None:
    found = parallel(program, folder)
    expected = alone(program, size // program.plan.pipeline)
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(found.losses, expected.losses, **close)
    torch.testing.assert_close(found.norms, expected.norms, **close)
    torch.testing.assert_close(found.metric, expected.metric, **close)
    assert program.plan.pipeline > 1 or found.state.keys() == expected.state.keys()
    for name, value in found.state.items():
        if value.is_floating_point():  # each replica counts its own passes
            torch.testing.assert_close(
                value, expected.state[name], msg=lambda text, name=name: f"{name}: {text}", **close
            )
