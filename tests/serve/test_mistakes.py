"""Wrong options and files: `farandole serve` names the option and the reason, without a traceback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farandole.cli.main import app
from farandole.serve.http.start import _accept, _listen
from farandole.serve.request import RequestError
from tests.serve.server import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_folder(tmp_path_factory.mktemp("model"))
    (path / "binary").write_bytes(b"\xff\xfe\x00" * 30)
    (path / "empty").write_text("\n")
    (path / "key").write_text("secret\n")
    return path


@pytest.fixture(scope="module")
def used_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "a..b"], "--host: expected a name or an address, got 'a..b'"),
        (["--host", "host.invalid"], "--port: cannot listen on host.invalid:0: "),
        (["--api-keys", "FOLDER/binary"], "--api-keys: FOLDER/binary is not text"),
        (["--api-keys", "FOLDER/empty"], "--api-keys: FOLDER/empty has no keys"),
        (["--api-keys", "FOLDER/key"], "--api-keys: line 1 of FOLDER/key is not a SHA-256 hash"),
        (["--api-keys", "FOLDER"], "--api-keys: cannot read FOLDER: Is a directory"),
        (["--precision", "fp8"], "--precision: expected one of fp32, bf16, got 'fp8'"),
        (["--context", "99999"], "--context: expected a value from 1 to 2048"),
        (["--store", "x"], "--store: expected one of slots, pages, got 'x'"),
        (["--token-budget", "2"], "--token-budget: expected at least max_running=16, got 2"),
        (["--kv-memory", "0"], "--kv-memory: expected a number of at least 0.001, got '0'"),
        (["--speculate", "x"], "--speculate: expected one of off, lookup, draft, got 'x'"),
        (["--speculate", "draft"], "--draft: expected a draft model with speculate='draft'"),
        (["--speculate", "draft", "--draft", "FOLDER/none"], "FOLDER/none"),
        (["--chat-template", "FOLDER/none"], "FOLDER/none"),
        (["--chat-template", "FOLDER/binary"], "--chat-template FOLDER/binary: expected text in UTF-8"),
        (["--lora", "a=FOLDER/none"], "--lora: a: FOLDER/none does not exist"),
        (["--ttft", "soon"], "--ttft"),
        (["--bogus"], "unknown option --bogus; did you mean --host?"),
    ],
)
def test_wrong_options(folder: Path, words: list[str], message: str) -> None:
    arguments = [word.replace("FOLDER", str(folder)) for word in words]
    result = CliRunner().invoke(app, ["serve", str(folder), "--port", "0", *arguments])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert message.replace("FOLDER", str(folder)) in " ".join(result.output.split())


@pytest.mark.parametrize("more", [[], ["--tensor", "2"]])
def test_a_used_port(folder: Path, used_port: int, more: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", str(folder), "--port", str(used_port), *more])
    assert result.exit_code == 2
    assert f"--port: cannot listen on 127.0.0.1:{used_port}: Address already in use" in result.output


def test_a_port_that_another_process_uses_while_the_model_is_read() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()
        with pytest.raises(RequestError, match="port: cannot listen on 127.0.0.1:.*: Address already in use"):
            _accept(listener)


@pytest.mark.parametrize("name", ["none", "empty_folder"])
def test_a_folder_without_a_model(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name != "none":
        path.mkdir()
    result = CliRunner().invoke(app, ["serve", str(path), "--port", "0"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert str(path) in result.output.replace("\n", "")
