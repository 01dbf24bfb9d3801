"""Compare the collective operations with arithmetic on the inputs of all ranks."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.horovod.jobs import FLOATS, INTEGERS, all_given, close, given, session

SIZES = (1, 2, 4)


def reductions(rank, size):
    with session():
        integers = [dtype for dtype in INTEGERS if dtype != torch.int16 or not hvd.gloo_enabled()]
        for dtype, shape in itertools.product((*FLOATS, *integers), ((), (7,), (3, 0), (2, 3, 5))):
            mine, everyone = given(rank, shape, dtype), all_given(size, shape, dtype)
            kept = mine.clone()
            exact = everyone.double()
            close(hvd.allreduce(mine, op=hvd.Sum), exact.sum(0).to(dtype))
            mean = exact.mean(0)
            close(hvd.allreduce(mine), (mean if dtype.is_floating_point else mean.trunc()).to(dtype))
            close(hvd.allreduce(mine, op=hvd.Min), everyone.amin(0))
            close(hvd.allreduce(mine, op=hvd.Max), everyone.amax(0))
            if dtype.is_floating_point:
                close(hvd.allreduce(mine, op=hvd.Product), exact.prod(0).to(dtype))
                scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
                close(scaled, (exact.sum(0) * 1.5).to(dtype))
            assert torch.equal(mine, kept)
            assert hvd.allreduce_(mine, op=hvd.Sum) is mine
            close(mine, exact.sum(0).to(dtype))


def int16_is_refused(rank, size):
    with session(), pytest.raises(ValueError, match="does not support int16"):
        hvd.allreduce(torch.ones(2, dtype=torch.int16))


def test_gloo_does_not_reduce_int16(ranks):
    ranks(1, "gloo").run(int16_is_refused)


@pytest.mark.parametrize("size", SIZES)
def test_allreduce(ranks, size):
    ranks(size).run(reductions)


def test_allreduce_through_gloo(ranks):
    ranks(2, "gloo").run(reductions)


def allreduce_forms(rank, size):
    with session():
        everyone = all_given(size, (4, 3))
        mine = everyone[rank].clone()
        close(hvd.allreduce(mine, average=False), everyone.sum(0))
        close(hvd.allreduce(mine, average=True), everyone.mean(0))
        with pytest.raises(ValueError, match="supersedes average"):
            hvd.allreduce(mine, average=True, op=hvd.Sum)
        close(hvd.allreduce(mine, compression=hvd.Compression.bf16).bfloat16(), everyone.mean(0).bfloat16())
        narrow = hvd.allreduce(mine, compression=hvd.Compression.fp16)
        torch.testing.assert_close(narrow, everyone.mean(0), rtol=1e-2, atol=1e-2)
        # the tensor and the result are not contiguous
        close(hvd.allreduce(mine.t(), op=hvd.Sum), everyone.sum(0).t())
        in_place = mine.clone().t()
        hvd.allreduce_(in_place, op=hvd.Sum)
        close(in_place, everyone.sum(0).t())
        special = torch.tensor([float("nan"), float("inf"), -0.0, 1.0]) if rank == 0 else torch.zeros(4)
        result = hvd.allreduce(special, op=hvd.Sum)
        assert result[0].isnan() and result[1].isinf() and result[3] == 1
        handle = hvd.allreduce_async(mine, name="asynchronous")
        close(hvd.synchronize(handle), everyone.mean(0))
        assert hvd.synchronize(handle) is None  # as in Horovod, a handle has its result once
        handle = hvd.allreduce_async_(mine.clone(), op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        close(hvd.wait(handle), everyone.sum(0))
        with pytest.raises(ValueError, match="expected the handle"):
            hvd.poll(handle)
        with pytest.raises(ValueError, match=r"complex64|ComplexFloat"):
            hvd.allreduce(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(ValueError, match="use one of hvd"):
            hvd.allreduce(mine, op=17)


@pytest.mark.parametrize("size", [1, 2])
def test_forms_of_allreduce(ranks, size):
    ranks(size).run(allreduce_forms)


def groups(rank, size):
    with session():
        shapes = [(3,), (), (2, 2), (0, 4)]
        mine = [given(rank, shape, seed=i) for i, shape in enumerate(shapes)]
        everyone = [all_given(size, shape, seed=i) for i, shape in enumerate(shapes)]
        for result, expected in zip(hvd.grouped_allreduce(mine, name="group"), everyone, strict=True):
            close(result, expected.mean(0))
        mixed = [mine[0].clone(), torch.full((2,), rank), mine[2].double()]
        hvd.grouped_allreduce_(mixed, op=hvd.Sum)
        close(mixed[0], everyone[0].sum(0))
        close(mixed[1], torch.full((2,), sum(range(size))))
        close(mixed[2], everyone[2].double().sum(0))
        gathered = hvd.grouped_allgather([mine[0], torch.full((rank, 2), rank)])
        close(gathered[0], everyone[0].flatten(0, 1))
        close(gathered[1], torch.cat([torch.full((r, 2), r) for r in range(size)]))
        scattered = hvd.grouped_reducescatter([mine[0], mine[2]], op=hvd.Sum)
        close(scattered[0], everyone[0].sum(0).tensor_split(size)[rank])
        close(scattered[1], everyone[2].sum(0).tensor_split(size)[rank])
        with pytest.raises(ValueError, match="at least one tensor"):
            hvd.grouped_allreduce([])


@pytest.mark.parametrize("size", SIZES)
def test_groups(ranks, size):
    ranks(size).run(groups)


def data_movement(rank, size):
    with session():
        for dtype in (torch.float32, torch.uint8, torch.bool, torch.bfloat16, torch.int64):
            for rows, rest in itertools.product(
                ([2] * size, list(range(size)), [0] * size), ((), (3,), (0,))
            ):
                parts = [given(r, (rows[r], *rest), dtype) for r in range(size)]
                close(hvd.allgather(parts[rank]), torch.cat(parts))
            for root in range(size):
                everyone = all_given(size, (2, 3), dtype)
                mine = everyone[rank].clone()
                close(hvd.broadcast(mine, root), everyone[root])
                close(mine, everyone[rank])
                hvd.broadcast_(mine, root)
                close(mine, everyone[root])
        # rank i sends i + j rows to rank j, and keeps one more
        counts = [[i + j for j in range(size)] for i in range(size)]
        sent = [given(i, (sum(counts[i]) + 1, 3)) for i in range(size)]
        expected = torch.cat([sent[i].split([*counts[i], 1])[rank] for i in range(size)])
        output, received = hvd.alltoall(sent[rank], splits=counts[rank])
        close(output, expected)
        assert received.tolist() == [counts[i][rank] for i in range(size)]
        output, _ = hvd.alltoall(sent[rank], splits=torch.tensor(counts[rank], dtype=torch.int32))
        close(output, expected)
        even = [given(i, (2 * size,)) for i in range(size)]
        close(hvd.alltoall(even[rank]), torch.cat([one.split(2)[rank] for one in even]))
        output, received = hvd.alltoall(torch.zeros(0, 2), splits=[0] * size)
        assert output.shape == (0, 2) and received.tolist() == [0] * size
        # rank 0 sends to itself, and other ranks neither send nor receive
        rows = size if rank == 0 else 0
        output, received = hvd.alltoall(torch.ones(rows, 2), splits=[rows] + [0] * (size - 1))
        close(output, torch.ones(rows, 2))
        assert received.tolist() == [rows] + [0] * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_data_movement(ranks, size):
    ranks(size).run(data_movement)


def test_data_movement_through_gloo(ranks):
    ranks(3, "gloo").run(data_movement)


def in_inference_mode(rank, size):
    """Run operations on inference tensors, which the engine's thread can write in inference mode only."""
    with session():
        everyone = all_given(size, (2 * size, 3))
        with torch.inference_mode():
            mine = everyone[rank].clone()
            close(hvd.allreduce(mine, prescale_factor=2.0), everyone.mean(0) * 2)
            close(hvd.allreduce(torch.tensor([rank, 5]), op=hvd.Max), torch.tensor([size - 1, 5]))
            group = hvd.grouped_allreduce([mine, mine.t()], op=hvd.Sum)
            close(group[1], everyone.sum(0).t())
            close(hvd.allgather(mine), everyone.flatten(0, 1))
            close(hvd.broadcast(mine, 0), everyone[0])
            close(
                hvd.reducescatter(mine, postscale_factor=2.0), everyone.mean(0).tensor_split(size)[rank] * 2
            )
            close(hvd.alltoall(mine), torch.cat([one.tensor_split(size)[rank] for one in everyone]))
            assert hvd.broadcast_object(rank) == 0
            hvd.allreduce_(mine, op=hvd.Adasum)
        # operations outside inference mode work again, including their fusion buffer
        weight = torch.ones(3, requires_grad=True)
        sum(each.sum() for each in hvd.grouped_allreduce([weight, weight * 2])).backward()
        close(weight.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("size", SIZES)
def test_inference_mode(ranks, size):
    ranks(size).run(in_inference_mode)


def scatters(rank, size):
    with session():
        for rows, op in itertools.product((0, 1, size, 2 * size + 1), (hvd.Sum, hvd.Average, hvd.Max)):
            everyone = all_given(size, (rows, 2))
            reduced = {hvd.Sum: everyone.sum(0), hvd.Average: everyone.mean(0), hvd.Max: everyone.amax(0)}[op]
            # the first ranks get one more row, as with torch.tensor_split
            close(hvd.reducescatter(everyone[rank], op=op), reduced.tensor_split(size)[rank])
        everyone = all_given(size, (size,))
        scaled = hvd.reducescatter(everyone[rank], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        close(scaled, everyone.sum(0)[rank : rank + 1] / 2)


@pytest.mark.parametrize("size", SIZES)
def test_reducescatter(ranks, size):
    ranks(size).run(scatters)


def test_reducescatter_through_gloo(ranks):
    ranks(3, "gloo").run(scatters)


def wrong_arguments(rank, size):
    with session():
        ones = torch.ones(3)
        for call, words in [
            (lambda: hvd.allgather(torch.tensor(1.0)), "got a scalar"),
            (lambda: hvd.broadcast(ones, size), "invalid root rank"),
            (lambda: hvd.alltoall(ones), "must be divisible"),
            (lambda: hvd.alltoall(ones, splits=[2, 2]), "greater than the first dimension"),
            (lambda: hvd.alltoall(ones, splits=[1]), "does not equal number of workers"),
            (lambda: hvd.alltoall(ones, splits=[0.5, 2.5]), "one-dimensional list or tensor of integers"),
            (lambda: hvd.alltoall(ones, splits=[-1, 2]), "negative"),
            (lambda: hvd.reducescatter(ones, op=hvd.Adasum), "Adasum"),
            (lambda: hvd.allreduce(torch.ones(2).to_sparse()), "sparse"),
            (lambda: hvd.join("cuda"), "device number"),
            (lambda: hvd.allreduce_(torch.ones(1, 2).expand(3, 2)), "share memory"),
            (lambda: hvd.broadcast_(torch.ones(1).expand(3), 0), "share memory"),
            (
                lambda: hvd.allreduce(ones, name=3),
                "expected name to be a string or None, got 3; try name='3'",
            ),
            (lambda: hvd.allreduce(ones, op=1.0), "use one of hvd"),
            (
                lambda: hvd.allreduce(ones, prescale_factor=None),
                "prescale_factor to be a finite number, got None",
            ),
            (
                lambda: hvd.grouped_allreduce_([ones], postscale_factor=math.nan),
                "postscale_factor .* got nan",
            ),
            (lambda: hvd.reducescatter(ones, prescale_factor="a"), "prescale_factor .* got 'a'"),
        ]:
            with pytest.raises(ValueError, match=words):
                call()
        close(hvd.allreduce(ones), ones)  # valid operations work after errors


def test_invalid_arguments_raise_immediately(ranks):
    ranks(2).run(wrong_arguments)


def sparse(rank, size):
    with session():
        indices = torch.tensor([[0, rank + 1, 0], [1, 2, 1]])
        mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]) + rank, (6, 4))
        dense = hvd.allreduce(mine.to_dense(), op=hvd.Sum)
        for op, expected in ((hvd.Sum, dense), (hvd.Average, dense / size)):
            handle = hvd.sparse_allreduce_async(mine, name=f"sparse.{op}", op=op)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # PyTorch warns if check_invariants is not given
                result = handle()
            assert result.is_sparse
            close(result.to_dense(), expected)
        with pytest.raises(ValueError, match="op=Average or op=Sum"):
            hvd.sparse_allreduce_async(mine, "sparse", hvd.Max)
        other = torch.sparse_coo_tensor(torch.tensor([[5 * rank]]), torch.ones(1), (1 + 5 * rank,))
        handle = hvd.sparse_allreduce_async(other, name="larger", op=hvd.Sum)
        if rank == 0:  # the index from rank 1 is outside of this rank's tensor
            with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
                handle()
        else:
            close(handle().to_dense(), torch.tensor([1.0, 0, 0, 0, 0, 1]))
        with pytest.raises(ValueError, match="sparse COO"):
            hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum)


def test_sparse_allreduce(ranks):
    ranks(2).run(sparse)
