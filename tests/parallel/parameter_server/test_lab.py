"""The lab that trains on digits runs in all modes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parents[3] / "labs" / "parameter_server_digits.py"


def test_the_lab_learns_in_all_modes(tmp_path):
    pytest.importorskip("sklearn.datasets")
    launch = [sys.executable, "-m", "farandole", "launch", "--ranks", "3", "--no-pin", str(LAB)]
    run = subprocess.run(
        [*launch, "--epochs", "3", "--json", str(tmp_path / "curves.json")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert list(curves) == ["sync", "async", "ssp"]
    for name, points in curves.items():
        assert points[0]["accuracy"] < 0.3 and points[-1]["accuracy"] > 0.7, name
        assert points[-1]["epochs"] == pytest.approx(3, rel=0.05)
    assert run.stdout.count("most lead") == 3
