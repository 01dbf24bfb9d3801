"""`farandole train` refuses invalid runs before a rank starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from farandole.cli import train as module
from farandole.cli.main import app
from farandole.data.tokenizer import train_tokenizer
from farandole.train.config import load_config
from farandole.train.start import TrainingJobSpec
from tests.launch.jobs import run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[TrainingJobSpec, int]]:
    """Return a list of the job specifications that `farandole train` would launch; run in a folder with a text."""
    job_specs: list[tuple[TrainingJobSpec, int]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_launch", lambda job_spec, ranks: job_specs.append((job_spec, ranks)) or 0)
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 200)
    return job_specs


def _train(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", *words])


MINE = ("tiny", "data.path=text.txt", "data.cache=cache")


def test_a_new_run_gets_a_folder_with_its_configuration(launched: list[Any]) -> None:
    result = _train(*MINE, "steps=7", "--ranks", "4")
    assert result.exit_code == 0, result.output
    ((job_spec, ranks),) = launched
    assert (ranks, job_spec.config.steps, job_spec.checkpoint) == (4, 7, None)
    assert job_spec.run.parent == Path("runs")
    assert job_spec.run.name.startswith("tiny-")
    assert load_config(str(job_spec.run / "config.toml")) == job_spec.config
    assert TrainingJobSpec.load(job_spec.dump()) == job_spec


def test_runs_never_share_a_folder(launched: list[Any]) -> None:
    for _ in range(3):
        assert _train(*MINE).exit_code == 0
    assert len({job_spec.run for job_spec, _ in launched}) == 3


def test_a_preset_is_preferred_to_a_folder_of_the_same_name(launched: list[Any]) -> None:
    Path("tiny").mkdir()
    result = _train(*MINE)
    assert result.exit_code == 0, result.output
    assert launched


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("stps=3",), "did you mean steps?"),
        (("tinny",), "did you mean tiny?"),
        (("tiny", "default"), "expected one preset or configuration file, got 2: tiny, default"),
        ((*MINE, "--ranks", "3"), "batch=8 is not divisible by 3 ranks; try batch=6 or 9"),
        ((*MINE, "data.path=text.text"), "did you mean text.txt?"),
        ((*MINE, "model.context=100000"), "expected at least 100001 tokens"),
        (
            (*MINE, "out=text.txt", "data.path=nowhere"),
            "out=text.txt: text.txt is a file; choose another folder with out=FOLDER",
        ),
        (
            (*MINE, "out=text.txt/x"),
            "out=text.txt/x: text.txt is a file; choose another folder with out=FOLDER",
        ),
        ((*MINE, "out=/proc/runs"), "out=/proc/runs: cannot create a folder in /proc: "),
        ((*MINE, "--dry-run", "out=/proc/runs"), "; choose another folder with out=FOLDER"),
        (("--resume",), "there is no run to resume: folder runs does not exist"),
        (("--resume", "text"), "text does not exist: expected a checkpoint, a run, or a folder of runs"),
        (("--resume", "tiny-1"), "tiny-1 does not exist"),
        ((*MINE, "model.width=1000000", "-n", "2"), "2 ranks"),
        ((*MINE, "model.width=1000000"), "try model.width="),
        ((".",), ". is a folder: to train on its text, use data.path=.; to resume the run"),
        (("tiny", "steps", "100"), "steps is a key without a value; use steps=VALUE"),
        (("text.txt",), "to train on this text use data.path=text.txt"),
        ((".", "--resume"), "no checkpoint in . or in a run in this folder; found: text.txt"),
    ],
)
def test_refused_commands_start_no_ranks_and_write_no_files(
    launched: list[Any], words: tuple[str, ...], says: str
) -> None:
    result = _train(*words)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output
    assert not launched
    assert not Path("runs").exists()


def _checkpoint(run: Path, step: int, **facts: Any) -> Path:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    config = load_config("tiny", ["data.path=text.txt", "data.cache=cache"])
    values = {
        "step": step,
        "consumed": 8 * step,
        "ranks": 2,
        "precision": "bf16",
        "loss_scale": 1.0,
        "good_steps": 0,
        "elapsed_s": 1.0,
        "config": config.model_dump(),
    }
    (run / "config.toml").write_text(config.to_toml())
    (folder / "train.json").write_text(json.dumps(values | facts))
    (folder / "state").mkdir()
    for name in ("state/.metadata", "model.safetensors"):
        (folder / name).touch()
    train_tokenizer(["a text"], 300).save(str(folder / "tokenizer.json"))
    return folder


def test_resume_finds_the_newest_checkpoint_and_its_configuration(launched: list[Any]) -> None:
    _checkpoint(Path("runs/tiny-1"), 5)
    _checkpoint(Path("runs/tiny-1"), 10)
    for words in (
        ("--resume",),
        ("--resume", "runs/tiny-1"),
        ("runs/tiny-1/checkpoints/step-000010", "--resume"),
    ):
        result = _train(*words)
        assert result.exit_code == 0, result.output
        job_spec, _ = launched.pop()
        assert job_spec.run == Path("runs/tiny-1")
        assert job_spec.checkpoint == Path("runs/tiny-1/checkpoints/step-000010")
        assert job_spec.config.steps == 20
        assert job_spec.is_newest == ("checkpoints" not in words[0])
        assert TrainingJobSpec.load(job_spec.dump()) == job_spec
    assert _train("--resume", "steps=50", "log.every=1").exit_code == 0
    assert launched[0][0].config.steps == 50
    assert _train("--resume", "--ranks", "4", "plan.zero=3").exit_code == 0
    assert launched[1][1] == 4
    assert launched[1][0].config.plan.zero == 3


def test_a_dry_run_checks_and_writes_nothing(launched: list[Any]) -> None:
    result = _train(*MINE, "--dry-run", "-n", "2", "plan.zero=2")
    assert result.exit_code == 0, result.output
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["batch"].strip() == "8 samples = 2 ranks x 1 micro-batch x 4"
    values = r"zero=2, precision=auto \((bf16|fp32) on this host\), recompute=none, offload=none"
    assert re.fullmatch(values, lines["plan"].strip())
    one, total = re.findall(r"([\d.]+) MiB", lines["memory"])[:2]
    assert float(total) == pytest.approx(2 * float(one), abs=0.2)
    assert re.search(
        r" per rank and .* in total predicted on 2 ranks; .* available on this host", lines["memory"]
    )
    assert "nothing was trained" in lines["dry run"]
    assert not launched and not Path("runs").exists()
    _checkpoint(Path("runs/tiny-1"), 10)
    assert "step-000010" in _train("--resume", "--dry-run").output
    assert _train(*MINE, "model.width=1000000", "--dry-run").exit_code == 2


def test_tokenization_is_announced_once(launched: list[Any]) -> None:
    result = _train(*MINE)
    assert result.exit_code == 0, result.output
    notices = re.findall(
        r"reading and tokenizing text.txt \(once; stored in (cache/tokens/\w+)\)", result.stderr
    )
    assert len(notices) == 1 and Path(notices[0]).is_dir()
    result = _train(*MINE)
    assert "tokenizing" not in result.output
    (Path(notices[0]) / "train.bin").write_bytes(b"")
    assert f"cached tokens in {notices[0]} are damaged" in _train(*MINE).stderr


def test_the_default_number_of_ranks_divides_the_batch(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("farandole.train.start", "farandole.launch.limits"):
        monkeypatch.setattr(f"{name}.offered_ranks", lambda: 6)
    result = _train(*MINE)
    assert launched.pop()[1] == 4
    assert (
        "training on 4 of 6 cores or accelerators, the largest number of ranks that suits batch=8 and the plan"
        in result.output
    )
    result = _train(*MINE, "batch=12", "micro_batch=2")
    assert launched.pop()[1] == 6
    assert "training on" not in result.output
    _train(*MINE, "plan.data=1")
    assert launched.pop()[1] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "3"), "not divisible by 3 and cannot be changed; resume with --ranks 1 or 2; see "),
        (("model.width=64",), "model.width was 32, is 64"),
        (("seed=1", "batch=4"), "seed was 0, is 1; batch was 8, is 4"),
        (("default",), "belongs to another configuration"),
        (("steps=10",), "at step 10 of 10: the run is complete; to train longer, use steps=20"),
    ],
)
def test_a_changed_configuration_cannot_resume(
    launched: list[Any], words: tuple[str, ...], says: str
) -> None:
    _checkpoint(Path("runs/tiny-1"), 10)
    Path("runs/tiny-1/loss.png").touch()
    result = _train("--resume", *words)
    assert result.exit_code == 2
    assert says in result.output
    assert not launched


def test_a_complete_run_without_results_resumes(launched: list[Any]) -> None:
    checkpoint = _checkpoint(Path("runs/tiny-1"), 20)
    assert _train("--resume").exit_code == 0
    assert launched[0][0].checkpoint == checkpoint
    Path("runs/tiny-1/loss.png").touch()
    os.utime("runs/tiny-1/loss.png", (0, 0))  # the curve of an earlier job that trained fewer steps
    assert _train("--resume").exit_code == 0
    assert _train("--resume", "steps=19").exit_code == 2


def test_a_damaged_checkpoint_is_named(launched: list[Any]) -> None:
    (_checkpoint(Path("runs/tiny-1"), 10) / "train.json").write_text("{")
    result = _train("--resume")
    assert result.exit_code == 2
    assert "train.json is damaged" in result.output


@pytest.mark.parametrize("part", ["state/.metadata", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_checkpoint_is_not_resumed(launched: list[Any], part: str) -> None:
    before = _checkpoint(Path("runs/tiny-1"), 10)
    (_checkpoint(Path("runs/tiny-1"), 15) / part).unlink()
    result = _train("--resume")
    assert result.exit_code == 2
    assert (
        f"step-000015 is damaged: it does not contain {part}; to resume from the previous checkpoint, use --resume {before}"
        in result.output
    )


def _started_later(run: Path) -> Path:
    """A run that was started after all others and has no checkpoint."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text(load_config("tiny").to_toml())
    later = time.time() + 10
    os.utime(run / "config.toml", (later, later))
    return run


def test_resume_does_not_skip_the_last_run(launched: list[Any]) -> None:
    _checkpoint(Path("runs/tiny-2"), 5)
    last = _started_later(Path("runs/tiny-1"))
    result = _train("--resume")
    assert result.exit_code == 2
    assert f"the last run, {last}, ended before its first checkpoint" in result.output
    assert "to resume an older run, use --resume runs/tiny-2" in result.output
    assert not launched
    assert _train("--resume", "runs/tiny-2").exit_code == 0
    assert launched
    shutil.rmtree("runs/tiny-2")
    assert "no other run has a checkpoint" in _train("--resume").output


def test_resume_accepts_the_run_as_a_value(launched: list[Any]) -> None:
    other = typer.Typer()
    other.command(cls=module.TrainCommand)(module.train)
    checkpoint = _checkpoint(Path("runs/tiny-1"), 5)
    result = CliRunner().invoke(other, ["--resume=runs/tiny-1", "steps=30"])
    assert result.exit_code == 0, result.output
    assert launched[0][0].checkpoint == checkpoint
    assert "elsewhere does not exist" in CliRunner().invoke(other, ["--resume=elsewhere"]).output


@pytest.mark.parametrize("words", [["stps=3"], ["tinny"], ["tiny", "data.path=nowhere.txt"]])
def test_a_typing_mistake_is_reported_without_loading_torch(tmp_path: Path, words: list[str]) -> None:
    code = (
        "import sys\nfrom farandole.cli.main import main\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    run = subprocess.run([sys.executable, "-c", code, "train", *words], capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("farandole train: ")


def test_ranks_must_match_another_launcher(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    placed = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in (placed | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    result = _train("tiny", "--ranks", "2")
    assert result.exit_code == 2
    assert "one of 4 ranks (environment variables); omit --ranks" in result.output


def test_contradictory_variables_are_reported_in_one_line(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = _train("tiny")
    assert result.exit_code == 2
    assert result.output.startswith("farandole train: environment variables set rank 7 of 4")


def test_under_another_launcher_rank_0_refuses_for_all(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("all work and no play\n" * 200)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "farandole", "train", *MINE, "model.width=1000000"]
    status, _, err = run([*torchrun, *words], tmp_path, fork_ranks=True)
    assert status != 0
    assert err.count("try model.width=") == 1, err


def test_help_shows_examples() -> None:
    result = _train("--help")
    assert result.exit_code == 0
    for example in ("farandole train tiny", "data.path=notes/", "farandole train --resume", "torchrun"):
        assert example in result.output
    for word in ("gpt2-small", "steps=1000", "farandole config keys"):
        assert word in result.output
