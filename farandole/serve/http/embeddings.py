"""The HTTP server for embeddings: OpenAI's `/v1/embeddings`, and additional endpoints."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from farandole._extras import optional_import

with optional_import():
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response

from farandole.serve.http.base import ModelServer, error_answer, unless_disconnected
from farandole.serve.http.embedding_service import EmbeddingError, EmbeddingService
from farandole.serve.http.guard import Limits
from farandole.serve.http.protocol import Fields, Tokens


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


class EmbeddingServer(ModelServer):
    """Answers HTTP requests for embeddings.

    Args:
        service: the service that runs the encoder.
        name: the model's name in requests.
        limits: the limits on requests.
        keys: SHA-256 hashes of API keys; if empty, no key is required.
    """

    def __init__(
        self, service: EmbeddingService, name: str, limits: Limits, keys: Sequence[bytes] = ()
    ) -> None:
        encoder = service.encoder
        super().__init__(service, [name], encoder.tokenizer, encoder.context, limits, keys)
        self._service = service
        self._add_page("encoder")
        self._add_endpoints(self.app)

    def _add_endpoints(self, app: FastAPI) -> None:
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

        @app.get("/stats")
        async def stats() -> Response:
            own = {"model": self._name, "context": self._context, "started": self._created}
            return JSONResponse(own | self._service.stats(), headers={"cache-control": "no-store"})

    async def _answer(self, body: EmbeddingRequest) -> Response:
        inputs = body.inputs()
        encoded = iter(await self._encode([each for each in inputs if isinstance(each, str)], True))
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


def _encoded(embedding: Tensor, form: str) -> list[float] | str:
    """Return `embedding` as a list if `form` is "float", else as little-endian fp32 bytes in base64."""
    if form == "float":
        values: list[float] = embedding.tolist()
        return values
    return base64.b64encode(embedding.numpy().astype("<f4").tobytes()).decode()
