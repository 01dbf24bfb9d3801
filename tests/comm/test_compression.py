"""Compression between hosts: results are close to the exact sums, residuals are kept, and all ranks agree."""

from __future__ import annotations

import contextlib
import io
import random
import re

import pytest
import torch
import torch.distributed as dist

from farandole.comm import CallMismatch, Communicator, notices
from farandole.comm.compression import Cast, Compression, Int8, PowerSGD, TopK, compression_named
from tests.comm.hosts import hierarchical_group
from tests.comm.jobs import Job
from tests.comm.test_hosts import everyones

LAYOUTS = {"2 x 1": [0, 1], "2 x 2": [0, 0, 1, 1], "3 + 1": [0, 0, 0, 1], "3 x 1": [0, 1, 2]}
LOSSY: list[Compression] = [Int8(), Int8(block=16), TopK(0.05), PowerSGD(2), Cast(error_feedback=True)]


def near(found: torch.Tensor, expected: torch.Tensor, relative: float) -> bool:
    error = (found.double() - expected.double()).norm()
    return bool(error <= relative * expected.double().norm() + 1e-12)


def check_same_everywhere(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    copies = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(copies, tensor, group=group)
    assert all(torch.equal(copy, tensor) for copy in copies)


def results(rank: int, size: int, host_of: list[int], options: dict, seed: int) -> None:
    group = hierarchical_group(host_of, rank, **options)
    comm = Communicator(group)
    chance = random.Random(seed)
    for length in (0, 1, 3, 700, 70_001):
        for compression, relative in (
            (Cast(), 1e-2),
            (Cast(torch.float16), 2e-3),
            (Int8(error_feedback=False), 2e-2),
            (TopK(1.0, error_feedback=False), 1e-6),
        ):
            op, expect = chance.choice([("sum", torch.sum), ("avg", torch.mean)])
            dtype, rounding = chance.choice(
                [(torch.float32, 0), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
            )
            inputs = everyones(size, length, (length,), dtype)
            found = inputs[rank].clone()
            comm.all_reduce(found, op, compression=compression)
            assert near(found, expect(inputs.double(), 0), relative + rounding), (compression, length, op)
            check_same_everywhere(found, group)
    grid = everyones(size, 1, (30, 40), torch.float32)
    strided = grid[rank].clone().t()
    work = comm.all_reduce(strided, compression=Cast(), async_op=True)
    assert work is not None
    work.wait()
    assert near(strided, grid.sum(0).t(), 1e-2)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_close_to_the_exact_sum(ranks, layout):
    host_of = LAYOUTS[layout]
    ranks(len(host_of)).run(results, host_of, {}, list(LAYOUTS).index(layout))


@pytest.mark.parametrize("options", [{"leaders": 1, "algorithm": "ring"}, {"transport": "gloo"}])
def test_results_are_close_to_the_exact_sum_with_every_option(ranks, options):
    ranks(4).run(results, LAYOUTS["2 x 2"], options, 9)


def nothing_is_lost(rank: int, size: int, host_of: list[int]) -> None:
    """The results plus the residuals of all leaders equal the inputs, and a second run gives the same bits."""
    group = hierarchical_group(host_of, rank)
    comm = Communicator(group)
    shapes = [(0, (90, 40)), (3600, (7,)), (3616, (30, 5, 20)), (6700, (200, 100))]
    for compression in LOSSY:
        for length, parameters in ((1, []), (40_000, []), (27_000, shapes)):
            outcomes = []
            for _ in range(2):
                compressor = compression.for_tensor(length, parameters)
                total_in, total_out = torch.zeros(length), torch.zeros(length)
                for step in range(3):
                    inputs = everyones(size, step, (length,), torch.float32)
                    tensor = inputs[rank].clone()
                    comm.all_reduce(tensor, "sum", compression=compressor)
                    check_same_everywhere(tensor, group)
                    total_in += inputs.sum(0)
                    total_out += tensor
                missing = torch.zeros(length)
                for name, residual in compressor.state.items():
                    if name.startswith("residual"):
                        start = int(name.split(".")[1])
                        missing[start : start + residual.numel()] = residual
                comm.all_reduce(missing)
                assert near(total_out + missing, total_in, 1e-5), (compression, length)
                outcomes.append(total_out)
            assert torch.equal(*outcomes)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transmitted_values_plus_residuals_equal_the_input(ranks, layout):
    host_of = LAYOUTS[layout]
    ranks(len(host_of)).run(nothing_is_lost, host_of)


def spoiled(rank: int, size: int) -> None:
    group = hierarchical_group([0, 0, 1, 1], rank)
    comm = Communicator(group)
    for compression in [*LOSSY, Cast(torch.float16, error_feedback=True)]:
        for bad in (torch.inf, -torch.inf, torch.nan):
            compressor = compression.for_tensor(5000)
            for step in range(4):
                tensor = everyones(size, step, (5000,), torch.float32)[rank]
                if step == 1 and rank == 3:
                    tensor[[17, 4000]] = bad
                comm.all_reduce(tensor, "avg", compression=compressor)
                check_same_everywhere(tensor.nan_to_num(), group)
                assert bool(tensor.isfinite().all()) == (step != 1), (compression, bad, step)
                assert all(value.isfinite().all() for value in compressor.state.values())
    dist.destroy_process_group(group)


def test_infinities_and_nan_arrive_and_do_not_enter_the_residual(ranks):
    ranks(4).run(spoiled)


def low_rank(rank: int, size: int) -> None:
    """Matrices of rank 2 arrive completely, and other tensors exactly, for any division among the leaders."""
    group = hierarchical_group([0, 0, 1, 1], rank)
    comm = Communicator(group)
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(60, 2, generator=generator), torch.randn(2, 80, generator=generator)
    vector = torch.randn(33, generator=generator)
    compressor = PowerSGD(2).for_tensor(
        4800 + 33 + 4800 + 2, [(0, (60, 80)), (4800, (33,)), (4833, (60, 8, 10))], 2
    )
    for step in range(4):
        matrix = (left @ right).view(-1) * (rank + 1) / 10
        flat = torch.cat([matrix, vector * rank, -matrix, torch.tensor([1.0, rank])])
        comm.all_reduce(flat, "sum", compression=compressor)
        if step > 1:  # the power iteration has found the two directions
            assert near(flat[:4800], (left @ right).view(-1), 1e-4)
        assert near(flat[4800:4833], vector * 6, 1e-6)
        assert flat[-2:].tolist() == [4.0, 6.0]
    zeros = torch.zeros(compressor.count)
    comm.all_reduce(zeros, "sum", compression=compressor)  # finds no direction at all
    comm.all_reduce(flat, "sum", compression=compressor)
    assert not all((value == 0).all() for name, value in compressor.state.items() if "right" in name)
    dist.destroy_process_group(group)


def test_matrices_of_low_rank_are_reduced_exactly(ranks):
    ranks(4).run(low_rank)


def large(rank: int, size: int) -> None:
    """Transfer many windows at the same time."""
    group = hierarchical_group([0, 0, 1, 1], rank)
    inputs = everyones(size, 5, (5_000_000,), torch.float32)
    expected = inputs.sum(0)
    for compression, relative in ((Int8(), 2e-2), (TopK(1.0), 1e-6)):
        compressor = compression.for_tensor(inputs.shape[1], exact=1_500_000)
        tensor = inputs[rank].clone()
        Communicator(group).all_reduce(tensor, compression=compressor)
        assert near(tensor[:3_500_000], expected[:3_500_000], relative)
        assert near(tensor[3_500_000:], expected[3_500_000:], 1e-6)
    dist.destroy_process_group(group)


def test_tensors_of_many_windows(ranks):
    ranks(4).run(large)


def remembered(rank: int, size: int) -> None:
    """A compressor with a loaded state continues with the same bits."""
    group = hierarchical_group([0, 1], rank)
    comm = Communicator(group)
    for compression in LOSSY:
        first = compression.for_tensor(3000)
        inputs = everyones(size, 1, (3000,), torch.float32)[rank]
        comm.all_reduce(inputs.clone(), compression=first)
        second = compression.for_tensor(3000)
        second.load(first.state)
        a, b = inputs.clone(), inputs.clone()
        comm.all_reduce(a, compression=first)
        comm.all_reduce(b, compression=second)
        assert torch.equal(a, b)
        before = {name: value.clone() for name, value in first.state.items()}
        first.scale_residuals(0.5)
        for name, value in first.state.items():
            assert torch.equal(value, before[name] * (0.5 if "residual" in name else 1))
    dist.destroy_process_group(group)


def first_in_inference_mode(rank: int, size: int) -> None:
    comm = Communicator(hierarchical_group([0, 1], rank))
    for compression in (Int8(), TopK(ratio=0.5), PowerSGD(rank=1)):
        compressor, values = compression.for_tensor(64), torch.arange(64.0)
        with torch.inference_mode():
            comm.all_reduce(values.clone(), "avg", compression=compressor)
        comm.all_reduce(values, "avg", compression=compressor)
        assert values[-1] > 60


def test_a_compressor_may_be_used_first_in_inference_mode(ranks):
    ranks(2).run(first_in_inference_mode)


def test_state_can_be_saved(ranks):
    ranks(2).run(remembered)


def loaded_on_other_hosts(rank: int, size: int) -> int:
    """A state that was saved on two hosts is discarded on four hosts; return the number of warnings."""
    before, after = (Communicator(hierarchical_group(hosts, rank)) for hosts in ([0, 0, 1, 1], [0, 1, 2, 3]))
    notices._logged.clear()
    inputs = everyones(size, 1, (3000,), torch.float32)[rank]
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for compression in LOSSY:
            saved, loaded, fresh = (compression.for_tensor(3000) for _ in range(3))
            before.all_reduce(inputs.clone(), compression=saved)
            loaded.load(saved.state)
            for _ in range(2):
                a, b = inputs.clone(), inputs.clone()
                after.all_reduce(a, compression=loaded)
                after.all_reduce(b, compression=fresh)
                assert torch.equal(a, b), compression
            assert all(torch.equal(loaded.state[name], value) for name, value in fresh.state.items())
    return printed.getvalue().count("compression state was saved with a different number of hosts")


def test_a_state_of_other_hosts_is_discarded_with_one_warning(ranks):
    assert ranks(4).run(loaded_on_other_hosts) == [1, 0, 1, 0]


def refusals(rank: int, size: int) -> None:
    group, other = hierarchical_group([0, 1], rank), hierarchical_group([0, 1], rank)
    comm = Communicator(group)
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"expected one of torch.float32.*, got {dtype}"):
            comm.all_reduce(torch.zeros(4, dtype=dtype), compression=Cast())
    for op in ("max", "product"):
        with pytest.raises(ValueError, match="expected the reduction 'sum' or 'avg'"):
            comm.all_reduce(torch.zeros(4), op, compression=Cast())
    with pytest.raises(ValueError, match=r"for_tensor\(4\)"):
        comm.all_reduce(torch.zeros(4), compression=Int8())
    with pytest.raises(TypeError, match="expected Cast, Int8"):
        comm.all_reduce(torch.zeros(4), compression="int8")  # type: ignore[arg-type]
    compressor = Int8().for_tensor(5)
    with pytest.raises(ValueError, match="expected 5 elements .as passed to for_tensor., got 4"):
        comm.all_reduce(torch.zeros(4), compression=compressor)
    comm.all_reduce(torch.zeros(5), compression=compressor)
    with pytest.raises(ValueError, match="expected reduction 'sum'"):
        comm.all_reduce(torch.zeros(5), "avg", compression=compressor)
    with pytest.raises(ValueError, match="another group"):
        Communicator(other).all_reduce(torch.zeros(5), compression=compressor)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="backend 'farandole', got a group with gloo"):
        Communicator(gloo).all_reduce(torch.zeros(5), compression=Cast())
    with pytest.raises(CallMismatch, match="differ in compression"):
        comm.all_reduce(torch.zeros(5), compression=Cast([torch.bfloat16, torch.float16][rank]))
    for each in (group, other, gloo):
        dist.destroy_process_group(each)


def test_unsupported_tensors_and_calls_are_refused(ranks):
    ranks(2).run(refusals)


def on_one_host(rank: int, size: int) -> str:
    said = io.StringIO()
    notices._logged.clear()
    group = dist.new_group(list(range(size)), backend="farandole")
    with contextlib.redirect_stderr(said):
        for _ in range(2):
            tensor = torch.full((1000,), 1.0 + rank / 1000)
            Communicator(group).all_reduce(tensor, compression=Int8().for_tensor(1000))
            assert torch.equal(tensor, torch.full((1000,), 1.0) + (1.0 + 1 / 1000))
    dist.destroy_process_group(group)
    return said.getvalue()


def test_compression_on_one_host_has_no_effect_and_one_rank_warns_once(ranks):
    first, second = ranks(2).run(on_one_host)
    assert first.count("compression has no effect") == 1
    assert not second


def reduce_for_ever(rank, size, tell):
    comm = Communicator(hierarchical_group([0, 0, 1, 1], rank))
    compressor = Int8().for_tensor(2_000_000)
    tensor = torch.ones(2_000_000)
    for step in range(100_000):
        comm.all_reduce(tensor, "avg", compression=compressor)
        if step == 2:
            tell("under way")


def test_a_rank_that_is_killed_is_named_on_both_hosts():
    with Job(4, reduce_for_ever) as job:
        for rank in range(4):
            job.hear(rank)
        since = job.kill(3)
        for rank in range(3):
            end = job.end(rank)
            assert (end.kind, end.at - since < 10) == ("RankDied", True), end
            assert re.search(r"rank 3 \(process \d+ on host1\)", end.text), end.text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cast(torch.float32), "expected torch.bfloat16 or torch.float16"),
        (lambda: Int8(block=8), "between 16 and 4096"),
        (lambda: TopK(0), "0 < ratio"),
        (lambda: PowerSGD(0), "rank >= 1"),
        (lambda: compression_named("int4"), "one of none, bf16, fp16, int8"),
        (lambda: Int8().for_tensor(5, exact=6), "expected 0 <= exact <= count, got exact=6, count=5"),
        (lambda: PowerSGD().for_tensor(9, [(4, (3, 2))]), "within the first 9 elements"),
        (
            lambda: PowerSGD().for_tensor(9, [(4, (2, 2)), (0, (2, 2))]),
            "expected parameters in increasing order",
        ),
    ],
)
def test_invalid_settings_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("name", ["bf16", "int8", "topk", "powersgd"])
def test_a_tensor_without_elements_needs_no_state(name: str) -> None:
    compression = compression_named(name)
    assert compression is not None
    compressor = compression.for_tensor(0, [])
    assert compressor.state_bytes(1, 0, 1024) == 0 and 0 < compressor.sent_fraction(2) <= 1
