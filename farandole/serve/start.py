"""Start the HTTP server, and end it when the process receives SIGTERM or SIGINT.

With several ranks, rank 0 serves, and the other ranks follow (`ranks.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from farandole._extras import optional_import

with optional_import():
    import uvicorn

from farandole.comm.communicator import Communicator
from farandole.launch.reports import notify
from farandole.launch.runtime import Runtime
from farandole.serve.app import Server
from farandole.serve.embedding import EmbeddingService
from farandole.serve.embedding_app import EmbeddingServer
from farandole.serve.encoder import read_encoder
from farandole.serve.engine import GenerationEngine
from farandole.serve.folder import ModelFolder, find_model, read_model
from farandole.serve.guard import Limits, read_keys
from farandole.serve.ranks import Driver, Worker
from farandole.serve.request import RequestError
from farandole.serve.runner import Runner
from farandole.serve.service import Service
from farandole.serve.shards import check_width, shard_model
from farandole.serve.store import CHUNK

GIB = 1 << 30


def start(
    folder: Path,
    *,
    host: str,
    port: int,
    name: str,
    precision: str,
    context: int | None,
    max_running: int,
    max_waiting: int,
    token_budget: int,
    ttft: float | None,
    tpot: float | None,
    kv_memory: float | None,
    store: str,
    chat_template: str,
    api_keys: Path | None,
    max_body: float,
    request_timeout: float,
    drain_timeout: int,
    runtime: Runtime | None = None,
) -> None:
    """Serve a model until a signal; see `farandole serve --help` for the arguments.

    With `runtime`, this is a collective call of all ranks, which divide the model.

    Raises:
        RequestError: if an argument is invalid.
        CheckpointError, DataError, FolderError: if the folder cannot be read.
        RanksFailed: if a rank fails.
    """
    comm = None if runtime is None else runtime.comm
    with _failing_together(comm):
        folder = find_model(folder)
        if comm is None or comm.rank == 0:
            keys = read_keys(api_keys) if api_keys is not None else []
            listener = _listen(host, port)
    if comm is not None:  # a new checkpoint may appear before the other ranks look
        folder = comm.broadcast_object(folder)
    with _failing_together(comm):
        found = read_model(
            folder, precision=precision, context=context, template=chat_template, lazy=comm is not None
        )
    runner = _runner(found, comm)
    if isinstance(runner, Worker):
        runner.follow()
        return
    limits = Limits(body_bytes=int(max_body * (1 << 20)), request_s=request_timeout)
    per_position = runner.bytes_per_position
    wanted = max_running * (-(-found.context // CHUNK) * CHUNK)
    if kv_memory is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        ranks_here = 1 if runtime is None else runtime.local_size
        positions = min(wanted, free // 2 // ranks_here // per_position)
    else:
        positions = int(kv_memory * GIB) // per_position
    if positions < CHUNK:
        raise RequestError(
            "kv_memory",
            f"expected memory for at least {CHUNK} positions of {per_position} bytes, got {positions} positions",
        )
    engine = GenerationEngine(
        runner,
        context=found.context,
        tokenizer=found.tokenizer,
        end_tokens=found.end_tokens,
        store=store,
        kv_positions=positions,
        max_running=max_running,
        max_waiting=max_waiting,
        token_budget=token_budget,
        ttft=ttft,
        tpot=tpot,
    )
    model_name = name or _name_of(found.folder)

    def end() -> None:
        web.should_exit = True

    service = Service(engine, on_failure=end)
    server = Server(found, service, model_name, limits, keys)
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_timeout,
        server_header=False,
    )
    listener.listen(2048)  # from now on, connections wait until the server answers
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    ranks = "" if comm is None else f"on {comm.size} ranks, "
    memory = positions * per_position / GIB
    notify(
        f"serving {model_name} on http://{shown}:{address[1]} ({precision}, {ranks}context {found.context}, up to {max_running} "
        f"sequences, {memory:.2g} GiB for {positions} positions)"
    )
    if not keys and not address[0].startswith("127.") and address[0] != "::1":
        notify("anyone who can reach this address can use the model: --api-keys FILE requires keys")
    web = uvicorn.Server(config)
    web.run(sockets=[listener])
    if service.failure is not None:
        raise service.failure


def check_start(folder: Path, *, host: str, port: int, api_keys: Path | None, tensor: int) -> None:
    """Check arguments of `start` before the ranks are launched, so that an error is reported once.

    Raises:
        RequestError, CheckpointError, DataError, FolderError: as `start`.
    """
    if api_keys is not None:
        read_keys(api_keys)
    _listen(host, port).close()
    check_width(read_model(folder, lazy=True).model, tensor)


def _runner(found: ModelFolder, comm: Communicator | None) -> Runner:
    """Return this rank's runner.  This is a collective call."""
    if comm is None:
        return Runner(found.model)
    with _failing_together(comm):
        shard_model(found.model, comm)
    kind = Worker if comm.rank else Driver
    return kind(found.model, comm)


@contextlib.contextmanager
def _failing_together(comm: Communicator | None) -> Iterator[None]:
    """Raise an error of the block on the first rank that has one, and end the other ranks silently."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    failed = [own is not None] if comm is None else comm.all_gather_object(own is not None)
    if True not in failed:
        return
    if own is not None and (comm is None or failed.index(True) == comm.rank):
        raise own
    raise SystemExit(2)


def _name_of(found: Path) -> str:
    """Return the name of a Hugging Face folder or of a run."""
    folder = found.resolve()
    return folder.parent.parent.name if folder.parent.name == "checkpoints" else folder.name


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that has the address, to report a used port before the model is read."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise RequestError("port", f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def start_encoder(
    folder: Path,
    *,
    host: str,
    port: int,
    name: str,
    precision: str,
    context: int | None,
    max_waiting: int,
    token_budget: int,
    api_keys: Path | None,
    max_body: float,
    request_timeout: float,
    drain_timeout: int,
) -> None:
    """Serve the embeddings of an encoder until a signal; see `farandole serve --help` for the arguments.

    Raises:
        RequestError: if an argument is invalid.
        FolderError: if the folder cannot be read.
    """
    keys = read_keys(api_keys) if api_keys is not None else []
    listener = _listen(host, port)
    encoder = read_encoder(folder.expanduser(), precision=precision, context=context)
    service = EmbeddingService(encoder, max_waiting=max_waiting, token_budget=token_budget)
    model_name = name or _name_of(encoder.folder)
    limits = Limits(body_bytes=int(max_body * (1 << 20)), request_s=request_timeout)
    app = EmbeddingServer(service, model_name, limits, keys).app
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_timeout,
        server_header=False,
    )
    listener.listen(2048)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    notify(
        f"serving embeddings of {model_name} on http://{shown}:{address[1]} ({precision}, context {encoder.context}, "
        f"{encoder.width} values, pooling: {encoder.pooling})"
    )
    if not keys and not address[0].startswith("127.") and address[0] != "::1":
        notify("anyone who can reach this address can use the model: --api-keys FILE requires keys")
    uvicorn.Server(config).run(sockets=[listener])
