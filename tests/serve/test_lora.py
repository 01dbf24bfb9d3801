"""LoRA adapters per request: the tokens of the merged model, independent of the batch."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import openai
import peft
import pytest
import torch
from typer.testing import CliRunner

import farandole
from farandole.cli.main import app
from farandole.comm.communicator import Communicator
from farandole.models.hf import from_pretrained
from farandole.models.sequence import Transformer
from farandole.parallel.lora import add_lora, merge
from farandole.parallel.lora.peft_adapter import load_adapter, save_adapter
from farandole.plan import LoRA
from farandole.serve.engine import GenerationEngine
from farandole.serve.lora import read_adapters
from farandole.serve.ranks.driver import LocalDriver, Worker
from farandole.serve.ranks.shards import shard_model
from farandole.serve.request import Logprob, RequestError, Sampling
from farandole.serve.runner import Runner
from farandole.serve.store import STORES
from tests.serve.models import CONTEXT, LAYERS, models, vocabulary
from tests.serve.server import NAME, serving, write_folder
from tests.serve.test_ranks import CASES, Case

BOUND = 1e-4
"""The largest difference between the log-probabilities with an adapter and with merged weights."""


def base_of(family: str, **changes: int) -> Transformer:
    folder: Path = models(family, **changes)[1].pretrained.folder  # type: ignore[union-attr, assignment]
    return from_pretrained(folder).eval()


def write_adapter(model: Transformer, folder: Path, seed: int, lora: LoRA) -> None:
    """Write an adapter with random values; changes the model."""
    add_lora(model, lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    save_adapter(model, folder)


@cache
def adapters_of(family: str) -> dict[str, Path]:
    """Return the folders of two adapters of Farandole with different layers and ranks, and of one of PEFT."""
    found = {}
    for seed, (name, rank) in enumerate({"one": 3, "two": 5}.items()):
        found[name] = Path(mkdtemp())
        targets = "all-linear" if name == "one" else [path for path, _ in attention_of(family)]
        write_adapter(base_of(family), found[name], seed, LoRA(rank=rank, alpha=4.0, targets=targets))
    if family in ("llama", "gpt2"):
        theirs = copy.deepcopy(models(family)[0])
        names = ["q_proj", "v_proj", "down_proj"] if family == "llama" else ["c_attn", "c_fc"]
        config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=names, fan_in_fan_out=family == "gpt2")
        adapted = peft.get_peft_model(theirs, config)
        torch.manual_seed(9)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape) * 0.2)
        found["peft"] = Path(mkdtemp())
        adapted.save_pretrained(found["peft"])
    return found


def attention_of(family: str) -> list[tuple[str, torch.nn.Module]]:
    """Return the last linear layers of each block."""
    linear = [
        (path, module) for path, module in base_of(family).named_modules() if type(module) is torch.nn.Linear
    ]
    return linear[::2]


def engine_with(family: str, **options: Any) -> GenerationEngine:
    model = models(family)[1]
    runner = Runner(model, adapters=read_adapters(model, adapters_of(family)))
    return GenerationEngine(runner, context=CONTEXT, **options)


def results(engine: GenerationEngine, requests: list[tuple[list[int], str | None]]) -> list[list[Logprob]]:
    """Add requests at random steps, and return the log-probabilities of each."""
    choose = random.Random(len(requests))
    left, found = list(requests), {}
    while left or engine.has_work:
        if left and choose.random() < 0.5:
            prompt, lora = left.pop(0)
            engine.add(prompt, Sampling(max_tokens=12, temperature=0, logprobs=20, lora=lora))
        for output in engine.step():
            found.setdefault(output.request, []).extend(output.logprobs)
    engine.check_idle()
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize(("family", "store"), [("llama", "slots"), *((family, "pages") for family in LAYERS)])
def test_tokens_are_those_of_the_merged_model_in_any_batch(family: str, store: str) -> None:
    assert store in STORES
    choose, size = random.Random(family), vocabulary(family)
    prompts = [choose.choices(range(size), k=length) for length in (20, 1, 33)]
    requests: list[tuple[list[int], str | None]] = [
        (prompt, lora) for prompt in prompts for lora in (None, *adapters_of(family))
    ]
    choose.shuffle(requests)
    engine = engine_with(family, store=store, max_running=4, token_budget=24)
    together = results(engine, requests)
    for request, own in zip(requests, together, strict=True):
        assert results(engine_with(family, store=store, max_running=1, token_budget=64), [request]) == [own]
    for lora in (None, *adapters_of(family)):
        model = base_of(family)
        if lora is not None:
            load_adapter(model, adapters_of(family)[lora])
            merge(model)
        expected = results(
            GenerationEngine(model, context=CONTEXT), [(p, None) for p, name in requests if name == lora]
        )
        found = [own for own, (_, name) in zip(together, requests, strict=True) if name == lora]
        for own, other in zip(found, expected, strict=True):
            assert [each.token for each in own] == [each.token for each in other]
            assert [each.logprob for each in own] == pytest.approx(
                [each.logprob for each in other], abs=BOUND
            )
    assert len({str(own) for own in together}) == len(requests)  # each adapter has an effect


def on_ranks(rank: int, size: int, folder: str, adapters: dict[str, Path], requests: Any) -> Any:
    """Return the results of the requests on a model that the ranks divide."""
    comm = Communicator(torch.distributed.group.WORLD)
    model = from_pretrained(folder, lazy=True).eval()
    own = shard_model(model, comm, read_adapters(model, adapters)).adapters
    if rank:
        Worker(model, comm, adapters=own).follow()
        return None
    driver = LocalDriver(model, comm, adapters=own)
    found = results(GenerationEngine(driver, context=CONTEXT, max_running=4, token_budget=24), requests)
    driver.close()
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_generate_the_tokens_of_one(ranks: Any, tmp_path: Path, case: Case) -> None:
    family, changes = case
    for number in range(2):
        lora = LoRA(rank=3 + number, alpha=4.0, targets="all-linear")
        write_adapter(base_of(family, **changes), tmp_path / str(number), number, lora)
    adapters = {str(number): tmp_path / str(number) for number in range(2)}
    choose, size = random.Random(family), vocabulary(family)
    prompts = [choose.choices(range(size), k=length) for length in (20, 1)]
    requests: list[tuple[list[int], str | None]] = [(p, name) for p in prompts for name in (None, *adapters)]
    model = models(family, **changes)[1]
    runner = Runner(model, adapters=read_adapters(model, adapters))
    expected = results(GenerationEngine(runner, context=CONTEXT), requests)
    found, _ = ranks(2).run(on_ranks, str(model.pretrained.folder), adapters, requests)  # type: ignore[union-attr]
    for own, other in zip(found, expected, strict=True):
        assert [each.token for each in own] == [each.token for each in other]
        assert [each.logprob for each in own] == pytest.approx([each.logprob for each in other], abs=BOUND)
    assert len({str(own) for own in found}) == len(requests)  # each adapter has an effect


def test_speculation_with_adapters() -> None:
    prompts = [[3, 4, 5] * 8, [1, 2] * 10]
    requests: list[tuple[list[int], str | None]] = [
        (p, lora) for p in prompts for lora in (None, "one", "two")
    ]
    found = results(engine_with("llama", speculate="lookup"), requests)
    assert found == results(engine_with("llama"), requests)


# ---- refusals ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    write_adapter(from_pretrained(folder).eval(), path, 1, LoRA(rank=4, alpha=64.0))
    return path


def changed(adapter: Path, folder: Path, **changes: Any) -> Path:
    """Copy an adapter with a changed configuration."""
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    return folder


def test_adapters_that_cannot_be_served_are_refused(folder: Path, adapter: Path, tmp_path: Path) -> None:
    other, wide = tmp_path / "other", tmp_path / "wide"
    write_adapter(base_of("gptj"), other, 1, LoRA(rank=4))
    write_adapter(base_of("llama", intermediate_size=20), wide, 1, LoRA(rank=4))
    biased = tmp_path / "biased"
    write_adapter(from_pretrained(folder), biased, 1, LoRA(rank=4, also_train=["0"]))
    for path, message in (
        (tmp_path / "missing", "does not exist"),
        (changed(adapter, tmp_path / "dora", use_dora=True), "unsupported options: use_dora=True"),
        (changed(adapter, tmp_path / "rank", r=5), "has rank 4, but adapter_config.json has r=5"),
        (changed(adapter, tmp_path / "ia3", peft_type="IA3"), "expected 'LORA'"),
        (other, "the model has no"),
        (
            wide,
            r"gate_proj.weight has matrices of size 4 x \d+ and 20 x 4, but this model needs 4 x \d+ and 23 x 4",
        ),
        (biased, "also contains .*without modules_to_save"),
    ):
        with pytest.raises(RequestError, match=f"lora: mine: .*{message}"):
            farandole.LLM(folder, lora={"mine": path})
    result = CliRunner().invoke(app, ["serve", str(folder), "--lora", "mine"])
    assert (result.exit_code, "--lora: expected NAME=FOLDER, got 'mine'" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["serve", str(folder), "--lora", f"mine={other}", "--tensor", "2"])
    assert (result.exit_code, "--lora: mine: " in result.output) == (2, True)


# ---- interfaces ----


def test_prompts_and_requests_select_adapters(folder: Path, adapter: Path) -> None:
    llm = farandole.LLM(folder, lora={"mine": adapter})
    base, mine = (
        llm.generate(["say red"], max_tokens=12, temperature=0, lora=lora)[0].text for lora in (None, "mine")
    )
    assert base != mine
    with farandole.LLM(folder, lora={"mine": adapter}, tensor=2) as divided:
        for lora, text in ((None, base), ("mine", mine)):
            assert divided.generate(["say red"], max_tokens=12, temperature=0, lora=lora)[0].text == text
    half = farandole.LLM(folder, precision="bf16", lora={"mine": adapter}, speculate="lookup")
    assert half.generate(["say red"], max_tokens=12, temperature=0, lora="mine")[0].text != base
    with pytest.raises(RequestError, match="lora: unknown adapter 'other'; expected one of mine"):
        llm.generate(["say red"], lora="other")
    with pytest.raises(RequestError, match="unknown adapter 'mine'; no adapters are loaded"):
        farandole.LLM(folder).generate(["say red"], lora="mine")
    with (
        serving(folder, lora={"mine": adapter}) as (address, _),
        openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == [NAME, "mine"]
        assert client.models.retrieve("mine").id == "mine"
        for name, text in ((NAME, base), ("mine", mine)):
            found = client.completions.create(model=name, prompt="say red", max_tokens=12, temperature=0)
            assert (found.model, found.choices[0].text) == (name, text)
        messages: Any = [{"role": "user", "content": "say red"}]
        chats = {
            name: client.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0)
            for name in (NAME, "mine")
        }
        assert chats[NAME].choices[0].message.content != chats["mine"].choices[0].message.content
        with pytest.raises(openai.NotFoundError, match=f"this server has '{NAME}', 'mine'"):
            client.completions.create(model="other", prompt="say red")
