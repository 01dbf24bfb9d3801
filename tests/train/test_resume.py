"""A run that is stopped, killed and resumed has the same losses as an uninterrupted run, bit for bit."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.command import Command, losses, only_run

STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    library = Path(os.__file__).parent
    text = "".join((library / name).read_text() for name in ("argparse.py", "typing.py", "inspect.py"))
    (folder / "text.py").write_text(text)
    return folder


def _train(folder: Path, out: str, *words: str) -> Command:
    settings = (
        *("data.path=text.py", "data.cache=cache", f"out={out}", f"steps={STEPS}", "plan.precision=bf16"),
        *("model.dropout=0.1", "checkpoint.every=10", "checkpoint.keep=3", "evaluate.every=25"),
        "log.tensorboard=false",
    )
    return Command(folder, "train", "tiny", *settings, *words)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    command = _train(folder, "reference")
    assert command.end() == 0, command.output
    return only_run(folder / "reference")


def test_run_writes_all_its_files(reference: Path) -> None:
    assert list(losses(reference)) == list(range(1, STEPS + 1))
    assert losses(reference)[STEPS] < losses(reference)[1] - 0.5
    kept = sorted(path.name for path in (reference / "checkpoints").iterdir())
    assert kept == ["step-000040", "step-000050", "step-000060"]
    assert (reference / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (reference / "sample.txt").read_text().startswith("def")
    records = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "validation_loss" in r] == [25, 50, 60]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_stopped_and_killed_run_resumes_bit_for_bit(folder: Path, reference: Path) -> None:
    command = _train(folder, "broken")
    command.wait_until(lambda: any((folder / "broken").glob("*")))
    run = only_run(folder / "broken")

    command.wait_until(lambda: len(losses(run)) >= 5)
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 128 + signal.SIGTERM, command.output
    stopped_at = len(losses(run))
    assert 5 <= stopped_at < STEPS
    assert f"to resume: farandole train --resume {run.relative_to(folder)}" in command.output
    assert (run / "checkpoints" / f"step-{stopped_at:06d}").is_dir(), "not saved before stopping"

    (folder / "scratch").mkdir()
    elsewhere = ("plan.offload=disk:scratch", "plan.swap=disk:scratch", "plan.recompute=block")
    command = Command(folder, "train", "out=broken", "--resume", *elsewhere)
    command.wait_until(lambda: len(losses(run)) >= min(stopped_at + 15, STEPS - 10))
    os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.end() != 0
    assert command.output.count("was killed by SIGKILL") == 1, command.output
    assert "recompute='block': recomputing 4 modules" in command.output
    assert "activations of 1.0 MiB or more are swapped to scratch" in command.output
    assert "optimizer states on the disk: each step reads" in command.output
    assert not list((folder / "scratch").iterdir())
    assert "to resume: farandole train --resume" in command.output

    command = Command(folder, "train", "--resume", str(run))
    assert command.end() == 0, command.output
    assert losses(run) == losses(reference)
    last = f"checkpoints/step-{STEPS:06d}/model.safetensors"
    ours, theirs = load_file(run / last), load_file(reference / last)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert not list(run.rglob("*.tmp"))


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_killed_pretraining_of_a_bert_resumes_bit_for_bit(folder: Path) -> None:
    words = ("task=masked-text", "plan.zero=1", "steps=24", "checkpoint.every=6")
    command = _train(folder, "bert", *words)
    assert command.end() == 0, command.output
    whole = only_run(folder / "bert")
    command = _train(folder, "killed", *words)
    command.wait_until(lambda: bool(list((folder / "killed").glob("*/checkpoints/step-000006/train.json"))))
    for pid in (command.process.pid, *command.ranks()):
        os.kill(pid, signal.SIGKILL)
    command.process.wait(10)
    run = only_run(folder / "killed")
    assert not (run / "checkpoints" / "step-000024").exists()
    command = Command(folder, "train", "--resume", str(run))
    assert command.end() == 0, command.output
    assert losses(run) == losses(whole)
    last = "checkpoints/step-000024/model.safetensors"
    assert (run / last).read_bytes() == (whole / last).read_bytes()


def test_generate_from_a_trained_model(folder: Path, reference: Path) -> None:
    command = Command(folder, "generate", "reference", "--prompt", "class ", "--tokens", "20")
    assert command.end() == 0, command.output
    source, text = command.output.split("\n", 1)
    assert source == f"from {(reference / 'checkpoints' / f'step-{STEPS:06d}').relative_to(folder)}"
    assert text.startswith("class ")
    assert len(text) > 20


def test_resuming_from_an_older_checkpoint_moves_later_ones(folder: Path, reference: Path) -> None:
    run = folder / "older"
    shutil.copytree(reference, run)
    checkpoints = run / "checkpoints"
    before = load_file(checkpoints / "step-000050" / "model.safetensors")

    command = Command(
        folder, "train", "--resume", str(checkpoints / "step-000040"), "steps=55", "--ranks", "1"
    )
    assert command.end() == 0, command.output
    assert "resuming from an earlier step: moved later checkpoints" in command.output
    whole = sorted(path.name for path in checkpoints.glob("step-*"))
    assert whole == ["step-000040", "step-000050", "step-000055"]
    (aside,) = checkpoints.glob("set-aside-*")
    assert sorted(path.name for path in aside.iterdir()) == ["step-000050", "step-000060"]
    after = load_file(checkpoints / "step-000050" / "model.safetensors")
    assert any(not before[name].equal(after[name]) for name in before)  # trained again with another schedule


def test_checkpoint_outside_a_run_is_refused(folder: Path, reference: Path) -> None:
    newest = sorted((reference / "checkpoints").glob("step-*"))[0]
    copy = folder / "elsewhere" / "copies" / newest.name
    shutil.copytree(newest, copy)
    command = Command(folder, "train", "--resume", str(copy), "steps=70")
    assert command.end() == 2
    assert "is not in the folder of a run" in command.output
    assert [path.name for path in (folder / "elsewhere").iterdir()] == ["copies"]


def test_resuming_from_a_damaged_checkpoint_keeps_later_ones(folder: Path, reference: Path) -> None:
    run = folder / "damaged"
    shutil.copytree(reference, run)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    shutil.rmtree(run / "checkpoints" / before[0] / "state")
    command = Command(folder, "train", "--resume", str(run / "checkpoints" / before[0]))
    assert command.end() != 0
    assert f"{before[0]} is damaged" in command.output
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def test_damage_is_reported_with_the_previous_checkpoint(folder: Path, reference: Path) -> None:
    run = folder / "cut"
    shutil.copytree(reference, run)
    *_, before, newest = sorted((run / "checkpoints").glob("step-*"))
    whole = (newest / "model.safetensors").read_bytes()
    for content, says in (
        (whole[:-7], f"has {len(whole) - 7} bytes, but its header requires {len(whole)}"),
        (whole[:100], "has 100 bytes, but its header is truncated or damaged"),
    ):
        (newest / "model.safetensors").write_bytes(content)
        command = Command(folder, "train", "--resume", str(run), f"steps={2 * STEPS}")
        assert command.end() == 2
        assert says in command.output
        advice = f"to resume from the previous checkpoint, use --resume {before.relative_to(folder)}"
        assert advice in command.output.replace(f"{folder}/", "")
    (newest / "model.safetensors").write_bytes(whole)
    part = max((newest / "state").iterdir(), key=lambda path: path.stat().st_size)
    part.write_bytes(b"\0" * part.stat().st_size)
    command = Command(folder, "train", "--resume", str(run), f"steps={2 * STEPS}")
    assert command.end() != 0
    assert f"{newest.name} is damaged" in command.output
    assert "to resume from the previous checkpoint, use --resume" in command.output
    assert "Traceback" not in command.output


def test_only_one_job_trains_in_a_run(folder: Path, reference: Path) -> None:
    run = folder / "shared"
    shutil.copytree(reference, run)
    with (run / ".lock").open("w+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("process 4711 on elsewhere")
        held.flush()
        before = sorted(path.name for path in (run / "checkpoints").iterdir())
        command = Command(folder, "train", "--resume", str(run), f"steps={STEPS + 2}")
        assert command.end() != 0
        assert "is in use by process 4711 on elsewhere" in command.output
        assert "Traceback" not in command.output
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    command = Command(folder, "train", "--resume", str(run), f"steps={STEPS + 2}")
    assert command.end() == 0, command.output


def test_run_of_an_earlier_version_resumes(folder: Path, reference: Path) -> None:
    """Earlier configurations have `precision` and `parallel`; their checkpoints have no `files` and no
    `engine.json`."""
    run = folder / "earlier"
    shutil.copytree(reference, run)
    for later in sorted((run / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "train.json").read_text())
    config = saved["config"]
    plan = config.pop("plan")
    parallel = {key: plan[key] for key in ("zero", "compression", "recompute", "swap", "offload")}
    config |= {"precision": plan["precision"], "parallel": parallel | {"activation_bytes": 0}}
    for key in ("task", "images", "options"):
        del config[key]
    for key in ("files", "rounding_steps"):
        del saved[key]
    saved |= {"loss_scale": 1.0, "good_steps": 0}
    (checkpoint / "state" / "engine.json").unlink()
    (checkpoint / "train.json").write_text(json.dumps(saved))
    text = re.sub(r"\n\[plan\]\n.*?(?=\n\[)", "", (run / "config.toml").read_text(), flags=re.DOTALL)
    text = re.sub(r"\n\[(images|options)\]\n.*?(?=\n\[|\Z)", "", text, flags=re.DOTALL)
    text = text.replace('task = "text"', f'precision = "{plan["precision"]}"')
    (run / "config.toml").write_text(text + '\n[parallel]\nzero = 0\ncompression = "none"\n')

    command = Command(folder, "generate", str(run), "--tokens", "5")
    assert command.end() == 0, command.output
    for words in ((), (str(run / "config.toml"), "plan.zero=1")):
        copy = folder / f"earlier-{len(words)}"
        shutil.copytree(run, copy)
        named = [word.replace(str(run), str(copy)) for word in words]
        command = Command(folder, "train", "--resume", str(copy), *named)
        assert command.end() == 0, command.output
        assert losses(copy) == losses(reference)
    (folder / "own.toml").write_text(text)
    command = Command(folder, "train", "own.toml")
    assert command.end() == 2
    assert "unknown key precision; did you mean plan.precision?" in command.output
