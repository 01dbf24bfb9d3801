"""Built-in and custom tasks learn on any number of ranks and resume exactly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from farandole.comm.communicator import Communicator
from farandole.data.errors import DataError
from farandole.parallel.zero.hidden_parameters import is_hidden
from farandole.plan import Precision
from farandole.train.checkpoint import CheckpointWriter, load
from farandole.train.config import ConfigError, load_config
from farandole.train.tasks import Task, make_task
from farandole.train.trainer import Trainer
from tests.train.command import Command, losses, only_run

CPU = torch.device("cpu")
STEPS = 12

OWN = """
import torch
from torch import nn
from farandole.train.tasks import Task

class Lines(torch.utils.data.Dataset):
    def __init__(self, count, first):
        self.count, self.first = count, first
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        x = torch.rand(4, generator=generator)
        return {"x": x, "y": x.sum(), "weight": torch.tensor(float(1 + index % 3))}

class Sums(Task):
    def __init__(self, config):
        self.train, self.validation = Lines(config.options.get("samples", 64), 0), Lines(10, 1000)
    def build(self, config):
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    def inputs(self, batch):
        return batch["x"]
    def loss(self, output, batch):
        errors = (output.float().squeeze(1) - batch["y"]) ** 2
        return (errors * batch["weight"]).sum(), batch["weight"].sum()
    def metrics(self, output, batch):
        return {"absolute": ((output.float().squeeze(1) - batch["y"]).abs().sum(), len(output))}
    def report(self, model):
        return f"the sum of four ones is {model(torch.ones(1, 4)).item():.2f}"

def broken(config):
    return 3

class Lossless(Task):
    train = validation = [1, 2]
    def build(self, config):
        return nn.Linear(1, 1)

class Mean(Sums):
    def loss(self, output, batch):
        return output.mean()

class Counts(Sums):
    def loss(self, output, batch):
        return output.sum(), 0

class Failing(Sums):
    def __init__(self, config):
        import no_such_library
number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, images and a module of custom tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = (f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(2000))
    (folder / "text.txt").write_text("".join(lines))
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 80)
    images = (generator.integers(0, 60, (80, 32, 32, 3)) + 150 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "images.npz", images=images, labels=labels)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / "photos" / f"class-{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "photos" / f"class-{label}" / f"{number}.png")
    (folder / "own_tasks.py").write_text(OWN)
    return folder


TASKS = {
    "text": ["data.path={}/text.txt", "data.cache={}/cache"],
    "masked-text": ["data.path={}/text.txt", "data.cache={}/cache"],
    "images": [
        "data.path={}/images.npz",
        "images.network=tiny",
        "images.size=32",
        "data.validation_share=0.2",
    ],
    "own_tasks:Sums": ["batch=16", "options.samples=50"],
}


def _make(
    task: str, folder: Path, *words: str, precision: Precision = "fp32", comm: Communicator | None = None
) -> Trainer:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    settings = [word.format(folder) for word in TASKS.get(task, [])]
    config = load_config("tiny", [f"task={task}", *settings, "optimizer.learning_rate=3e-3", *words])
    if comm is None:
        assert dist.group.WORLD is not None
        comm = Communicator(dist.group.WORLD)
    return Trainer(config, make_task(config), precision, comm, CPU)


def _learn(
    rank: int, size: int, task: str, folder: Path, words: list[str], run: Path | None
) -> tuple[list[float], dict[str, float], str]:
    trainer = _make(task, folder, *words)
    found = []
    for step in range(STEPS):
        if run is not None and step == STEPS // 2:
            writer = CheckpointWriter(run, trainer.task.files(), 2, Communicator(dist.group.WORLD))
            writer.save(trainer, 0.0)
            writer.wait()
        found.append(trainer.step().loss)
    evaluated = trainer.evaluate()
    report = trainer.task.report(trainer.model)
    if run is not None:
        resumed = _make(task, folder, *words)
        load(resumed, writer.newest, Communicator(dist.group.WORLD))
        assert [resumed.step().loss for _ in range(STEPS // 2)] == found[STEPS // 2 :]
        assert resumed.evaluate() == evaluated
        assert resumed.task.report(resumed.model) == report
    return found, evaluated, report


@pytest.mark.parametrize("task", TASKS)
def test_ranks_match_one_process_and_resume_exactly(
    ranks: Any, folder: Path, tmp_path: Path, task: str
) -> None:
    words = ["micro_batch=4"] if task == "images" else []  # the same batch-norm batches as on two ranks
    ((expected, evaluated, text),) = ranks(1).run(_learn, task, folder, words, tmp_path / "1")
    assert sum(expected[-3:]) < sum(expected[:3])
    for zero in (0, 2):
        results = ranks(2).run(_learn, task, folder, [*words, f"plan.zero={zero}"], tmp_path / f"2-{zero}")
        for found, metrics, report in results:
            assert found == pytest.approx(expected, rel=2e-3)
            if task != "images":  # batch-norm statistics average over fewer batches
                assert metrics == pytest.approx(evaluated, rel=5e-2)
            assert bool(report) == bool(text)
            assert (found, metrics, report) == results[0]
    assert set(evaluated) == {"loss"} | (
        {"accuracy"} if task == "images" else {"absolute"} if "own" in task else set()
    )


def test_learns_from_folders_of_images(ranks: Any, folder: Path) -> None:
    words = [f"data.path={folder}/photos"]
    found, evaluated, _ = ranks(1).run(_learn, "images", folder, words, None)[0]
    assert sum(found[-3:]) < sum(found[:3])
    assert evaluated["accuracy"] == 1


def _generate(rank: int, size: int, folder: Path) -> tuple[str, int, int]:
    """Return a generated text, the largest number of gathered parameters, and the number of all parameters."""
    trainer = _make("text", folder, "plan.zero=3", "model.layers=6", "sample.tokens=8")
    trainer.step()
    whole = []

    def count(*_: Any) -> None:
        whole.append(sum(p.numel() for p in trainer.model.parameters() if not is_hidden(p)))

    hooks = [block.register_forward_hook(count) for block in trainer.model]
    text = trainer.task.report(trainer.model)
    for hook in hooks:
        hook.remove()
    trainer.step()  # the agreed order of collectives still holds
    return text, max(whole), trainer.parameters


def test_generation_gathers_block_by_block(ranks: Any, folder: Path) -> None:
    (expected, _, _), *_ = ranks(1).run(_generate, folder)
    for text, whole, parameters in ranks(2, "gloo").run(_generate, folder):
        assert text == expected
        assert whole < 0.75 * parameters


def _precisions(rank: int, size: int, task: str, folder: Path, precision: Precision) -> list[float]:
    trainer = _make(task, folder, precision=precision)
    return [trainer.step().loss for _ in range(STEPS)]


@pytest.mark.parametrize("task", ["masked-text", "images"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_has_similar_losses(
    ranks: Any, folder: Path, task: str, precision: Precision
) -> None:
    expected = ranks(2).run(_precisions, task, folder, "fp32")[0]
    found = ranks(2).run(_precisions, task, folder, precision)[0]
    # later steps amplify the rounding differences of the first ones, by an amount that depends on the processor
    half = STEPS // 2
    assert found[:half] == pytest.approx(expected[:half], rel=0.1, abs=0.05)
    assert np.mean(found[half:]) == pytest.approx(np.mean(expected[half:]), rel=0.1, abs=0.05)


def test_custom_task_under_the_launcher(folder: Path) -> None:
    words = ("tiny", "task=own_tasks:Sums", "options.samples=50", "out=own", "log.tensorboard=false")
    command = Command(folder, "train", *words, "plan.precision=fp32", "checkpoint.every=10", "steps=20")
    assert command.end() == 0, command.output
    run = only_run(folder / "own")
    assert "batch 8 samples on 2 ranks" in command.output
    assert "the sum of four ones is " in command.output
    assert (run / "sample.txt").read_text().startswith("the sum of four ones is ")
    assert "farandole generate" not in command.output
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "samples_per_s" in records[0]
    assert "validation_absolute" in records[-1]
    first = losses(run)
    command = Command(folder, "train", "--resume", str(run / "checkpoints" / "step-000010"))
    assert command.end() == 0, command.output
    assert losses(run) == first


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("txt", "unknown task='txt'; did you mean text?"),
        ("nothing-like-it", "expected text, masked-text, images, sft, classify, or MODULE:FUNCTION"),
        ("own_task:Sums", "there is no module own_task in"),
        ("own_tasks:Sum", "module own_tasks has no Sum; did you mean Sums?"),
        ("own_tasks:number", "expected own_tasks.number to be callable, got int"),
        ("own_tasks:broken", "expected broken(config) to return a farandole.train.tasks.Task, got int"),
        ("own_tasks:Lossless", "Lossless has no loss; a Task must define build, loss, train and validation"),
    ],
)
def test_invalid_tasks_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, task: str, says: str
) -> None:
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError) as error:
        make_task(load_config("tiny", [f"task={task}"]))
    assert says in str(error.value)


def test_import_error_inside_a_task_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        make_task(load_config("tiny", ["task=own_tasks:Failing"]))


def _refused(rank: int, size: int, task: str, folder: Path) -> str:
    with pytest.raises((ConfigError, ValueError)) as error:
        _make(task, folder).step()
    return str(error.value)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (
            "own_tasks:Mean",
            "expected loss(output, batch) to return a sum (a scalar tensor) and a count, got",
        ),
        (
            "own_tasks:Counts",
            "to return a positive count on some rank, got a total of 0 in step 1",
        ),
    ],
)
def test_invalid_losses_are_refused(ranks: Any, folder: Path, task: str, says: str) -> None:
    for message in ranks(2).run(_refused, task, folder):
        assert says in message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.path=" + "x" * 300], "task=images needs a folder with one subfolder of images per class"),
        (["data.path=nowhere"], "task=images needs a folder with one subfolder of images per class"),
        (
            ["data.path={}/cache"],
            "in at least two subfolders, one per class; found images in 0 of",
        ),
        (["data.path={}/text.txt"], "expected an .npz file with the arrays 'images' and 'labels'"),
        (["images.network=resnet19"], "images.network: unknown model 'resnet19'; nearest: resnet18"),
    ],
)
def test_invalid_images_are_refused(folder: Path, words: list[str], says: str) -> None:
    (folder / "cache").mkdir(exist_ok=True)
    settings = [word.format(folder) for word in [f"data.path={folder}/images.npz", *words]]
    with pytest.raises((ConfigError, DataError)) as error:
        make_task(load_config("tiny", ["task=images", *settings]))
    assert says in str(error.value)


def _images_task(folder: Path, images: list[Image.Image], suffix: str) -> Task:
    """Return the task for a folder with these images, each of its own class."""
    for number, image in enumerate(images):
        (folder / str(number)).mkdir()
        image.save(folder / str(number) / f"image{suffix}")
    return make_task(load_config("tiny", ["task=images", f"data.path={folder}", "images.size=32"]))


@pytest.mark.parametrize(
    ("suffix", "dtype"), [(".png", "<u2"), (".tif", "<u2"), (".tif", ">u2"), (".pgm", "<u2")]
)
def test_16_bit_images_are_scaled_to_8_bits(tmp_path: Path, suffix: str, dtype: str) -> None:
    pixels = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(dtype)
    task = _images_task(tmp_path, [Image.fromarray(pixels)] * 2, suffix)
    image, _ = task.train[0]
    assert (image == (pixels >> 8)[..., None]).all()


@pytest.mark.parametrize(("dtype", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_images_with_32_bit_pixels_are_refused(tmp_path: Path, dtype: Any, mode: str) -> None:
    task = _images_task(tmp_path, [Image.fromarray(np.zeros((32, 32), dtype))] * 2, ".tif")
    with pytest.raises(DataError, match=f"expected pixels of 8 bits .* got pixels of mode {mode}; convert"):
        task.train[0]


def test_damaged_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = _images_task(tmp_path, [Image.new("RGB", (32, 32))] * 2, ".ppm")
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 32 // 3)
        with pytest.raises(DataError, match="image.ppm: .* decompression bomb"):
            task.train[0]
    for file in tmp_path.rglob("*.ppm"):
        file.write_bytes(file.read_bytes().replace(b"255", b"2%5"))
    with pytest.raises(DataError, match="cannot read image .*image.ppm: invalid literal"):
        task.train[0]


def test_damaged_arrays_are_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    whole = (folder / "images.npz").read_bytes()
    compressed = tmp_path / "compressed.npz"
    with np.load(folder / "images.npz") as arrays:
        np.savez_compressed(compressed, **arrays)
    packed = compressed.read_bytes()
    start = packed.index(b"images.npy") + 60
    directory = whole.index(b"PK\1\2")
    np.save(tmp_path / "single.npy", np.zeros(3))
    for content, says in (
        (whole[: len(whole) // 2], "File is not a zip file"),
        (whole[:2000] + b"damage" + whole[2006:], "Bad CRC-32"),
        (packed[:start] + bytes([255] * 40) + packed[start + 40 :], "decompressing data"),
        (whole[: directory + 10] + b"\x63" + whole[directory + 11 :], "compression method"),
        ((tmp_path / "single.npy").read_bytes(), "found a single array; write the file with numpy.savez"),
        (b"", "No data left in file"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"expected an .npz file .* reading it failed: .*{says}"):
            make_task(load_config("tiny", ["task=images", f"data.path={path}"]))


def test_base_class_collates_samples() -> None:
    task = Task(load_config("tiny"))
    inputs, targets = task.batch(
        [(np.float32(n), n) for n in range(9)], np.array([3, 5]), np.zeros(2, np.int64)
    )
    assert inputs.tolist() == [3.0, 5.0]
    assert targets.tolist() == [3, 5]
