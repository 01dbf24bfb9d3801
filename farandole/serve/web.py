"""What all HTTP servers of models share: the middleware, the answers to errors, and clients that disconnect."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from farandole._extras import optional_import

with optional_import():
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException

from farandole.serve.engine import QueueFullError
from farandole.serve.guard import Guard, Limits
from farandole.serve.request import RequestError
from farandole.serve.service import ServiceEndedError

T = TypeVar("T")


def new_app(
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]], limits: Limits, keys: Sequence[bytes]
) -> FastAPI:
    """Return an application without endpoints.

    Args:
        lifespan: starts and ends the service.
        keys: SHA-256 hashes of API keys; if empty, no key is required.
    """
    # the pages with the documentation of FastAPI load scripts from other servers
    app = FastAPI(title="farandole serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, limits=limits, keys=keys)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(QueueFullError, _on_full)
    app.add_exception_handler(ServiceEndedError, _on_end)
    app.add_exception_handler(Exception, _on_failure)
    return app


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, T]) -> T | Response:
    """Return the answer, or cancel it when the client disconnects."""

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
    """Return an error in OpenAI's format; `param` is the invalid field."""
    return {"message": message, "type": kind or code, "param": param, "code": code}


def error_answer(
    status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the answer with an error."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return JSONResponse({"error": error_body(message, code, param, kind)}, status, headers)


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_answer(
            400, f"body: expected JSON, got invalid JSON: {first['ctx']['error']}", "invalid_json"
        )
    if isinstance(cause := first.get("ctx", {}).get("error"), RequestError):
        return _on_request_error(request, cause)
    # the place is, for example, ("body", "prompt", "str"), with the type of a union at the end
    place = [str(part) for part in first["loc"][1:]]
    field = place[0] if place else "body"
    reason = first["msg"]
    if first["type"] == "extra_forbidden":
        field, reason = ".".join(place), "this field is not supported"
    return error_answer(400, f"{field}: {reason}", "invalid_value", field)


def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "model_not_found" if str(error.detail).startswith("model: ") else "invalid_request"
    return error_answer(
        error.status_code, str(error.detail), code, "model" if code == "model_not_found" else None
    )


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
