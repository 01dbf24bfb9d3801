"""Code shared by all model servers: endpoints, error responses, and the handling of clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer

from farandole._extras import optional_import

with optional_import():
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.exceptions import HTTPException

from farandole.serve.engine import QueueFullError
from farandole.serve.http.guard import Guard, Limits
from farandole.serve.http.page import read_page
from farandole.serve.http.protocol import TokenizeRequest
from farandole.serve.http.service import ServiceEndedError
from farandole.serve.metrics import Family, prometheus_text
from farandole.serve.request import RequestError

T = TypeVar("T")


class ServedModel(Protocol):
    """A model that runs in threads."""

    def start(self) -> None:
        """Start the threads.  Call this method from the event loop that receives the results."""
        ...

    def close(self) -> None:
        """Stop the threads."""
        ...

    @property
    def is_alive(self) -> bool:
        """Return whether all threads are running."""
        ...

    def metrics(self) -> list[Family]:
        """Return the metrics."""
        ...


class ModelServer:
    """A web application that starts a model, with endpoints that describe the model.

    Subclasses add the endpoints that run the model.

    Args:
        service: the service that runs the model.
        names: the names of the model in requests; the first is the name of the base model.
        tokenizer: the model's tokenizer.
        context: the maximum number of tokens of a sequence.
        limits: the limits on requests.
        keys: SHA-256 hashes of API keys; if empty, no key is required.
    """

    def __init__(
        self,
        service: ServedModel,
        names: Sequence[str],
        tokenizer: Tokenizer,
        context: int,
        limits: Limits,
        keys: Sequence[bytes],
    ) -> None:
        self._names, self._name = names, names[0]
        self._tokenizer, self._context, self._limits = tokenizer, context, limits
        self._created = int(time.time())
        self.app = self._new_app(service, keys)

    def _new_app(self, service: ServedModel, keys: Sequence[bytes]) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            service.start()
            yield
            service.close()

        # disable FastAPI's documentation pages, because they load scripts from other servers
        app = FastAPI(title="farandole serve", lifespan=lifespan, docs_url=None, redoc_url=None)
        app.add_middleware(Guard, limits=self._limits, keys=keys)
        app.add_exception_handler(RequestValidationError, self._on_invalid)
        app.add_exception_handler(HTTPException, _on_http_error)
        app.add_exception_handler(RequestError, _on_request_error)
        app.add_exception_handler(QueueFullError, _on_full)
        app.add_exception_handler(ServiceEndedError, _on_end)
        app.add_exception_handler(Exception, _on_failure)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [self._model(name) for name in self._names]}

        @app.get("/v1/models/{name:path}")
        async def model(name: str) -> dict[str, Any]:
            self._check_model(name)
            return self._model(name)

        @app.post("/tokenize")
        async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
            if body.model is not None:
                self._check_model(body.model)
            (tokens,) = await self._encode([body.prompt], body.add_special_tokens)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": self._context}

        @app.head("/health", include_in_schema=False)
        @app.get("/health")
        async def health() -> Response:
            alive = service.is_alive
            return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

        @app.get("/metrics")
        async def metrics() -> Response:
            return PlainTextResponse(
                prometheus_text(service.metrics()), media_type="text/plain; version=0.0.4"
            )

        return app

    def _add_page(self, name: str) -> None:
        """Serve a page at `/`; see `page.py`."""
        document, headers = read_page(name)

        @self.app.head("/", include_in_schema=False)
        @self.app.get("/", include_in_schema=False)
        async def page() -> Response:
            return HTMLResponse(document, headers=headers)

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "farandole",
            "max_model_len": self._context,
        }

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            raise HTTPException(404, f"model: {name!r} does not exist; {self._available()}")

    def _available(self) -> str:
        return f"this server has {', '.join(map(repr, self._names))}"

    async def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Tokenize texts without blocking the event loop."""
        encode = self._tokenizer.encode_batch
        encodings = await asyncio.to_thread(encode, list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def _on_invalid(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_answer(
                400, f"body: expected JSON, got invalid JSON: {first['ctx']['error']}", "invalid_json"
            )
        if isinstance(cause := first.get("ctx", {}).get("error"), RequestError):
            return _on_request_error(request, cause)
        kind = request.headers.get("content-type", "")
        if first["loc"] == ("body",) and "json" not in kind:
            message = f"content-type: expected application/json, got {kind or 'no content-type'}; with curl, add -H 'content-type: application/json'"
            return error_answer(400, message, "invalid_content_type")
        # the location is, for example, ("body", "prompt", "str"); for a union, the last part names one of its types
        place = [str(part) for part in first["loc"][1:]]
        field = place[0] if place else "body"
        reason = first["msg"]
        if first["type"] == "extra_forbidden":
            field, reason = ".".join(place), "this field is not supported"
        if first["type"] == "missing" and place == ["model"]:
            reason = f"required; {self._available()}"
        return error_answer(400, f"{field}: {reason}", "invalid_value", field)


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, T]) -> T | Response:
    """Await `answer`, and return its result.

    If the client disconnects first, cancel `answer`, and return a response with status 499.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=499)
    finally:
        work.cancel()
        gone.cancel()


# ---- errors ----


def error_body(message: str, code: str, param: str | None = None, kind: str = "") -> dict[str, Any]:
    """Return an error in OpenAI's format.

    Args:
        param: the field of the request that is invalid, or None.
        kind: the type of the error, by default `code`.
    """
    return {"message": message, "type": kind or code, "param": param, "code": code}


def error_answer(
    status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return a response with an HTTP status and an error in OpenAI's format; see `error_body`."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return JSONResponse({"error": error_body(message, code, param, kind)}, status, headers)


def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "model_not_found" if str(error.detail).startswith("model: ") else "invalid_request"
    param = "model" if code == "model_not_found" else None
    return error_answer(error.status_code, str(error.detail), code, param, dict(error.headers or {}))


def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    code = "context_length_exceeded" if "does not fit" in str(error) else "invalid_value"
    return error_answer(400, str(error), code, error.field)


def _on_failure(_: Request, __: Exception) -> Response:
    return error_answer(500, "the server failed; see its log", "internal_error")


def _on_end(_: Request, error: Exception) -> Response:
    return error_answer(503, str(error), "service_ended")


def _on_full(_: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFullError)
    seconds = max(1, math.ceil(error.retry_after))
    message = f"{error}; try again after {seconds} s"
    return error_answer(429, message, "queue_full", headers={"Retry-After": str(seconds)})
