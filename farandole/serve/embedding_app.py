"""The HTTP server for embeddings: OpenAI's `/v1/embeddings`, and a few endpoints of our own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from farandole._extras import optional_import

with optional_import():
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from starlette.exceptions import HTTPException

from farandole.serve.embedding import EmbeddingError, EmbeddingService
from farandole.serve.guard import Limits
from farandole.serve.protocol import Fields, TokenizeRequest, Tokens
from farandole.serve.web import error_answer, new_app, unless_disconnected


class EmbeddingRequest(Fields):
    """The fields of POST /v1/embeddings."""

    model: str
    input: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    encoding_format: Literal["float", "base64"] = "float"

    def inputs(self) -> Sequence[str | list[int]]:
        """Return the inputs, each as text or tokens."""
        found: Any = self.input
        return [found] if isinstance(found, str) or isinstance(found[0], int) else found


class EmbeddingServer:
    """Answers HTTP requests.

    Args:
        service: the encoder.
        name: the model's name in requests.
        limits: the limits on requests.
        keys: SHA-256 hashes of API keys; if empty, no key is required.
    """

    def __init__(
        self, service: EmbeddingService, name: str, limits: Limits, keys: Sequence[bytes] = ()
    ) -> None:
        self._service, self._encoder, self._name, self._limits = service, service.encoder, name, limits
        self._created = int(time.time())
        self.app = self._build(keys)

    def _build(self, keys: Sequence[bytes]) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self._service.start()
            yield
            self._service.close()

        app = new_app(lifespan, self._limits, keys)

        @app.post("/v1/embeddings")
        async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
            self._check_model(body.model)
            try:
                async with asyncio.timeout(self._limits.request_s):
                    return await unless_disconnected(request, self._answer(body))
            except TimeoutError:
                message = f"the request took more than {self._limits.request_s:g} s"
                return error_answer(504, message, "timeout")
            except EmbeddingError:
                return error_answer(500, "the encoder failed; see the server's log", "internal_error")

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [self._model()]}

        @app.get("/v1/models/{name:path}")
        async def model(name: str) -> dict[str, Any]:
            self._check_model(name)
            return self._model()

        @app.post("/tokenize")
        async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
            if body.model is not None:
                self._check_model(body.model)
            (tokens,) = await self._encode([body.prompt], body.add_special_tokens)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": self._encoder.context}

        @app.get("/health")
        async def health() -> Response:
            alive = self._service.is_alive
            return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

        @app.get("/metrics")
        async def metrics() -> Response:
            return PlainTextResponse(self._metrics(), media_type="text/plain; version=0.0.4")

        return app

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "farandole",
            "max_model_len": self._encoder.context,
        }

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise HTTPException(404, f"model: {name!r} does not exist; this server has {self._name!r}")

    async def _encode(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Return the tokens of texts, without blocking the event loop."""
        encode = self._encoder.tokenizer.encode_batch
        encodings = await asyncio.to_thread(encode, list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    async def _answer(self, body: EmbeddingRequest) -> Response:
        inputs = body.inputs()
        encoded = iter(await self._encode([each for each in inputs if isinstance(each, str)]))
        sequences = [next(encoded) if isinstance(each, str) else each for each in inputs]
        results = self._service.submit(sequences)
        try:
            found = await asyncio.gather(*results)
        finally:
            for result in results:
                result.cancel()
        count = sum(map(len, sequences))
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(each, body.encoding_format)}
            for index, each in enumerate(found)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": self._name, "usage": usage})

    def _metrics(self) -> str:
        """Return the measurements in Prometheus' text format."""
        service = self._service
        lines = []
        for name, kind, help_, value in (
            ("embeddings_waiting", "gauge", "Sequences that wait.", service.waiting),
            ("embeddings_total", "counter", "Sequences computed.", service.sequences),
            ("embedding_tokens_total", "counter", "Tokens computed.", service.tokens),
            ("embedding_batches_total", "counter", "Batches computed.", service.batches),
            ("embedding_seconds_total", "counter", "Time in the model.", service.seconds),
            (
                "requests_refused_total",
                "counter",
                "Requests refused because the queue was full.",
                service.refused,
            ),
        ):
            lines += [
                f"# HELP farandole_{name} {help_}",
                f"# TYPE farandole_{name} {kind}",
                f"farandole_{name} {value}",
            ]
        return "\n".join(lines) + "\n"


def _encoded(embedding: Tensor, form: str) -> list[float] | str:
    """Return the values, or their little-endian fp32 bytes in base64."""
    if form == "float":
        values: list[float] = embedding.tolist()
        return values
    return base64.b64encode(embedding.numpy().astype("<f4").tobytes()).decode()
