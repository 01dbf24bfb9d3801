"""Activations on a disk: the same gradients, less memory, and errors that say what is wrong with the disk."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from farandole.memory.disk import NoSpace, OffloadError
from farandole.memory.dry_run import saved_bytes
from farandole.memory.offload_store import DiskStore
from farandole.memory.recompute import apply_recompute
from farandole.memory.swap import swap_activations
from tests.memory.models import CASES, assert_same, small_encoder, small_gpt, step


def disk(folder: Path) -> str:
    return f"disk:{folder}"


@pytest.mark.parametrize("name", CASES)
def test_results_are_bitwise_equal(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = CASES[name]()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for way, autocast in (("none", False), ("block", True), ("selective", False)):
        apply_recompute(model, "none")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.load_state_dict(before)
            wanted = [step(model, example) for _ in range(2)]
            model.load_state_dict(before)
            apply_recompute(model, way)
            with swap_activations(model, disk(tmp_path), threshold_bytes=0, behind_bytes=1) as swap:
                for one in wanted:
                    assert_same(step(model, example), one)
                assert swap.written_bytes >= swap.read_bytes > 0
            assert not list(tmp_path.iterdir())  # the file never had a name


@pytest.mark.parametrize("ahead", [0, 5000, 1 << 30])
def test_each_saved_tensor_is_swapped_once(ahead: int, tmp_path: Path) -> None:
    model, tokens = small_gpt()
    kept = saved_bytes(model, tokens)
    with swap_activations(
        model, disk(tmp_path), threshold_bytes=0, behind_bytes=1, ahead_bytes=ahead
    ) as swap:
        assert saved_bytes(model, tokens) == kept
        for count in (1, 2, 3):
            step(model, tokens)
            assert swap.written_bytes == count * kept.total
            assert swap.read_bytes <= swap.written_bytes
    assert not any("_farandole_wrappers" in vars(module) for module in model.modules())


def test_small_tensors_and_parameters_stay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 4), nn.Tanh(), nn.Linear(4, 512), nn.Tanh())
    x = torch.randn(8, 512, requires_grad=True)
    with swap_activations(model, disk(tmp_path), threshold_bytes=1000) as swap:
        model(x).sum().backward()
        assert swap.written_bytes == 8 * 512 * 4  # not 8 x 4 values, not the weights, not the input
        with torch.no_grad():
            model(x)
        assert swap.written_bytes == 8 * 512 * 4


def test_places_in_the_file_are_reused(tmp_path: Path) -> None:
    model, x = small_encoder()
    with swap_activations(model, disk(tmp_path), threshold_bytes=0, behind_bytes=1) as swap:

        def length() -> int:
            assert isinstance(swap._store, DiskStore)
            return swap._store.nbytes

        held = model(x)  # a graph that is alive all the time
        one_pass = length()
        for _ in range(10):
            step(model, x)
            model(x)  # a graph that is never used
            gc.collect()
        assert length() <= 4 * one_pass  # not 21; a thread frees the space of its current transfer later
        held.sum().backward()


def test_retained_graphs_and_accumulation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = small_encoder()
    model.eval()
    parameters = list(model.parameters())

    def gradients() -> list[tuple[Tensor, ...]]:
        first, second = model(x).square().sum(), model(2 * x).square().sum()  # two passes, then both backward
        retained = [torch.autograd.grad(first, parameters, retain_graph=True) for _ in range(2)]
        return [*retained, torch.autograd.grad(second, parameters), torch.autograd.grad(first, parameters)]

    wanted = gradients()
    with swap_activations(model, disk(tmp_path), threshold_bytes=0, behind_bytes=1) as swap:
        found = gradients()
        assert not swap._in_order
    for one, two in zip(found, wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_second_derivatives(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    wanted = second()
    with swap_activations(model, disk(tmp_path), threshold_bytes=0, behind_bytes=1):
        assert torch.equal(second(), wanted)


class WritesInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        saved = x.exp()
        return saved.add_(1)


@pytest.mark.parametrize("behind", [1, 1 << 20])
def test_overwritten_tensors_are_refused_as_in_torch(behind: int, tmp_path: Path) -> None:
    x = torch.randn(100, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        WritesInPlace()(x).sum().backward()
    model = WritesInPlace()
    with (
        swap_activations(model, disk(tmp_path), threshold_bytes=0, behind_bytes=behind),
        pytest.raises(RuntimeError, match="modified in place after it was saved"),
    ):
        model(x).sum().backward()


PEAK = """
import sys, torch, hashlib
from torch import nn
from farandole.memory.swap import swap_activations
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(24)))
x = torch.randn(12288, 256)  # 12 MiB for each of 24 blocks
def peak():
    text = open("/proc/self/status").read()
    return int(text.split("VmHWM:")[1].split()[0]) >> 10
def step():
    model(x).sum().backward()
    return hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in model.parameters())).hexdigest()
if sys.argv[1] == "plain":
    before = peak(); digest = step()
else:
    sizes = dict(behind_bytes=24 << 20, ahead_bytes=24 << 20)
    with swap_activations(model, sys.argv[1], **sizes):
        before = peak(); digest = step()
print(peak() - before, digest)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_is_lower(tmp_path: Path) -> None:
    """Without swapping, all 288 MiB of activations are in memory; with swapping, only those in transfer are."""

    def run(to: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", PEAK, to], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        mebibytes, digest = done.stdout.split()
        return int(mebibytes), digest

    plain, wanted = run("plain")
    swapped, found = run(disk(tmp_path))
    assert found == wanted
    assert plain > 280 and swapped < 160, (plain, swapped)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk, on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "farandole-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported(small_disk: Path) -> None:
    model, tokens = small_gpt()
    wanted = step(model, tokens)
    with swap_activations(model, disk(small_disk), threshold_bytes=0, behind_bytes=1):
        for _ in range(2):  # after an error, no activation counts as swapped
            with pytest.raises(NoSpace, match=r"needed in .*/disk, .* free \(tmpfs of .*\); free .* more"):
                step(model, tokens)
    assert_same(step(model, tokens), wanted)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    model, _ = small_gpt()
    with pytest.raises(
        OffloadError,
        match=rf"cannot offload to {tmp_path}/none: .* the nearest existing folder, {tmp_path}; see ",
    ):
        swap_activations(model, disk(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="cannot offload to .*: this path is not a folder"):
        swap_activations(model, disk(tmp_path / "file"))
    if sys.platform == "linux":
        with pytest.raises(
            OffloadError, match="cannot create a file for activations: .* in /proc .* user 0 can write"
        ):  # even root cannot write there
            swap_activations(model, "disk:/proc")
    assert not any("_farandole_wrappers" in vars(module) for module in model.modules())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up the rights of root")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code = (
        "import os, torch; from farandole.memory.swap import swap_activations; os.setgid(65534); os.setuid(65534)\n"
        f"try: swap_activations(torch.nn.Linear(1, 1), {disk(Path('/root'))!r})\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "OffloadError cannot create a file for activations: Permission denied in /root ("
    assert done.stdout.startswith(said) and "which user 65534 can write" in done.stdout, done.stderr


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    model, tokens = small_gpt()
    for to, words in (
        ("host", "this model is on cpu; use swap='disk:FOLDER'"),
        ("disk", "expected 'host'"),
        ("disk:", "expected .host"),
        ("host:x", "expected .host"),
    ):
        with pytest.raises(ValueError, match=words):
            swap_activations(model, to)
    with pytest.raises(ValueError, match="threshold_bytes=-1: expected at least 0"):
        swap_activations(model, disk(tmp_path), threshold_bytes=-1)
    with pytest.raises(ValueError, match="behind_bytes=0"):
        swap_activations(model, disk(tmp_path), behind_bytes=0)
    with swap_activations(model, disk(tmp_path), threshold_bytes=0) as swap:
        with pytest.raises(ValueError, match="already swapped"):
            swap_activations(model, disk(tmp_path))
        late = model(tokens).sum()
    swap.close()
    with pytest.raises(OffloadError, match="before calling close"):
        late.backward()


def test_a_slice_of_a_swapped_model_is_not_wrapped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    expected = model[:-1](x)
    with swap_activations(model, f"disk:{tmp_path}"):
        assert torch.equal(model[:-1](x), expected)
