"""`farandole plan`: its messages and tables, and predictions that match measurements."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from farandole.bench import machine, planning
from farandole.bench import ranks as ranks_module
from farandole.bench.accelerators import ACCELERATORS, DEFAULT
from farandole.bench.machine import Speeds
from farandole.cli.main import app
from tests.launch.jobs import ours, run
from tests.models.hf.families import reference
from tests.models.hf.folders import SCALED, config_folder, model_with_tokenizer

MIB = 1 << 20


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurements of this machine by fixed values."""
    flops = {"fp32": 5e10, "bf16": 1e11, "fp16": 5e10}
    found = Speeds(flops, 3e9, 5e9, process=225 * MIB, libraries=110 * MIB)
    monkeypatch.setattr(planning, "speeds", lambda ranks, remeasure: found)


def _plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words], prog_name="farandole")


def test_help_shows_examples() -> None:
    result = _plan("--help")
    assert result.exit_code == 0
    assert "farandole plan gpt2-small -n 8 --memory 16GiB --picture plans.png" in result.output


ONE = ("--memory", "1GiB", "--precision", "fp32", "--recompute", "none", "--zero", "0", "--schedule", "1f1b")


def test_only_the_requested_plans_must_divide_the_batch(tmp_path: Path) -> None:
    """Two stages process seven samples together, which two ranks on the data axis cannot share."""
    file = tmp_path / "plans.json"
    words = ("tiny", "batch=7", "-n", "2", "plan.pipeline=2", *ONE, "--json", str(file))
    assert _plan(*words).exit_code == 0
    (free,) = json.loads(file.read_text())["plans"]
    assert (free["plan"]["pipeline"], free["micro_batches"]) == (2, 7)
    result = _plan(*words, f"plan.stage_bytes={1 << 30}")
    assert result.exit_code == 0, result.output
    (limited,) = json.loads(file.read_text())["plans"]
    assert limited["plan"]["stage_bytes"] == 1 << 30
    result = _plan(*words, "plan.stage_bytes=9")
    assert result.exit_code == 2
    assert "stages of size at most 9 each; raise the limit to at least" in " ".join(
        result.output.replace("│", " ").split()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recompute", "blok"), "--recompute blok is unknown; nearest: block"),
        (("--precision", "fp8"), "--precision fp8 is unknown; expected one of fp32, bf16, fp16"),
        (("--zero", "4"), "--zero 4 is unknown; expected one of 0, 1, 2, 3"),
        (("--offload", "disc:/x"), "offload='disc:/x': expected 'none', 'host' or 'disk:FOLDER'"),
        (("--memory", "lots"), "--memory: expected a number above 0 such as 512M, 16GiB or 1.5G, got 'lots'"),
        (("--memory", "5"), "--memory 5: expected at least 1 MiB, got 5 bytes; did you mean 5GiB?"),
        (("--memory", "80K"), "--memory 80K: expected at least 1 MiB, got 81920 bytes; did you mean 80GiB?"),
        (("tinny",), "tinny is not a preset or file; did you mean tiny?"),
        (("tiny", "batch=7", "-n", "2"), "batch=7 is not divisible by 2 ranks"),
        (("tiny", "--nodes", "2"), "the bandwidth between hosts in bytes per second"),
        (
            ("tiny", "--accelerators", "h10"),
            "--accelerators h10 is unknown; nearest: h100; known names are a100,",
        ),
        (("tiny", "--accelerators=x"), "--accelerators x is unknown; known names are a100,"),
        (("tiny", "--picure", "x.png"), "unknown option --picure; did you mean --picture?"),
    ],
)
def test_mistakes_are_reported(words: tuple[str, ...], message: str) -> None:
    result = _plan(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "words",
    [
        ("--memory", "lots"),
        ("--memory", "5"),
        ("--flops", "x"),
        ("--bandwidth=-1",),
        ("--host-bandwidth", "0"),
        ("--serve", "--zero", "1"),
    ],
)
def test_mistakes_in_options_are_reported_without_loading_torch(words: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom farandole.cli.main import main\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    found = subprocess.run([sys.executable, "-c", code, "plan", *words], capture_output=True, text=True)
    assert found.returncode == 2, found.stderr
    assert found.stderr.startswith(
        f"farandole plan: {words[0].partition('=')[0] if len(words) < 3 else '--zero'}"
    )


def test_the_batch_is_checked_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(planning, "speeds", lambda ranks, remeasure: measured.append(ranks))
    result = _plan("tiny", "batch=15", "-n", "2")
    assert result.exit_code == 2
    assert "batch=15 is not divisible by 2 ranks; try batch=14 or 16" in result.output
    assert not measured


def test_every_plan_has_an_outcome_and_a_bar(tmp_path: Path) -> None:
    picture, file = tmp_path / "plans.png", tmp_path / "plans.json"
    result = _plan("tiny", "--memory", "1GiB", "--json", str(file), "--picture", str(picture))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert len(found["plans"]) == 16 and found["machine"]["memory"] == 1 << 30
    for one in found["plans"]:
        assert one["outcome"] == "fits" and one["peak"] == max(one["start"], sum(one["parts"].values()))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plans_that_do_not_fit_state_the_missing_memory() -> None:
    result = _plan("tiny", "--memory", "100MiB", "--zero", "0", "--recompute", "none", "--offload", "none")
    assert result.exit_code == 1
    assert "does not fit (needs" in result.output


def test_plans_for_accelerators_on_another_machine() -> None:
    given = ("--memory", "80GiB", "--flops", "300T", "--bandwidth", "12G", "--offload", "host")
    result = _plan("tiny", "-n", "4", "--accelerators", *given, "--zero", "3", "--recompute", "block")
    assert result.exit_code == 0, result.output
    assert "fits with offload" in result.output


@pytest.mark.parametrize("words", [("--accelerators", "tiny"), ("tiny", "--accelerators", "a100")])
def test_accelerators_have_published_speeds(words: tuple[str, ...], tmp_path: Path) -> None:
    """The speeds are those of the named accelerator or of the default, on full hosts; given values replace them."""
    one = ACCELERATORS[DEFAULT if words[-1] == "tiny" else "a100"]
    chosen = (
        "batch=24",
        "-n",
        "24",
        "--zero",
        "1",
        "--recompute",
        "none",
        "--tensor",
        "1",
        "--pipeline",
        "1",
    )
    result = _plan(*words, *chosen, "--json", str(tmp_path / "a"))
    assert result.exit_code == 0, result.output
    assert f"Published peaks of {one.name}: " in result.output
    assert one.source in " ".join(result.output.split())
    machine = json.loads((tmp_path / "a").read_text())["machine"]
    assert machine["hosts"] == 3 and machine["memory"] == one.memory and machine["flops"] == one.flops
    assert (machine["bandwidth"], machine["host_bandwidth"]) == (one.bandwidth, one.host_bandwidth)
    given = ("--memory", "80GiB", "--flops", "300T", "--bandwidth", "12G", "--nodes", "2")
    result = _plan(*words, *chosen, *given, "--json", str(tmp_path / "b"))
    machine = json.loads((tmp_path / "b").read_text())["machine"]
    assert "Published" not in result.output and machine["hosts"] == 2
    assert (machine["bandwidth"], machine["host_bandwidth"], machine["flops"]["fp32"]) == (12e9, None, 3e14)


def test_given_speeds_are_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With --flops and --bandwidth, no rank is launched although the cache is empty; one rank needs only --flops."""
    monkeypatch.setattr(planning, "speeds", machine.speeds)
    monkeypatch.setattr(machine, "default_cache", lambda: tmp_path / "cache")
    launched: list[str] = []
    monkeypatch.setattr(ranks_module, "launch", lambda target, *_, **__: launched.append(target) or 1)
    words = ("tiny", "-n", "2", *ONE, "--flops", "48G", "--json", str(tmp_path / "plans"))
    assert _plan(*words).exit_code == 2
    assert launched == ["farandole.bench.machine"]
    result = _plan(*words, "--bandwidth", "12G")
    assert result.exit_code == 0, result.output
    assert launched == ["farandole.bench.machine"]
    found = json.loads((tmp_path / "plans").read_text())["machine"]
    assert (found["flops"]["bf16"], found["stream"], found["bandwidth"]) == (48e9, 4e9, 12e9)
    assert (found["process"], found["libraries"]) == (225 * MIB, 110 * MIB)
    assert _plan("tiny", "-n", "1", *ONE, "--flops", "48G").exit_code == 0
    assert launched == ["farandole.bench.machine"]


def test_hosts_of_accelerators() -> None:
    counts = {ranks: ACCELERATORS["h100"].hosts(ranks) for ranks in (1, 8, 12, 13, 64)}
    assert counts == {1: 1, 8: 1, 12: 2, 13: 13, 64: 8}


def test_overrides_choose_plans() -> None:
    words = ("plan.zero=1", "plan.recompute=block", "plan.offload=none")
    result = _plan("tiny", *words, "--precision", "fp32", "--precision", "bf16")
    lines = [line for line in result.output.splitlines() if line.startswith("1     block")]
    assert result.exit_code == 0 and len(lines) == 2


def test_plans_have_the_size_of_the_data_axis(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    words = ("tiny", "-n", "4", "batch=8", "--memory", "8GiB", "--precision", "fp32", "--recompute", "none")
    result = _plan(*words, "plan.data=2", "--zero", "0")
    assert result.exit_code == 2
    assert "data=2: expected 2 ranks, got 4; nearest plan: data=4" in " ".join(result.output.split())
    result = _plan(
        *words, "plan.data=2", "--zero", "0", "--tensor", "1", "--tensor", "2", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert [one["plan"]["tensor"] for one in json.loads(file.read_text())["plans"]] == [2]


def test_plans_have_the_compression_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    words = ("-n", "2", "--nodes", "2", "--bandwidth", "1G", "--memory", "8GiB", "--precision", "fp32")
    result = _plan("tiny", *words, "--recompute", "none", "plan.compression=topk", "--json", str(file))
    assert result.exit_code == 0, result.output
    (only,) = json.loads(file.read_text())["plans"]
    assert only["plan"]["compression"] == "topk"
    assert only["parts"]["buffers"] > 0


def test_other_keys_may_require_the_stage_of_an_option(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    words = ("-n", "4", "batch=8", "--memory", "8GiB", "--precision", "fp32", "--recompute", "none")
    result = _plan("tiny", *words, "--zero", "1", "plan.data_shard=2", "--json", str(file))
    assert result.exit_code == 0, result.output
    (only,) = json.loads(file.read_text())["plans"]
    assert (only["plan"]["zero"], only["plan"]["data_shard"]) == (1, 2)


def test_a_disk_is_suggested_if_no_other_plan_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = _plan("tiny", "--memory", "100MiB", "--zero", "0", "--recompute", "none")
    assert "disk:." in result.output


def test_every_choice_is_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    given = (
        "--memory",
        "80GiB",
        "--flops",
        "300T",
        "--bandwidth",
        "12G",
        "--precision",
        "bf16",
        "--recompute",
        "none",
    )
    chosen = (
        "--rounding",
        "nearest",
        "--rounding",
        "stochastic",
        "--swap",
        "none",
        "--swap",
        "host",
        "--zero",
        "1",
    )
    words = ("-n", "8", "--nodes", "2", "--accelerators", *given, *chosen, "--json", str(file))
    result = _plan("tiny", *words, "--tensor", "1")
    assert result.exit_code == 0, result.output
    found = [one["plan"] for one in json.loads(file.read_text())["plans"]]
    assert len(found) == 8
    for name, values in {
        "data_shard": ["all", "host"],
        "rounding": ["nearest", "stochastic"],
        "swap": ["host", "none"],
    }.items():
        assert sorted({one[name] for one in found}) == values
    head = next(line.split() for line in result.output.splitlines() if line.startswith("zero"))
    assert head[:5] == ["zero", "recompute", "data_shard", "rounding", "swap"]
    assert "the worst case, with up to 256.0 MiB of activations" in result.output


def test_conflicting_options_are_no_plan() -> None:
    result = _plan("tiny", "--zero", "1", "--offload", "disk:/tmp", "--offloaded", "parameters")
    assert result.exit_code == 2
    assert "nearest plan: zero=3" in " ".join(result.output.replace("│", " ").split())


def test_all_plans_are_tried_if_none_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "plans.json"
    result = _plan("tiny", "--memory", "100MiB", "--precision", "bf16", "--json", str(file))
    assert result.exit_code == 1
    found = [one["plan"] for one in json.loads(file.read_text())["plans"]]
    for name, values in {
        "offload": {"none", "disk:."},
        "offloaded": {"optimizer", "gradients", "parameters"},
        "swap": {"none", "disk:."},
        "rounding": {"nearest", "stochastic"},
    }.items():
        assert {one[name] for one in found} == values
    assert f"{len(found)} plans were considered, and 0 of them fit" in result.output


def test_predictions_match_measurements(tmp_path: Path) -> None:
    """Compare with real ranks.  The memory of a process without a model depends on the machine, and is not compared."""
    words = (
        "tiny",
        "model.width=256",
        "plan.precision=fp32",
        *("--zero", "2", "--recompute", "block", "--offload", f"disk:{tmp_path}"),
    )
    result = _plan(*words, "--check", "--steps", "2")
    assert result.exit_code in (0, 1), result.output
    lines = [re.split(r" {2,}", line.strip()) for line in result.output.splitlines()]
    rows = {words[0]: [float(word.replace(",", "")) for word in words[1:4]] for words in lines[-10:-1]}
    for part in ("weights", "gradients", "optimizer", "activations, backward"):
        predicted, *measured = rows[part]
        assert measured == pytest.approx([predicted] * 2, abs=1), part
    predicted, *measured = (peak - own for peak, own in zip(rows["peak"], rows["process"], strict=True))
    assert measured == pytest.approx([predicted] * 2, abs=30)


def _launch_forked(target: str, arguments: list[str], *, ranks: int, module: bool, **options: Any) -> int:
    """Launch a module like `farandole.launch.local.launch`, on ranks that are forked with torch already loaded."""
    assert module
    return run(ours("-n", str(ranks), "-m", target, *arguments), fork_ranks=True)[0]


def test_predictions_match_the_measurements_of_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a mixture of experts in two stages, and two ranks share the experts of a stage."""
    monkeypatch.setattr(ranks_module, "launch", _launch_forked)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    folder = model_with_tokenizer(tmp_path / "base", "mixtral", **sizes)
    words = ("batch=8", "micro_batch=1", "model.context=64", "plan.precision=fp32", "--expert", "2")
    stages = ("--pipeline", "2", "--schedule", "1f1b", "--zero", "1", "--recompute", "none")
    result = _plan(f"hf:{folder}", "-n", "4", *words, *stages, "--check", "--steps", "2")
    assert result.exit_code in (0, 1), result.output
    lines = [re.split(r" {2,}", line.strip()) for line in result.output.splitlines()]
    head = next(line for line in lines if line[0] == "part")
    assert head[1:] == ["predicted", "rank 0", "rank 1", "predicted", "rank 2", "rank 3"]
    rows = {line[0]: line[1:] for line in lines[lines.index(head) + 1 :]}
    for part in ("weights", "gradients", "optimizer", "activations, backward"):
        numbers = [float(word.replace(",", "")) for word in rows[part]]
        for predicted, *measured in (numbers[:3], numbers[3:]):
            assert measured == pytest.approx([predicted] * 2, abs=1), part
    assert rows["weights"][0] != rows["weights"][3]


@pytest.mark.parametrize("scaling", SCALED)
def test_folders_whose_positions_depend_on_the_length(scaling: str, tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "base", scaling)
    words = (
        "-n",
        "2",
        "--memory",
        "1GiB",
        "--zero",
        "2",
        "model.context=32",
        "--json",
        str(tmp_path / "plans"),
    )
    result = _plan(f"hf:{folder}", *words)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "plans").read_text())["plans"]


GIVEN = ("--accelerators", "--memory", "80GiB", "--flops", "400T", "--bandwidth", "300G")


@pytest.mark.parametrize("family", ["bert", "vit", "t5"])
def test_folders_of_encoders(family: str, tmp_path: Path) -> None:
    reference(family, 5).config.save_pretrained(tmp_path / "base")
    file = tmp_path / "plans.json"
    words = ("model.context=16", "--zero", "1", "--recompute", "none", "--json", str(file))
    result = _plan(f"hf:{tmp_path / 'base'}", "-n", "2", *GIVEN, *words, "--tensor", "1", "--pipeline", "1")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(file.read_text())["plans"]
    model = reference(family, 5)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 2  # bf16
    assert found["parts"]["weights"] == pytest.approx(weights, rel=0.1)
    assert found["parts"]["activations"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("task=masked-text", "model.context=32"),
        ("task=images", "images.network=tiny", "images.size=32"),
    ],
)
def test_tasks_without_a_folder(words: tuple[str, ...]) -> None:
    result = _plan("tiny", *words, "--memory", "1GiB", "--zero", "1", "--recompute", "none")
    assert result.exit_code == 0, result.output
    assert "--check trains on random text" in _plan("tiny", *words, "--memory", "1GiB", "--check").output


def test_adapters_have_the_only_states(tmp_path: Path) -> None:
    parts = {}
    for rank in (0, 4, 8):
        file = tmp_path / f"{rank}.json"
        words = (f"plan.lora_rank={rank}", "--zero", "0", "--recompute", "none", "--precision", "bf16")
        result = _plan("tiny", "-n", "2", *GIVEN, *words, "--tensor", "1", "--json", str(file))
        assert result.exit_code == 0, result.output
        parts[rank] = json.loads(file.read_text())["plans"][0]["parts"]
    adapters = parts[8]["optimizer"] - parts[4]["optimizer"]
    assert parts[4]["optimizer"] == pytest.approx(adapters, rel=0.01)
    assert parts[8]["gradients"] - parts[4]["gradients"] == pytest.approx(adapters / 3, rel=0.01)
    assert parts[8]["weights"] - parts[4]["weights"] == pytest.approx(adapters / 6, rel=0.01)
    assert parts[4]["weights"] == pytest.approx(parts[0]["weights"] + adapters / 6, rel=0.01)
    assert parts[4]["optimizer"] < 0.2 * parts[0]["optimizer"]


def test_pipelines_are_compared_with_other_plans(tmp_path: Path) -> None:
    """The table has pipelines of every size, with their micro-batches and idle time."""
    file, picture = tmp_path / "plans.json", tmp_path / "plans.png"
    words = ("batch=16", "micro_batch=1", "model.layers=8", "--tensor", "1", "--precision", "bf16")
    files = ("--memory", "1GiB", "--json", str(file), "--picture", str(picture))
    result = _plan("tiny", "-n", "4", *GIVEN, *words, *files)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())["plans"]
    assert {one["plan"]["pipeline"] for one in found} == {1, 2, 4}
    for one in found:
        size = one["plan"]["pipeline"]
        assert one["micro_batches"] == 4 * size and (one["pipeline"] is None) == (size == 1)
        if size > 1:
            assert one["plan"]["zero"] < 3 and 0 < one["pipeline"]["idle"] < 1
            assert len(one["pipeline"]["peaks"]) == size and max(one["pipeline"]["peaks"]) == one["peak"]
    head = next(line.split() for line in result.output.splitlines() if line.startswith("zero"))
    assert {"pipeline", "micro-batches", "idle"} <= {*head} and picture.exists()


def test_schedules_are_compared_for_a_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    model = ("batch=16", "plan.micro_batches=8", "model.layers=4")
    words = (*model, "--pipeline", "2", "--zero", "1", "--precision", "fp32")
    result = _plan("tiny", "-n", "2", "--memory", "1GiB", *words, "--json", str(file))
    assert result.exit_code == 0, result.output
    found = {
        (one["plan"]["schedule"], one["plan"]["recompute"]): one
        for one in json.loads(file.read_text())["plans"]
    }
    assert {schedule for schedule, _ in found} == {"1f1b", "interleaved", "zb-h1", "zb-v", "v-half"}
    idle = {schedule: one["pipeline"]["idle"] for (schedule, mode), one in found.items() if mode == "none"}
    assert idle["zb-v"] < idle["1f1b"]
    assert ("zb-v", "block") not in found and found["1f1b", "block"]["peak"] < found["1f1b", "none"]["peak"]
    only = _plan("tiny", "-n", "2", "--memory", "1GiB", *words, "--schedule", "gpipe", "--recompute", "none")
    assert only.exit_code == 0 and "gpipe" in only.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pipeline", "2", "--schedule", "1f1"), "--schedule 1f1 is unknown; nearest: 1f1b"),
        (("--schedule", "zb-v"), "schedule='zb-v' with pipeline=1"),
        (("--pipeline", "2", "--zero", "3"), "nearest plan: zero=2"),
    ],
)
def test_pipelines_that_do_not_exist_are_refused(words: tuple[str, ...], message: str) -> None:
    result = _plan("tiny", "-n", "2", "--memory", "1GiB", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
