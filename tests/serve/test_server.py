"""The HTTP server, with the client of OpenAI over a socket."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests
import torch

from farandole.models.hf import from_pretrained
from farandole.serve.http.guard import Limits
from farandole.serve.http.service import Service
from farandole.serve.llm import LLM
from tests.serve.server import CONTEXT, NAME, command, eventually, serving, write_folder, write_sentencepiece

ROOT = Path(__file__).parents[2]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12}
MESSAGES: list[Any] = [{"role": "user", "content": "say red cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, Service]]:
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: tuple[str, Service]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder)


def post(address: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content, response.headers


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, content


def test_completions(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(["say red"], max_tokens=12, temperature=0)[0]
    found = client.completions.create(prompt="say red", **GREEDY)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(expected.prompt_tokens), 12)
    by_tokens = client.completions.create(prompt=expected.prompt_tokens, **GREEDY)
    assert by_tokens.choices[0].text == expected.text
    several = client.completions.create(prompt=["say red", "two dog"], n=2, **GREEDY)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    other = llm.generate(["two dog"], max_tokens=12, temperature=0)[0].text
    assert [choice.text for choice in several.choices] == [expected.text] * 2 + [other] * 2


def test_echo_with_logprobs_scores_a_prompt(client: openai.OpenAI, llm: LLM, folder: Path) -> None:
    prompt = "say red cat dog"
    tokens = llm.encode(prompt)
    with torch.no_grad():
        logits = from_pretrained(folder)(torch.tensor([tokens]))[0].log_softmax(-1)
    for most in (0, 1):
        found = client.completions.create(
            model=NAME, prompt=prompt, max_tokens=most, echo=True, logprobs=1, temperature=0
        ).choices[0]
        assert found.text.startswith(prompt)
        logprobs = found.logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
        assert len(logprobs.tokens) == len(tokens) + most
        assert logprobs.token_logprobs[0] is None
        expected = [logits[i, token].item() for i, token in enumerate(tokens[1:])]
        assert logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-4)
        assert logprobs.text_offset is not None and logprobs.top_logprobs is not None
        for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[: len(tokens)]:
            assert found.text[offset:].startswith(token)


def test_a_completion_keeps_the_space_at_its_start(tmp_path: Path) -> None:
    greedy = {"model": NAME, **write_sentencepiece(tmp_path)}
    with serving(tmp_path) as (address, _):

        def choice(path: str, **fields: Any) -> Any:
            return post(address, path, greedy | fields)[1]["choices"][0]

        prompt = "a中 c"
        assert choice("/v1/completions", prompt=prompt)["text"] == " b b b"
        found = choice("/v1/completions", prompt=prompt, echo=True, logprobs=0)
        assert found["text"] == "a中 c b b b"
        assert found["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 4, 6, 8]
        found = choice("/v1/completions", prompt=prompt, stop=" b")
        assert (found["text"], found["finish_reason"]) == ("", "stop")
        assert choice("/v1/completions", prompt=prompt, regex="( b)+")["text"] == " b b b"
        messages = [{"role": "user", "content": prompt}]
        assert choice("/v1/chat/completions", messages=messages)["message"]["content"] == "b b b"


def test_chat(client: openai.OpenAI, llm: LLM) -> None:
    rendered = "<s><|user|>\nsay red cat</s>\n<|assistant|>\n"
    tokens = llm.tokenizer.encode(rendered, add_special_tokens=False).ids
    expected = llm.generate([tokens], max_tokens=12, temperature=0)[0]
    found = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
    joined = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content)
    assert joined.decode(errors="replace") == expected.text
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "say red cat"}]}]
    assert (
        client.chat.completions.create(messages=parts, **GREEDY).choices[0].message.content == expected.text
    )


def test_streams(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=["say red", "two"], logprobs=1, **GREEDY)
    stream = client.completions.create(
        prompt=["say red", "two"], logprobs=1, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    texts, logprobs, reasons, usage = ["", ""], [[], []], [None, None], None
    for part in stream:
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert (reasons, usage) == (["length"] * 2, whole.usage)
    chat = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    parts = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat
    echoed = client.completions.create(prompt="say red", echo=True, logprobs=0, stream=True, **GREEDY)
    assert "".join(part.choices[0].text for part in echoed) == "say red" + texts[0]


def test_a_stream_of_several_choices(client: openai.OpenAI) -> None:
    """Each choice has its own text, log-probabilities and finish reason, and the usage contains all choices."""
    options: dict[str, Any] = {"model": NAME, "seed": 1, "max_tokens": 30, "n": 3, "stop": ["a", "e"]}
    chat = client.chat.completions
    whole = chat.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **options)
    parts = list(
        chat.create(
            messages=MESSAGES,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    )
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert parts[-1].usage == whole.usage and not parts[-1].choices
    assert all(part.usage is None for part in parts[:-1])
    for expected in whole.choices:
        own = [choice for part in parts for choice in part.choices if choice.index == expected.index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == expected.message.content
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [expected.finish_reason]
        found = [each for choice in own if choice.logprobs for each in choice.logprobs.content or []]
        assert expected.logprobs is not None and found == expected.logprobs.content


def test_stop_strings_are_never_shown(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="say red", **{**GREEDY, "max_tokens": 40}).choices[0].text
    stop = text[9:13]
    expected = text[: text.index(stop)]
    options: dict[str, Any] = {"prompt": "say red", "stop": [stop], "logprobs": 0, **GREEDY, "max_tokens": 40}
    found = client.completions.create(**options).choices[0]
    assert (found.text, found.finish_reason) == (expected, "stop")
    shown, tokens = "", ""
    for part in client.completions.create(stream=True, **options):
        shown += part.choices[0].text
        tokens += "".join(part.choices[0].logprobs.tokens)
        assert expected.startswith(shown)
    assert shown == expected
    assert stop not in tokens or stop in expected


def test_sampling_fields(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "say", "max_tokens": 10}
    texts = [client.completions.create(seed=seed, **options).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    found = client.completions.create(temperature=0, logit_bias={"70": 100}, logprobs=0, **options)
    assert set(found.choices[0].logprobs.tokens) == {"c"} or len(set(found.choices[0].logprobs.tokens)) == 1
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 10, "ignore_eos": True}
    assert client.completions.create(extra_body=extra, **options).usage.completion_tokens == 10
    stopped = client.completions.create(temperature=0, extra_body={"stop_token_ids": [70]}, **options)
    assert stopped.usage.completion_tokens <= 10


def test_models_tokenize_health_and_metrics(server: tuple[str, Service], client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    status, content, _ = post(server[0], "/tokenize", {"prompt": "say red"})
    assert (status, content["count"], content["max_model_len"]) == (200, len(content["tokens"]), CONTEXT)
    assert get(server[0], "/health") == (200, '{"status":"ok"}')
    for path in ("/", "/health"):  # as load balancers ask
        assert requests.head(server[0] + path, timeout=30).status_code == 200
    status, text = get(server[0], "/metrics")
    assert status == 200
    for name in ("time_to_first_token_seconds_count", "requests_running", "fusion_delay_steps_bucket"):
        assert f"farandole_{name}" in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["farandole_generated_tokens_total"]) > 0


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"temperature": 3}, "temperature"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"n": 0}, "n"),
        ("completions", {"n": 50, "prompt": ["a"] * 6}, "prompt"),
        ("completions", {"max_tokens": -1}, "max_tokens"),
        ("completions", {"max_tokens": CONTEXT}, "max_tokens"),
        ("completions", {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [1000]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"logprobs": 100}, "logprobs"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"5000": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"5": 1000}}, "logit_bias"),
        ("completions", {"stop": [""]}, "stop"),
        ("completions", {"seed": 2**70}, "seed"),
        ("completions", {"prompt": "\ud800"}, "prompt"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"stream": True, "echo": True, "logprobs": 1, "n": 2}, "n"),
        ("completions", {"min_tokens": 13}, "min_tokens"),
        ("chat/completions", {"tools": []}, "tools"),
        ("chat/completions", {"response_format": {"type": "yaml"}}, "response_format"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"max_completion_tokens": 5}, "max_completion_tokens"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
    ],
)
def test_invalid_fields_are_named(
    server: tuple[str, Service], path: str, change: dict[str, Any], field: str
) -> None:
    own = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": "say"}
    status, content, _ = post(server[0], f"/v1/{path}", {**GREEDY, **own, **change})
    assert (status, content["error"]["param"].split(".")[0]) == (400, field), content
    assert field in content["error"]["message"]


def test_other_invalid_requests(server: tuple[str, Service]) -> None:
    status, content, _ = post(server[0], "/v1/completions", b"{")
    assert (status, content["error"]["code"]) == (400, "invalid_json")
    status, content, _ = post(server[0], "/v1/completions", {"prompt": "a", "model": "other"})
    assert (status, content["error"]["code"]) == (404, "model_not_found")
    assert NAME in content["error"]["message"]
    data = json.dumps({**GREEDY, "prompt": "a"}).encode()
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        status, content, _ = post(server[0], "/v1/completions", data, {"content-type": kind})
        assert (status, content["error"]["code"]) == (400, "invalid_content_type")
        assert "expected application/json, got " in content["error"]["message"]
    for body in (b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}", b"\xff", b"[]", b"null", b""):
        status, content, _ = post(server[0], "/v1/completions", body)
        assert status == 400 and content["error"]["message"], body[:20]
    for body in (b'{"temperature": NaN, ', b'{"logit_bias": {"5": NaN}, ', b'{"repetition_penalty": 1e999, '):
        status, content, _ = post(
            server[0], "/v1/completions", body + data[1:].replace(b'"temperature": 0, ', b"")
        )
        assert status == 400 and content["error"]["param"] in body.decode(), content
    assert post(server[0], "/v1/embeddings", {})[0] == 404
    status, _, headers = post(server[0], "/v1/models", {})
    assert (status, headers["allow"]) == (405, "GET")


def test_a_request_without_a_model_lists_the_models(server: tuple[str, Service]) -> None:
    status, content, _ = post(server[0], "/v1/completions", {"prompt": "a"})
    assert (status, content["error"]["param"]) == (400, "model")
    assert content["error"]["message"] == f"model: required; this server has {NAME!r}"


def test_the_documented_requests(server: tuple[str, Service], folder: Path) -> None:
    """The lines with curl in the guide, with another address and model."""
    from tests.serve.test_embeddings import serving as serving_encoder  # which imports this module
    from tests.serve.test_embeddings import write_encoder

    text = (ROOT / "docs/guides/serving.md").read_text()
    lines = re.findall(r"^\$ curl (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    assert len(lines) == 3
    with serving_encoder(write_encoder(folder.parent / "encoder")) as (encoder, _):
        for line in lines:
            url, *words = shlex.split(line)
            assert words[::2] == ["-H", "-d"] and words[1] == "content-type: application/json"
            address = encoder if url.endswith("/embeddings") else server[0]
            body = {**json.loads(words[3]), "model": NAME}
            status, content, _ = post(address, urlsplit(url).path, body)
            assert status == 200, content


def read_some(address: str, body: dict[str, Any]) -> socket.socket:
    """Send a request, and return the connection."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps({**GREEDY, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


CHARACTERS: list[dict[str, Any]] = [
    {"extra_body": {"regex": "(猫é\U0001f600 ){3}"}},  # each token is a part of a character
    {
        "extra_body": {"regex": "(猫é\U0001f600 ){3}", "min_tokens": 0},
        "stop": ["é\U0001f600 猫猫", "猫 é"],
    },  # held back
    {"extra_body": {"regex": "(猫é\U0001f600 ){3}"}, "stop": ["\U0001f600 猫"]},
    {"extra_body": {"regex": "(猫é\U0001f600 ){3}"}, "max_tokens": 2},  # ends within a character
    {"extra_body": {"ignore_eos": True}, "temperature": 1.5, "seed": 3, "max_tokens": 60},  # any bytes
]


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_a_stream_loses_no_token(folder: Path, speculate: str) -> None:
    """Events without text, and log-probabilities of tokens whose text is complete or visible only later."""
    with (
        serving(folder, speculate=speculate) as (address, service),
        openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client,
    ):
        for own in CHARACTERS:
            options: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 60, **own}
            whole = client.chat.completions.create(
                messages=MESSAGES, logprobs=True, top_logprobs=1, **options
            )
            parts = list(
                client.chat.completions.create(
                    messages=MESSAGES,
                    logprobs=True,
                    top_logprobs=1,
                    stream=True,
                    stream_options={"include_usage": True},
                    **options,
                )
            )
            (expected,) = whole.choices
            choices = [part.choices[0] for part in parts if part.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
            logprobs = [
                each
                for choice in choices
                if choice.logprobs is not None
                for each in choice.logprobs.content or []
            ]
            assert expected.logprobs is not None
            assert (text, logprobs) == (expected.message.content, expected.logprobs.content)
            assert choices[-1].finish_reason == expected.finish_reason
            assert parts[-1].usage == whole.usage
            content = b"".join(bytes(each.bytes or []) for each in logprobs)
            if "stop" not in own or text.count("猫") == 3:
                assert content.decode(errors="replace") == text
                assert whole.usage is not None and len(logprobs) == whole.usage.completion_tokens
            else:
                assert text == "猫é"
                assert content.decode(errors="ignore") == text
        assert service.engine.metrics.generated_tokens > 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_slot(folder: Path, stream: bool) -> None:
    with serving(folder, token_budget=16) as (address, service):
        engine = service.engine
        body = {"prompt": "say", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        with read_some(address, body):
            eventually(lambda: engine.metrics.generated_tokens > 3)
        eventually(lambda: not engine.has_work, 2)
        generated = engine.metrics.generated_tokens
        assert generated < 2000
        with read_some(address, {"prompt": [5] * 2000, "max_tokens": 1, "stream": stream}):
            eventually(lambda: engine.running == 1)
        eventually(lambda: not engine.has_work, 2)
        assert engine.metrics.generated_tokens == generated  # the prompt was not complete
        engine.check_idle()


def test_a_full_queue_gets_429(folder: Path) -> None:
    with serving(folder, max_running=1, max_waiting=1) as (address, service):
        body = {"prompt": "say", "max_tokens": 1500, "ignore_eos": True}
        with read_some(address, body):
            eventually(lambda: service.engine.running == 1)
            with read_some(address, body):
                eventually(lambda: service.engine.waiting == 1)
                status, content, headers = post(address, "/v1/completions", {**GREEDY, "prompt": "say"})
                assert (status, content["error"]["code"]) == (429, "queue_full")
                assert int(headers["retry-after"]) > 0
        eventually(lambda: not service.engine.has_work, 2)
        assert post(address, "/v1/completions", {**GREEDY, "prompt": "say"})[0] == 200


def test_keys_and_limits(folder: Path) -> None:
    limits = Limits(body_bytes=2000, body_s=0.3, request_s=0.2)
    keys = tuple(hashlib.sha256(key).digest() for key in (b"one", b"two"))
    with serving(folder, limits=limits, keys=keys) as (address, service):
        body = {**GREEDY, "prompt": "say"}
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            assert post(address, "/v1/completions", body, headers)[0] == 401
        key = {"authorization": "Bearer two"}
        assert post(address, "/v1/completions", body, key)[0] == 200
        assert get(address, "/metrics")[0] == 401
        assert get(address, "/health")[0] == 200
        assert post(address, "/v1/completions", {**body, "prompt": "a" * 3000}, key)[0] == 413
        slow = {**body, "max_tokens": 2000, "ignore_eos": True}
        assert post(address, "/v1/completions", slow, key)[0] == 504
        eventually(lambda: not service.engine.has_work, 2)
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = "POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: 10\r\n\r\n{"
            connection.sendall(head.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_a_failed_step_answers_all_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder) as (address, service):
        run = service.engine.runner.run
        monkeypatch.setattr(service.engine.runner, "run", lambda *_: 1 / 0)
        status, content, _ = post(address, "/v1/completions", {**GREEDY, "prompt": "say", "n": 3})
        assert (status, content["error"]["code"]) == (500, "internal_error")
        monkeypatch.setattr(service.engine.runner, "run", run)
        assert post(address, "/v1/completions", {**GREEDY, "prompt": "say"})[0] == 200
        service.engine.check_idle()


def test_the_command_sleeps_when_idle_and_drains_on_sigterm(folder: Path) -> None:
    def cpu_time(pid: int) -> float:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")

    with command(folder, "--name", NAME) as (address, process):
        assert address.startswith("http://127.0.0.1:")
        assert post(address, "/v1/completions", {**GREEDY, "prompt": "say"})[0] == 200
        time.sleep(0.3)
        before = cpu_time(process.pid)
        time.sleep(1)
        assert cpu_time(process.pid) - before <= 0.03
        results: list[int] = []
        body = {**GREEDY, "prompt": "say", "max_tokens": 300, "ignore_eos": True}
        thread = threading.Thread(target=lambda: results.append(post(address, "/v1/completions", body)[0]))
        thread.start()
        eventually(lambda: "farandole_requests_running 1" in get(address, "/metrics")[1])
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert results == [200]
        assert process.wait(10) == -signal.SIGTERM
        assert process.read_stderr().splitlines()[-1] == "stopped by SIGTERM"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))


def test_a_second_ctrl_c_ends_the_command_quietly(tmp_path: Path) -> None:
    write_folder(tmp_path, context=32768)
    body = {**GREEDY, "prompt": "say", "max_tokens": 32000, "ignore_eos": True, "stream": True}
    with (
        command(tmp_path, "--name", NAME, "--kv-memory", "0.1") as (address, process),
        requests.post(address + "/v1/completions", json=body, stream=True, timeout=30) as response,
    ):
        lines = response.iter_lines()  # a discarded iterator closes the connection
        next(lines)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
        assert process.read_stderr().splitlines()[1:] == ["stopped by Ctrl-C (SIGINT)"]
