"""Start the HTTP server, and stop it when the process receives SIGTERM or SIGINT.

With several ranks, only rank 0 accepts requests; all ranks compute (`ranks/driver.py`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from farandole._extras import optional_import

with optional_import():
    import uvicorn

from farandole.data.wording import counted
from farandole.launch.control_groups import available_memory
from farandole.launch.monitor import restored_handlers
from farandole.launch.reports import describe_stop, notify
from farandole.serve.encoder import read_encoder
from farandole.serve.engine import GenerationEngine
from farandole.serve.folder import find_model, read_model
from farandole.serve.http.completions import Server
from farandole.serve.http.embedding_service import EmbeddingService
from farandole.serve.http.embeddings import EmbeddingServer
from farandole.serve.http.guard import Limits, read_keys
from farandole.serve.http.service import ReplicatedService, Service
from farandole.serve.lora import parse_adapters
from farandole.serve.request import RequestError
from farandole.serve.runner import Runner
from farandole.serve.speculation.draft import read_draft
from farandole.serve.store import CHUNK, fitting_positions

if TYPE_CHECKING:
    from farandole.launch.runtime import Runtime
    from farandole.serve.ranks.driver import Worker

GIB = 1 << 30


def start(
    folder: Path,
    *,
    host: str,
    port: int,
    name: str,
    precision: str,
    weights: str,
    context: int | None,
    max_running: int,
    max_waiting: int,
    token_budget: int,
    ttft: float | None,
    tpot: float | None,
    kv_memory: float | None,
    store: str,
    speculate: str,
    draft: Path | None,
    lora: Sequence[str],
    chat_template: str,
    api_keys: Path | None,
    max_body: float,
    request_timeout: float,
    drain_timeout: int,
    replicas: int = 1,
    runtime: Runtime | None = None,
) -> None:
    """Serve a model until the process receives SIGTERM or SIGINT; see `farandole serve --help` for the arguments.

    With `runtime`, this is a collective call of all ranks.  The model is sharded across the ranks of each replica.

    Raises:
        RequestError: if an argument is invalid.
        CheckpointError, DataError, FolderError: if the folder cannot be read.
        RanksFailed: if a rank fails.
    """
    together: Any = contextlib.nullcontext
    comm = None
    if runtime is not None:  # a process that serves alone starts sooner without these imports
        from farandole.mesh import Mesh
        from farandole.serve.ranks.replicas import read_replica
        from farandole.serve.ranks.shards import raised_together

        comm = runtime.comm
        together = partial(raised_together, comm)
    with together():
        folder = find_model(folder)
        adapters = parse_adapters(lora)
        if comm is None or comm.rank == 0:
            keys = read_keys(api_keys) if api_keys is not None else []
            listener = _listen(host, port)
    options: dict[str, Any] = {
        "precision": precision,
        "weights": weights,
        "context": context,
        "template": chat_template,
        "lora": adapters,
    }
    own: list[Runner] | Worker
    if comm is None:
        found = read_model(folder, **options)
        own = runners = [Runner(found.model, **found.runner_options)]
        free = available_memory()
    else:
        assert runtime is not None
        folder = comm.broadcast_object(folder)  # a new checkpoint may appear in the meantime
        mesh = Mesh.box(comm.size, data=replicas, tensor=comm.size // replicas)
        found, own = read_replica(folder, options, comm, mesh)
        free = min(comm.all_gather_object(available_memory() // runtime.local_size))
        runners = own if isinstance(own, list) else []
    with together():
        # one draft model for each engine, because engines run in threads
        drafts = [None if draft is None else read_draft(draft, found, precision) for _ in runners]
    if not isinstance(own, list):
        _follow(own)
        return
    limits = Limits(body_bytes=int(max_body * (1 << 20)), request_s=request_timeout)
    per_position = runners[0].bytes_per_position
    if drafts[0] is not None:
        per_position += drafts[0].runner.bytes_per_position
    if kv_memory is None:
        positions = fitting_positions(free, found.context, max_running, per_position)
    else:
        positions = int(kv_memory * GIB) // per_position
    if positions < CHUNK:
        raise RequestError(
            "kv_memory",
            f"expected memory for at least {CHUNK} token positions of {per_position} bytes, got memory for {positions} "
            "positions; increase --kv-memory, or free memory on this host",
        )
    engines = [
        GenerationEngine(
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
            speculate=speculate,
            draft=draft_model,
        )
        for runner, draft_model in zip(runners, drafts, strict=True)
    ]
    model_name = name or _name_of(found.folder)
    if model_name in adapters:
        raise RequestError("lora", f"expected a name other than {model_name}, the name of the base model")

    def end() -> None:
        web.should_exit = True

    service = Service(engines[0], end) if replicas == 1 else ReplicatedService(engines, end)
    server = Server(found, service, model_name, limits, keys)
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_timeout,
        server_header=False,
    )
    shown, number = _accept(listener)
    ranks = "" if comm is None else f"{counted(replicas, 'replica')} on {comm.size} ranks, "
    kinds = f"{precision}, {weights} weights" if weights else precision
    positions = engines[0].store.capacity
    memory = positions * per_position / GIB
    each = "" if replicas == 1 else " in each replica"
    notify(
        f"serving {model_name} on http://{shown}:{number} ({kinds}, {ranks}context {found.context}, up to {max_running} "
        f"sequences{each}, {memory:.2g} GiB for {positions} positions{each})"
    )
    _warn_if_open(listener, keys)
    web = uvicorn.Server(config)
    _run(web, listener, reports_stop=comm is None)  # with several ranks, the launcher reports the signal
    if service.failure is not None:
        raise service.failure


def _run(web: uvicorn.Server, listener: socket.socket, *, reports_stop: bool) -> None:
    """Run the server until it stops."""
    # after a second SIGINT, uvicorn does not wait for the requests, and would log a traceback for each request
    logging.getLogger("uvicorn.error").addFilter(lambda _: not web.force_exit)
    with restored_handlers():
        if reports_stop:  # after the running requests, uvicorn re-raises the signal that stopped the server
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, _report_stop)
        web.run(sockets=[listener])


def _report_stop(number: int, frame: FrameType | None) -> None:
    """Report the signal, and terminate this process with the same signal."""
    notify(describe_stop(number, ()))
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.raise_signal(number)


def check_start(
    folder: Path,
    *,
    host: str,
    port: int,
    api_keys: Path | None,
    tensor: int,
    lora: Sequence[str],
    weights: str,
) -> None:
    """Check arguments of `start` before the ranks are launched, so that only one process reports an error.

    Raises:
        RequestError, CheckpointError, DataError, FolderError: as for `start`.
    """
    from farandole.serve.ranks.shards import check_width

    if api_keys is not None:
        read_keys(api_keys)
    _listen(host, port).close()
    check_width(read_model(folder, lora=parse_adapters(lora), weights=weights, lazy=True).model, tensor)


def _follow(worker: Worker) -> None:
    """Run each step together with rank 0 until rank 0 stops."""
    # rank 0 handles the signals
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    worker.follow()


def _name_of(found: Path) -> str:
    """Return the default name of a model: the name of its Hugging Face folder or training run."""
    folder = found.resolve()
    return folder.parent.parent.name if folder.parent.name == "checkpoints" else folder.name


def _listen(host: str, port: int) -> socket.socket:
    """Bind a socket, so that a port in use is reported before the model is read."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except UnicodeError:
        raise RequestError("host", f"expected a name or an address, got {host!r}") from None
    except OSError as error:
        raise RequestError("port", f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def _accept(listener: socket.socket) -> tuple[str, int]:
    """Start listening; return the host in URL form, and the port."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    try:
        listener.listen(2048)
    except OSError as error:  # another process has begun to listen since `_listen`
        raise RequestError("port", f"cannot listen on {shown}:{port}: {error.strerror}") from None
    return shown, port


def _warn_if_open(listener: socket.socket, keys: Sequence[bytes]) -> None:
    """Print a warning if other hosts can use the server without a key."""
    host = listener.getsockname()[0]
    if not keys and not host.startswith("127.") and host != "::1":
        notify(
            "anyone who can reach this address can use the model; to require API keys, use --api-keys FILE"
        )


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
    """Serve the embeddings of an encoder until the process receives SIGTERM or SIGINT; see `farandole serve --help`.

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
    shown, number = _accept(listener)
    notify(
        f"serving embeddings of {model_name} on http://{shown}:{number} ({precision}, context {encoder.context}, "
        f"{encoder.width} values, pooling: {encoder.pooling})"
    )
    _warn_if_open(listener, keys)
    _run(uvicorn.Server(config), listener, reports_stop=True)
