"""Run the `farandole` command in a separate process, like a user."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.forked_python import ForkedPython

ROOT = Path(__file__).parents[2]
END_S = 100.0


class Command:
    """Runs `farandole WORDS...` in `folder` and captures its output."""

    def __init__(self, folder: Path, *words: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._log = folder / f"log-{time.monotonic_ns()}"
        self._log.touch()
        self.process = ForkedPython(
            ["-m", "farandole", *words], environment, folder, self._log, fork_ranks=True
        )

    @property
    def output(self) -> str:
        """The output so far."""
        return self._log.read_text()

    def end(self) -> int:
        """Wait until the command ends, and return its exit status."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(10)
            raise AssertionError(
                f"the command did not end within {END_S:g} s; its output:\n{self.output}"
            ) from None

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait until `true()` returns True; fail if the command ends first."""
        deadline = time.monotonic() + END_S
        while not true():
            assert self.process.poll() is None, f"the command ended too early; its output:\n{self.output}"
            assert time.monotonic() < deadline, (
                f"the condition was not met within {END_S:g} s; the output:\n{self.output}"
            )
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks; Linux only."""
        pid = self.process.pid
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def only_run(out: Path) -> Path:
    """Return the folder of the only run in `out`."""
    (run,) = out.iterdir()
    return run


def losses(run: Path) -> dict[int, float]:
    """Return the loss of every step in a run, by step number."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    steps = [int(r["step"]) for r in records if "loss" in r]
    assert steps == sorted(set(steps)), "steps are duplicated or out of order"
    return {int(r["step"]): r["loss"] for r in records if "loss" in r}
