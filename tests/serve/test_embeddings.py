"""Embeddings of encoders: equal to transformers, batched, and over HTTP with the client of OpenAI."""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertModel
from typer.testing import CliRunner

from farandole.cli.main import app
from farandole.models.hf.fields import FolderError
from farandole.serve.encoder import is_encoder, read_encoder
from farandole.serve.http.embedding_service import EmbeddingService
from farandole.serve.http.embeddings import EmbeddingServer
from farandole.serve.http.guard import Limits
from farandole.serve.request import RequestError
from tests.models.hf.families import folder_of, reference
from tests.models.hf.folders import add_tokenizer, model_with_tokenizer
from tests.serve.server import NAME, command, eventually, running
from tests.serve.test_server import get, post

TEXTS = ["red cat", "one two three dog bird sun moon", "a", "say green blue"]
CONTEXT = 64


def write_encoder(folder: Path, family: str = "bert", **files: Any) -> Path:
    """Write a small BERT with a tokenizer, and JSON files by their paths."""
    model = reference(family, 3, vocab_size=300, max_position_embeddings=CONTEXT)
    if family == "bert":
        model = BertModel(model.config).eval()  # as Sentence Transformers has it: without a head
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder_of(model, folder)
    add_tokenizer(folder, 300, bert=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        (path.parent / (path.name + ".json")).write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(("Transformer", *kinds))
    ]  # fmt: skip


def pooling(**modes: bool) -> dict[str, Any]:
    names = ("cls_token", "mean_tokens", "max_tokens")
    return {"word_embedding_dimension": 24} | {
        f"pooling_mode_{name}": modes.get(name, False) for name in names
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def expected(folder: Path, tokens: list[list[int]], how: str = "mean") -> torch.Tensor:
    """Return the embeddings that transformers computes for padded sequences."""
    most = max(map(len, tokens))
    mask = torch.tensor([[1] * len(each) + [0] * (most - len(each)) for each in tokens])
    padded = torch.tensor([each + [0] * (most - len(each)) for each in tokens])
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(padded, attention_mask=mask).last_hidden_state
    pooled = hidden[:, 0] if how == "cls" else (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(pooled)


@pytest.mark.parametrize("family", ["bert", "bert-mlm", "bert-classifier"])
def test_equal_to_transformers(tmp_path: Path, family: str) -> None:
    folder = (
        write_encoder(tmp_path)
        if family == "bert"
        else model_with_tokenizer(tmp_path, family.replace("-mlm", ""))
    )
    assert is_encoder(folder)
    encoder = read_encoder(folder)
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    assert tokens == [each.ids for each in encoder.tokenizer.encode_batch(TEXTS)]
    together = encoder.embed(tokens)
    torch.testing.assert_close(together, expected(folder, tokens), atol=1e-5, rtol=1e-5)
    for number, each in enumerate(tokens):  # bitwise: the other sequences do not matter
        assert torch.equal(encoder.embed([each])[0], together[number])
        assert torch.equal(encoder.embed([[5] * 7, each, [9]])[1], together[number])


def test_configurations_of_sentence_transformers(tmp_path: Path) -> None:
    folder = write_encoder(
        tmp_path / "cls",
        modules=modules("Pooling", "Normalize"),
        **{"1_Pooling__config": pooling(cls_token=True)},
        sentence_bert_config={"max_seq_length": 20, "do_lower_case": False},
    )
    encoder = read_encoder(folder)
    assert (encoder.pooling, encoder.context, read_encoder(folder, context=50).context) == ("cls", 20, 50)
    tokens = [each.ids for each in encoder.tokenizer.encode_batch(TEXTS)]
    torch.testing.assert_close(encoder.embed(tokens), expected(folder, tokens, "cls"), atol=1e-5, rtol=1e-5)
    for number, (files, text) in enumerate(
        (
            ({"modules": modules("Pooling"), "1_Pooling__config": pooling(max_tokens=True)}, "max"),
            ({"modules": modules("Pooling"), "1_Pooling__config": pooling(cls_token=True, mean_tokens=True)}, "cls, mean"),
            ({"modules": modules("Pooling", "Dense"), "1_Pooling__config": pooling(mean_tokens=True)}, "Dense"),
            ({"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case"),
            ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "default_prompt_name"),
        )
    ):  # fmt: skip
        with pytest.raises(FolderError, match=text):
            read_encoder(write_encoder(tmp_path / str(number), **files))
    with pytest.raises(RequestError, match="context"):
        read_encoder(folder, context=CONTEXT + 1)


@contextmanager
def serving(
    folder: Path, limits: Limits | None = None, keys: Any = (), **options: Any
) -> Iterator[tuple[str, EmbeddingService]]:
    service = EmbeddingService(read_encoder(folder), **options)
    with running(EmbeddingServer(service, NAME, limits or Limits(), keys).app) as address:
        yield address, service


def test_the_client_of_openai(folder: Path) -> None:
    with (
        serving(folder) as (address, _),
        openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0) as client,
    ):
        encoder = read_encoder(folder)
        tokens = [each.ids for each in encoder.tokenizer.encode_batch(TEXTS)]
        own = encoder.embed(tokens).tolist()
        inputs: list[Any] = [TEXTS, tokens]
        for each in inputs:
            for form in ("float", "base64"):
                found = client.embeddings.create(model=NAME, input=each, encoding_format=form)  # type: ignore[arg-type]
                assert [entry.index for entry in found.data] == [0, 1, 2, 3]
                vectors: list[Any] = [entry.embedding for entry in found.data]
                if form == "base64":
                    vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]
                assert vectors == own
                assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, tokens))
        assert client.embeddings.create(model=NAME, input=TEXTS[0]).data[0].embedding == own[0]
        assert client.embeddings.create(model=NAME, input=tokens[1]).data[0].embedding == own[1]
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME
        assert post(address, "/tokenize", {"prompt": TEXTS[0]})[1]["tokens"] == tokens[0]
        assert get(address, "/health")[0] == 200
        assert "farandole_embeddings_total 18" in get(address, "/metrics")[1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": "a " * CONTEXT}, "input"),
        ({"input": [5] * (CONTEXT + 1)}, "input"),
        ({"input": [300]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"dimensions": 8}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"model": None}, "model"),
    ],
)
def test_invalid_requests(folder: Path, change: dict[str, Any], field: str) -> None:
    with serving(folder, max_waiting=8) as (address, service):
        status, content, _ = post(address, "/v1/embeddings", {"model": NAME, "input": "a", **change})
        assert (status, content["error"]["param"]) == (400, field), content
        assert post(address, "/v1/embeddings", {"model": "other", "input": "a"})[0] == 404
        assert service.sequences == 0


@contextmanager
def held(service: EmbeddingService) -> Iterator[threading.Event]:
    """Hold the first batch until the block ends, and yield an event that is set when the batch has begun."""
    gate, begun, embed = threading.Event(), threading.Event(), type(service.encoder).embed

    def gated(encoder: Any, sequences: Any) -> Any:
        begun.set()
        gate.wait()
        return embed(encoder, sequences)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(service.encoder), "embed", gated)
        try:
            yield begun
        finally:
            gate.set()


def test_concurrent_requests_are_batched(folder: Path) -> None:
    with serving(folder, token_budget=40) as (address, service), ThreadPoolExecutor(9) as threads:
        with held(service) as begun:
            threads.submit(post, address, "/v1/embeddings", {"model": NAME, "input": "red"})
            assert begun.wait(30)
            others = [
                threads.submit(post, address, "/v1/embeddings", {"model": NAME, "input": [5] * 10})
                for _ in range(8)
            ]
            eventually(lambda: service.waiting == 8)
        results = [each.result()[1]["data"][0]["embedding"] for each in others]
        assert results == [read_encoder(folder).embed([[5] * 10])[0].tolist()] * 8
        assert service.batches == 3  # the first request, and two batches of 40 tokens


def test_a_full_queue_and_a_disconnect(folder: Path) -> None:
    with serving(folder, max_waiting=2) as (address, service), ThreadPoolExecutor(2) as threads:
        with held(service) as begun:
            first = threads.submit(post, address, "/v1/embeddings", {"model": NAME, "input": "red"})
            assert begun.wait(30)
            host, port = address.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as connection:
                data = json.dumps({"model": NAME, "input": ["a", "b"]}).encode()
                head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                connection.sendall(head.encode() + data)
                eventually(lambda: service.waiting == 2)
                status, content, headers = post(address, "/v1/embeddings", {"model": NAME, "input": "red"})
                assert (status, content["error"]["code"], service.refused) == (429, "queue_full", 1)
                assert int(headers["retry-after"]) > 0
            eventually(lambda: all(job.result.cancelled() for job in list(service._waiting)))
        assert first.result()[0] == 200
        eventually(lambda: service.waiting == 0)
        assert service.sequences == 1


def test_a_failed_batch_and_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder, keys=(hashlib.sha256(b"one").digest(),)) as (address, service):
        body, key = {"model": NAME, "input": "red"}, {"authorization": "Bearer one"}
        assert post(address, "/v1/embeddings", body)[0] == 401
        with monkeypatch.context() as patch:
            patch.setattr(type(service.encoder), "embed", lambda *_: 1 / 0)
            status, content, _ = post(address, "/v1/embeddings", body, key)
            assert (status, content["error"]["code"]) == (500, "internal_error")
        assert post(address, "/v1/embeddings", body, key)[0] == 200


def test_the_command(folder: Path) -> None:
    with command(folder, "--name", NAME, "--max-waiting", "4") as (address, process):
        assert post(address, "/v1/embeddings", {"model": NAME, "input": "red"})[0] == 200
        assert post(address, "/v1/embeddings", {"model": NAME, "input": ["a"] * 5})[0] == 400
        assert post(address, "/v1/completions", {"model": NAME, "prompt": "a"})[0] == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT
        assert process.read_stderr().splitlines()[-1] == "stopped by Ctrl-C (SIGINT)"


def test_options_for_language_models_are_refused(folder: Path) -> None:
    found = CliRunner().invoke(app, ["serve", str(folder), "--ttft", "1s"])
    assert found.exit_code == 2
    assert "--ttft: not supported for a model that computes embeddings" in found.stderr
