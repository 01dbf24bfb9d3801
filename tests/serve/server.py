"""A folder to serve, and servers: in this process, and as a command."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from tokenizers import AddedToken, Tokenizer

from farandole.serve.engine import GenerationEngine
from farandole.serve.folder import read_model
from farandole.serve.http.completions import Server
from farandole.serve.http.guard import Limits
from farandole.serve.http.service import Service
from farandole.serve.runner import Runner
from tests.forked_python import ForkedPython
from tests.launch.jobs import environment
from tests.models.hf.families import folder_of, reference, rope
from tests.models.hf.folders import add_tokenizer
from tests.serve.sentencepiece import sentencepiece

CONTEXT = 2048
NAME = "small"


def write_folder(
    folder: Path, template: str | None = None, tokens: Sequence[str] = (), context: int = CONTEXT
) -> Path:
    """Write a small Llama with a tokenizer, additional tokens and a chat template."""
    model = reference(
        "llama",
        3,
        vocab_size=300 + len(tokens),
        num_hidden_layers=2,
        rope_parameters=rope("default", 8),
        head_dim=8,
        max_position_embeddings=context,
        eos_token_id=None,
    )
    folder_of(model, folder)
    add_tokenizer(folder, 300)
    if tokens:
        path = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
        tokenizer.save(path)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    return folder


def write_sentencepiece(folder: Path) -> dict[str, Any]:
    """Write the model of `write_folder` with a SentencePiece tokenizer, and return fields that select "▁b" each time."""
    write_folder(folder, "{% for message in messages %}{{ message.content }}{% endfor %}")
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    sentencepiece().save(str(folder / "tokenizer.json"))
    return {"temperature": 0, "max_tokens": 3, "logit_bias": {str(sentencepiece().token_to_id("▁b")): 100}}


@contextmanager
def serving(
    folder: Path,
    *,
    limits: Limits | None = None,
    keys: tuple[bytes, ...] = (),
    context: int | None = None,
    lora: Mapping[str, Path] | None = None,
    **options: Any,
) -> Iterator[tuple[str, Service]]:
    """Serve in a thread, and yield the address and the service."""
    found = read_model(folder, context=context, lora=lora)
    engine = GenerationEngine(
        Runner(found.model, adapters=found.adapters),
        context=found.context,
        tokenizer=found.tokenizer,
        end_tokens=found.end_tokens,
        **options,
    )
    service = Service(engine)
    with running(Server(found, service, NAME, limits or Limits(), keys).app) as address:
        yield address, service


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Run a server in a thread, and yield the address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def command(folder: Path, *words: str) -> Iterator[tuple[str, ForkedPython]]:
    """Run `farandole serve`, and yield the address and the process.

    `process.communicate()` returns the output after the process has ended.
    """
    arguments = ["-m", "farandole", "serve", str(folder), "--port", "0", *words]
    process = ForkedPython(arguments, environment(), fork_ranks=True)
    try:
        while (match := re.search(r"serving .* on (http://\S+)", process.read_stderr())) is None:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        yield match[1], process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def eventually(condition: Any, seconds: float = 10.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
