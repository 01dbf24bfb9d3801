"""Runs whose text, cache or initial weights change, and ranks that wait for a slow one."""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from farandole.comm.communicator import Communicator
from farandole.comm.errors import RankLate
from farandole.train.checkpoint import CheckpointWriter
from farandole.train.run import without_timeout
from farandole.train.run_folder import CheckpointError, checkpoints
from tests.models.hf.folders import conversations, model_with_tokenizer, write_jsonl
from tests.train.small import make_trainer, overrides, train_here, world

QUIET = ("log.tensorboard=false", "plan.precision=fp32", "sample.every=0")


def test_a_resumed_run_keeps_its_tokenizer_if_the_text_changes(ranks: Any, tmp_path: Path) -> None:
    words = ["tiny", *overrides(tmp_path), *QUIET]
    run = tmp_path / "run"
    ranks(1).run(train_here, [*words, "steps=2"], run)
    (first,) = checkpoints(run)
    with (tmp_path / "text.txt").open("a") as text:
        text.writelines(f"{n} other words, which make other tokens\n" for n in range(2000))
    ranks(1).run(train_here, [*words, "steps=3"], run, first)
    assert (checkpoints(run)[-1] / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def _refused(rank: int, size: int, *given: Any) -> str:
    try:
        train_here(rank, size, *given)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_job_is_refused_if_another_job_has_changed_the_newest_checkpoint(
    ranks: Any, tmp_path: Path
) -> None:
    words = ["tiny", *overrides(tmp_path), *QUIET]
    run = tmp_path / "run"
    ranks(2).run(train_here, [*words, "steps=2"], run)
    (chosen,) = checkpoints(run)
    later = chosen.with_name("step-000003")
    shutil.copytree(chosen, later)
    changed = (
        f"another job has trained in {run}: its newest checkpoint was step-000002 when this job started, and "
    )
    for message in ranks(2).run(_refused, [*words, "steps=4"], run, chosen, True):
        assert message.startswith(f"{changed}is now step-000003; run the command again")
    assert checkpoints(run) == [chosen, later]
    shutil.rmtree(later)
    moved = chosen.rename(tmp_path / "moved")
    for message in ranks(2).run(_refused, [*words, "steps=4"], run, chosen, True):
        assert message.startswith(f"{changed}was deleted; run the command again")
    moved.rename(chosen)
    assert ranks(2).run(_refused, [*words, "steps=4"], run, chosen, True) == ["", ""]
    assert ranks(2).run(_refused, [*words, "steps=5"], run, chosen, False) == ["", ""]  # moves step 4


def _saves_after_the_cache_was_deleted(rank: int, size: int, words: list[str], run: Path) -> None:
    trainer = make_trainer(words)
    writer = CheckpointWriter(run, trainer.task.files(), 2, world())
    shutil.rmtree(run.parent / "cache")
    trainer.step()
    writer.save(trainer, 0.0)
    writer.wait()
    assert (writer.newest / "tokenizer.json").stat().st_size > 1000


def test_a_checkpoint_is_saved_although_the_cache_was_deleted(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(_saves_after_the_cache_was_deleted, [*overrides(tmp_path), *QUIET], tmp_path / "run")


def test_weights_of_a_run_replace_those_of_the_folder(ranks: Any, tmp_path: Path) -> None:
    model_with_tokenizer(tmp_path / "base")
    write_jsonl(tmp_path / "chat.jsonl", conversations(40, 2))
    words = ["sft", f"model={tmp_path / 'base'}", f"data.path={tmp_path / 'chat.jsonl'}", *QUIET]
    words += [f"data.cache={tmp_path / 'cache'}", "model.context=48", "batch=4"]
    first, second = tmp_path / "first", tmp_path / "second"
    ranks(2).run(train_here, [*words, "steps=4", "optimizer.learning_rate=1e-2"], first)
    still = ("steps=1", "optimizer.learning_rate=1e-12", "optimizer.warmup_steps=0", "plan.zero=3")
    ranks(2).run(train_here, [*words, f"weights={first}", *still], second)
    base, trained, kept = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "base", first / "model", second / "model")
    )
    for name, tensor in trained.items():
        torch.testing.assert_close(kept[name], tensor, rtol=0, atol=1e-6)
    assert any((trained[name] - tensor).abs().max() > 1e-3 for name, tensor in base.items())


def _waits(rank: int, size: int, patient: bool) -> str:
    """Return the answer of rank 0, which works longer than the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    comm = Communicator(group)
    with without_timeout(comm) if patient else nullcontext():
        time.sleep(4 if rank == 0 else 0)
    try:
        found: str = comm.broadcast_object("answer" if rank == 0 else "")
    except RankLate:
        found = "late"
    dist.destroy_process_group(group)
    return found


def test_ranks_wait_for_a_slow_rank_longer_than_the_timeout(ranks: Any) -> None:
    assert ranks(2).run(_waits, True) == ["answer"] * 2
    assert ranks(2).run(_waits, False)[1] == "late"


def _fails_on_rank_0(rank: int, size: int) -> float:
    began = time.perf_counter()
    try:
        with without_timeout(world()):
            if rank == 0:
                raise ValueError("no such text")
    except ValueError:
        pass
    return time.perf_counter() - began


def test_no_rank_waits_for_a_rank_that_has_failed(ranks: Any) -> None:
    assert max(ranks(2).run(_fails_on_rank_0)) < 4
