"""The lab that trains on digits runs in all modes."""

from __future__ import annotations

import json

import pytest

from tests.launch.jobs import ROOT, ours, run

LAB = str(ROOT / "labs" / "parameter_server_digits.py")


def test_the_lab_learns_in_all_modes(tmp_path):
    pytest.importorskip("sklearn.datasets")
    curves_file = tmp_path / "curves.json"
    command = ours("--ranks", "3", "--no-pin", LAB, "--epochs", "3", "--json", str(curves_file))
    status, out, err = run(command, fork_ranks=True)
    assert status == 0, err
    curves = json.loads(curves_file.read_text())
    assert list(curves) == ["sync", "async", "ssp"]
    for name, points in curves.items():
        assert points[0]["accuracy"] < 0.3 and points[-1]["accuracy"] > 0.7, name
        assert points[-1]["epochs"] == pytest.approx(3, rel=0.05)
    assert out.count("maximum lead") == 3
