"""The programs that users of torch.distributed run, on other versions of torch; each version is installed in a separate
environment."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    "tests/comm/test_backend_ddp.py",  # DDP, its hooks and join, compiled DDP
    "tests/comm/test_backend_torch.py",  # FSDP 1 and 2, DTensor, tensor parallel, meshes, pipelining, checkpoints, compiled calls
    "tests/comm/test_backend_groups.py",
    "tests/comm/test_backend_messages.py",
    "tests/comm/test_compatibility.py",  # ShardedTensor, debug mode, elastic restarts
    "tests/comm/test_torch_versions.py",
]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.11.0", "2.14.0", "2.15.0"])
def test_user_programs_on(version: str, tmp_path: Path) -> None:
    """Downloads gigabytes: the wheels of these versions come with the libraries of CUDA."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a clone of the repository")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    command = [
        "make",
        "--no-print-directory",
        "test-torch",
        f"TORCH={version}",
        f"TESTS={' '.join(PROGRAMS)}",
    ]
    try:
        done = subprocess.run(
            command, cwd=tmp_path / "clone", capture_output=True, text=True, timeout=2400, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    finally:
        shutil.rmtree(tmp_path / "clone", ignore_errors=True)  # several gigabytes
