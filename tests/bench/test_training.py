"""The synthetic training benchmark: every implementation trains the same model, and the report adds up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import farandole
from farandole.bench.half import HalfCommunicator
from farandole.bench.options import BenchError
from farandole.bench.setup import TrainingSetup
from farandole.bench.torch_training import HOROVOD, IMPLEMENTATIONS, Job, PyTorch, _is_there
from farandole.bench.training import run
from farandole.models.resnet import build_resnet, resnet_config
from tests.launch.jobs import run as run_command
from tests.ports import free_port

TINY = TrainingSetup(
    model="tiny", micro_batch=4, image_size=32, num_warmup_batches=1, num_batches_per_iter=2, num_iters=3
)
HERE = [name for name in IMPLEMENTATIONS if name != "horovod" or _is_there(HOROVOD)]


def _report(rank: int, size: int, setup: TrainingSetup) -> None:
    run(setup)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_report_is_consistent(ranks, tmp_path, size):
    path = tmp_path / "figures.json"
    ranks(size).run(_report, TrainingSetup(**{**vars(TINY), "efficiency": True, "json": str(path)}))
    result = json.loads(path.read_text())
    figures = result["images_per_second_per_rank"]
    assert result["ranks"] == size and {name: len(values) for name, values in figures.items()} == {
        "together": 3,
        "apart": 3,
        "alone": 3,
    }
    mean = sum(figures["together"]) / 3
    assert result["mean"] == pytest.approx(mean) and result["total"] == pytest.approx(size * mean)
    assert result["efficiency"]["apart"] == pytest.approx(mean * 3 / sum(figures["apart"]))
    assert result["efficiency"]["alone"] == pytest.approx(mean * 3 / sum(figures["alone"]))
    deviation = (sum((value - mean) ** 2 for value in figures["together"]) / 3) ** 0.5
    assert result["spread"] == pytest.approx(1.96 * deviation)


def _gradients(
    rank: int, size: int, implementation: str, half: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights after a step of an implementation, and after a step with the mean of all ranks' gradients."""
    torch.manual_seed(0)
    models = [build_resnet(resnet_config("tiny")) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    images, targets = torch.randn(2, 3, 32, 32) + rank, torch.tensor([rank, 3])
    if not half:
        images, models = images.double(), [model.double() for model in models]
    with farandole.init() as runtime:
        jobs = [
            Job(model, torch.optim.SGD(model.parameters(), 0.1), images, targets, False, half, runtime)
            for model in models
        ]
        IMPLEMENTATIONS[implementation](jobs[0])()
    jobs[1].backward(models[1])
    for parameter in models[1].parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    jobs[1].optimizer.step()
    return tuple([p.detach() for p in model.parameters()] for model in models)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("implementation", HERE)
def test_every_engine_averages_gradients(ranks, implementation, half):
    for ours, expected in ranks(2).run(_gradients, implementation, half):
        tolerance = {"rtol": 2e-2, "atol": 2e-4} if half else {}
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, **tolerance)


def _reduce_as_half(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    comm = HalfCommunicator(dist.group.WORLD)
    tensor = torch.tensor([1.0 + rank, 1 + 2**-12, 1e6])
    for turn in range(2):
        values = tensor.clone()
        work = comm.all_reduce(values, "sum", async_op=turn == 1)
        if work is not None:
            work.wait()
        assert values.tolist() == [3.0, 2.0, float("inf")]
    whole = torch.tensor([2**20 + 1 + rank])
    comm.all_reduce(whole, "max")
    assert whole.item() == 2**20 + 2


def test_half_precision_is_for_fp32_only(ranks):
    ranks(2).run(_reduce_as_half)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "resnet5"}, "--model resnet5: unknown model 'resnet5'; nearest: resnet50"),
        ({"micro_batch": 0}, "--micro-batch: expected at least 1, got 0"),
        ({"num_iters": 0}, "--num-iters: expected at least 1, got 0"),
        ({"num_warmup_batches": -1}, "--num-warmup-batches: expected at least 0, got -1"),
        ({"image_size": 31}, "--image-size 31 is too small: .* at least 32 x 32"),
        ({"micro_batch": 1}, "--micro-batch 1 with --image-size 32 .* use 2 images or larger images"),
        (
            {"implementation": "gloo"},
            r"--implementation gloo is unknown; nearest: ddp-gloo \(available: farandole, ",
        ),
        ({"json": "/no/such/folder/x.json"}, "folder /no/such/folder does not exist"),
    ],
)
def test_unsupported_options_are_refused(change, message):
    setup = TrainingSetup(**{**vars(TINY), **change})
    with pytest.raises(BenchError, match=message):
        setup.check(), PyTorch().check(setup)


def test_missing_horovod_is_refused(monkeypatch):
    monkeypatch.setattr("farandole.bench.torch_training.HOROVOD", "farandole.nowhere.torch")
    with pytest.raises(
        BenchError, match="needs farandole.nowhere.torch, .*; use one of farandole, ddp, ddp-gloo"
    ):
        PyTorch().check(TrainingSetup(**{**vars(TINY), "implementation": "horovod"}))


COMMAND = [
    *(sys.executable, "-m", "farandole", "bench", "training", "--model", "tiny", "--image-size", "32"),
    *("--micro-batch", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"),
]


def test_the_command_launches_ranks_and_prints_horovods_lines(tmp_path):
    status, out, err = run_command([*COMMAND, "--ranks", "2"], tmp_path, fork_ranks=True)
    assert status == 0, err
    kinds = [line.split(":")[0] for line in out.splitlines()]
    assert kinds == [
        *("Model", "Batch size", "Number of ranks", "Running warmup...", "Running benchmark..."),
        *("Iter #0", "Iter #1", "Img/sec per rank", "Total img/sec on 2 rank(s)"),
    ]


def test_under_another_launcher_one_rank_prints(tmp_path: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port()), *COMMAND[1:]]
    status, out, err = run_command(torchrun, tmp_path, fork_ranks=True)
    assert status == 0, err
    assert out.count("Number of ranks: 2") == 1
