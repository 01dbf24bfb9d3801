"""The trainer and its checkpoints, on the pool's ranks."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from farandole.launch.runtime import init
from farandole.plan import Precision
from farandole.train.checkpoint import CheckpointWriter, load
from farandole.train.hardware import PrecisionChoice
from farandole.train.metrics import read_metrics
from farandole.train.observer import Observer
from farandole.train.run_folder import CheckpointError, checkpoints
from farandole.train.trainer import Trainer
from tests.train.small import make_trainer, overrides, world


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Overrides for a small text."""
    return overrides(tmp_path)


def _writer(run: Path, trainer: Trainer, keep: int = 2) -> CheckpointWriter:
    return CheckpointWriter(run, trainer.task.files(), keep, world())


def _losses(rank: int, size: int, words: list[str], precision: str, steps: int) -> list[float]:
    trainer = make_trainer(words, precision)
    return [trainer.step().loss for _ in range(steps)] + [trainer.evaluate()["loss"]]


def test_ranks_and_micro_batches_do_not_change_losses(ranks: Any, words: list[str]) -> None:
    alone = ranks(1).run(_losses, words, "fp32", 6)[0]
    for size, micro in ((2, 0), (2, 2), (4, 1)):
        results = ranks(size).run(_losses, [*words, f"micro_batch={micro}"], "fp32", 6)
        assert all(result == results[0] for result in results)
        assert results[0] == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_has_similar_losses(ranks: Any, words: list[str], precision: str) -> None:
    expected = ranks(2).run(_losses, words, "fp32", 10)[0]
    result = ranks(2).run(_losses, words, precision, 10)[0]
    assert result == pytest.approx(expected, rel=0.05)


def _overflow(rank: int, size: int, words: list[str]) -> None:
    trainer = make_trainer(words, "fp16")
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.scaler.scale = 2.0**40 if rank == 0 else 1.0  # only rank 0 overflows
    factor = trainer.scaler.scale
    result = trainer.step()
    assert result.skipped
    first = next(iter(dict(trainer.model.named_parameters())))
    assert str(result.overflow).startswith(f"OVERFLOW step 1: rank 0, {first} grad ")
    assert trainer.scaler.scale == factor / 2
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    trainer.scaler.scale = 128.0
    assert not trainer.step().skipped


def test_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, words: list[str]) -> None:
    ranks(2).run(_overflow, words)


def _overflow_output(rank: int, size: int, words: list[str], run: Path) -> str:
    """Return the output of two steps that overflow."""
    trainer = make_trainer([*words, "log.every=1000"], "fp16")
    runtime = init()  # the pool's own group
    run.mkdir(exist_ok=True)
    trainer.step_number = trainer.scaler.steps = 6
    trainer.scaler.scale = 2.0**50
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        Observer(
            trainer.config, run, trainer, PrecisionChoice("fp16", "configured"), runtime, 0.0
        ) as observer,
    ):
        for _ in range(2):
            observer.stepped(trainer.step(), 0.1)
    return output.getvalue()


def test_overflows_are_reported(ranks: Any, words: list[str], tmp_path: Path) -> None:
    output, _ = ranks(2).run(_overflow_output, words, tmp_path / "run")
    first, second = [line for line in output.splitlines() if line.startswith("OVERFLOW")]
    scales = f"scale {2**50} -> {2**49}, step skipped"
    assert re.fullmatch(rf"OVERFLOW step 7: rank 0, 0\.tokens\.weight grad (inf|nan) \(.*\); {scales}", first)
    assert second.startswith("OVERFLOW step 8: ")
    assert second.endswith("step skipped; the outputs of all blocks were finite")
    seven, eight = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (seven["overflow"], seven["loss_scale"]) == (first, 2.0**49)
    assert eight["overflow"] == second


def test_diagnose_explains_the_first_overflow(ranks: Any, words: list[str], tmp_path: Path) -> None:
    words = [*words, "plan.precision=fp16", "log.diagnose=true"]
    output, _ = ranks(2).run(_overflow_output, words, tmp_path / "run")
    first = next(line for line in output.splitlines() if line.startswith("OVERFLOW step 7"))
    assert first.endswith("step skipped; the outputs of all blocks were finite")


def _diverge(rank: int, size: int, words: list[str]) -> str:
    trainer = make_trainer(words)
    if rank == 1:
        next(trainer.model.parameters()).data.fill_(float("nan"))
    with pytest.raises(FloatingPointError) as error:
        trainer.step()
    return str(error.value)


def test_divergence_is_reported_on_all_ranks(ranks: Any, words: list[str]) -> None:
    for message in ranks(2).run(_diverge, words):
        assert "step 1: training diverged: gradient norm nan" in message
        assert "at loss nan, rank 1, 0.tokens.weight grad nan (and " in message
        assert "reduce optimizer.learning_rate=0.002" in message


def _stop(rank: int, size: int, words: list[str]) -> list[bool]:
    trainer = make_trainer(words)
    return [trainer.step(stop=rank == 1 and step == 2).stop for step in range(4)]


def test_all_ranks_stop_at_the_same_step(ranks: Any, words: list[str]) -> None:
    assert ranks(2).run(_stop, words) == [[False, False, True, False]] * 2


def _save_and_load(rank: int, size: int, words: list[str], run: Path, precision: Precision) -> list[str]:
    trainer = make_trainer([*words, "model.dropout=0.2"], precision)
    writer = _writer(run, trainer)
    for step in range(1, 7):
        trainer.step()
        if step % 2 == 0:
            writer.save(trainer, 1.0)
        if step == 4:
            mark = writer.newest
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    weights = {names[id(p)]: value.clone() for p, value in trainer.engine.whole_parameters()}
    writer.wait()
    written = load_file(writer.newest / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(written[name], value), name
        assert written[name].dtype == value.dtype
    kept = [path.name for path in checkpoints(run)]

    other = make_trainer([*words, "model.dropout=0.2"], precision)
    metadata = load(other, mark, world())
    assert (metadata.step, metadata.consumed, metadata.ranks) == (4, 4 * trainer.config.batch, size)
    for _ in range(2):
        other.step()
    for (_, ours), theirs in zip(other.engine.whole_parameters(), weights.values(), strict=True):
        assert torch.equal(ours, theirs)
    assert other.scaler.scale == trainer.scaler.scale
    return kept


@pytest.mark.parametrize(
    ("size", "precision", "plan"),
    [
        (1, "fp32", ""),
        (2, "fp16", ""),
        (2, "bf16", "plan.rounding=stochastic plan.precision=bf16"),
        (2, "bf16", "plan.zero=2 plan.offload=disk:{}"),
        (2, "bf16", "plan.zero=3 plan.offload=disk:{} plan.offloaded=parameters plan.swap=disk:{}"),
    ],
)
def test_loaded_trainer_resumes_bit_for_bit(
    ranks: Any, words: list[str], tmp_path: Path, size: int, precision: Precision, plan: str
) -> None:
    words = [*words, *plan.format(tmp_path, tmp_path).split()]
    for kept in ranks(size).run(_save_and_load, words, tmp_path / "run", precision):
        assert kept == ["step-000004", "step-000006"]
    assert sorted(p.name for p in (tmp_path / "run/checkpoints/step-000006").iterdir()) == [
        *("model.safetensors", "state", "tokenizer.json", "train.json")
    ]


def _earlier_version(rank: int, size: int, words: list[str], run: Path) -> None:
    trainer = make_trainer(words, "fp16")
    trainer.step()
    trainer.scaler.scale, trainer.scaler.good_steps = 1.0, 5
    writer = _writer(run, trainer)
    writer.save(trainer, 0.0)
    writer.wait()
    loaded = make_trainer(words, "fp16")
    load(loaded, writer.newest, world())
    assert loaded.scaler.state_dict() == trainer.scaler.state_dict()
    if rank == 0:
        (writer.newest / "state" / "engine.json").unlink()
        metadata = json.loads((writer.newest / "train.json").read_text())
        metadata |= {"loss_scale": 64.0, "good_steps": 3}
        (writer.newest / "train.json").write_text(json.dumps(metadata))
    dist.barrier()
    earlier = make_trainer(words, "fp16")
    load(earlier, writer.newest, world())
    assert (earlier.scaler.scale, earlier.scaler.good_steps, earlier.scaler.steps) == (64.0, 3, 1)
    for ours, theirs in zip(earlier.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_loss_scale_is_loaded_from_current_and_earlier_formats(
    ranks: Any, words: list[str], tmp_path: Path
) -> None:
    ranks(2).run(_earlier_version, words, tmp_path / "run")


def _deleted(rank: int, size: int, words: list[str], run: Path) -> list[str]:
    """Return the names that folders have when the writer deletes them."""
    trainer = make_trainer(words)
    writer = _writer(run, trainer, keep=1)
    with mock.patch("farandole.train.checkpoint.shutil.rmtree") as rmtree:
        for _ in range(2):
            trainer.step()
            writer.save(trainer, 0.0)
            writer.wait()
    return [call.args[0].name for call in rmtree.call_args_list]


def test_checkpoints_are_renamed_before_deletion(ranks: Any, words: list[str], tmp_path: Path) -> None:
    assert ranks(1).run(_deleted, words, tmp_path / "run") == [["step-000001.tmp"]]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000002"]


def _fail_to_save(rank: int, size: int, words: list[str], run: Path, failing: int) -> str:
    trainer = make_trainer(words)
    writer = _writer(run, trainer)
    dist.barrier()
    if rank == failing:
        writer._contents = {"no folder/tokenizer.json": b""}
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints").touch()
    dist.barrier()
    writer.save(trainer, 0.0)
    with pytest.raises(CheckpointError) as error:
        writer.wait()
    return str(error.value)


def test_failed_save_raises_on_all_ranks(ranks: Any, words: list[str], tmp_path: Path) -> None:
    for message in ranks(2).run(_fail_to_save, words, tmp_path / "run", 0):
        assert f"cannot write checkpoint {tmp_path / 'run' / 'checkpoints' / 'step-000000'}: " in message
        assert "Traceback" not in message
        assert message.endswith("there is no earlier checkpoint; see 'farandole explain checkpointerror'")


def _abandon(rank: int, size: int, words: list[str], run: Path) -> None:
    trainer = make_trainer(words)
    writer = _writer(run, trainer)
    trainer.step()
    writer.save(trainer, 0.0)
    writer.abandon()
    trainer.step()
    writer._contents = {"no folder/tokenizer.json": b""}
    writer.save(trainer, 0.0)
    writer.abandon()


def test_after_a_failure_checkpoints_are_complete_or_removed(
    ranks: Any, words: list[str], tmp_path: Path
) -> None:
    ranks(2).run(_abandon, words, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def _load_damaged(rank: int, size: int, words: list[str], run: Path) -> str:
    trainer = make_trainer(words)
    writer = _writer(run, trainer)
    trainer.step()
    writer.save(trainer, 0.0)
    writer.wait()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(writer.newest / "state")
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        load(make_trainer(words), writer.newest, world())
    return str(error.value)


def test_damaged_checkpoint_is_reported_on_all_ranks(ranks: Any, words: list[str], tmp_path: Path) -> None:
    for message in ranks(2).run(_load_damaged, words, tmp_path / "run"):
        assert "step-000001 is damaged" in message


def _growth(rank: int, size: int, words: list[str], run: Path) -> int:
    """Return this rank's memory growth in bytes over 150 steps with checkpoints."""
    trainer = make_trainer(words)
    writer = _writer(run, trainer, keep=1)
    resident = []
    for step in range(200):
        trainer.step()
        if step % 10 == 0:
            writer.save(trainer, 0.0)
        if step in (49, 199):
            writer.wait()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    return resident[1] - resident[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_steps(ranks: Any, words: list[str], tmp_path: Path) -> None:
    for growth in ranks(2).run(_growth, words, tmp_path / "run"):
        assert growth < 4 << 20
