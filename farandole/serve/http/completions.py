"""The HTTP server for text generation: OpenAI's completions and chat completions, and additional endpoints."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from farandole._extras import optional_import

with optional_import():
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse

from farandole.serve.folder import ModelFolder
from farandole.serve.http.answers import Choice, TokenTexts, chat_logprobs, completion_logprobs, usage
from farandole.serve.http.base import ModelServer, error_answer, error_body, unless_disconnected
from farandole.serve.http.chat import deltas_of, message_of, prepare_chat
from farandole.serve.http.guard import Limits
from farandole.serve.http.protocol import ChatRequest, CompletionRequest
from farandole.serve.http.reply import Reply
from farandole.serve.http.service import ReplicatedService, Service, Ticket
from farandole.serve.request import RequestError, Sampling
from farandole.serve.text import TextStream


@dataclass(frozen=True)
class _Job:
    """A request in progress."""

    request: CompletionRequest | ChatRequest
    head: dict[str, Any]  # the common fields of all parts of the response
    tickets: list[Ticket]  # one per prompt
    choices: list[Choice]  # `n` per prompt
    echoes: list[str]  # the text to prepend to the choices of each prompt: the prompt or ""
    replies: list[Reply]  # one per choice of a chat; otherwise empty

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ticket.prompt) for ticket in self.tickets)

    @property
    def usage(self) -> dict[str, int]:
        return usage(self.prompt_tokens, sum(choice.tokens for choice in self.choices))


class Server(ModelServer):
    """Serves a language model over HTTP.

    Args:
        found: the model.
        service: the service that runs the engine.
        name: the model's name in requests.
        limits: the limits on requests.
        keys: SHA-256 hashes of API keys; if empty, no key is required.
    """

    def __init__(
        self,
        found: ModelFolder,
        service: Service | ReplicatedService,
        name: str,
        limits: Limits,
        keys: Sequence[bytes] = (),
    ) -> None:
        names = [name, *service.engine.runner.adapters]
        super().__init__(service, names, found.tokenizer, found.context, limits, keys)
        self._found, self._service = found, service
        self._texts = TokenTexts(found.tokenizer)
        self._add_page("generation")
        self._add_endpoints(self.app)

    def _add_endpoints(self, app: FastAPI) -> None:
        @app.post("/v1/completions")
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await self._answer(request, await self._start_completion(body))

        @app.post("/v1/chat/completions")
        async def chat(body: ChatRequest, request: Request) -> Response:
            return await self._answer(request, await self._start_chat(body))

        @app.get("/stats")
        async def stats() -> Response:
            own = {
                "model": self._name,
                "context": self._found.context,
                "chat": self._found.template is not None,
                "started": self._created,
            }
            return JSONResponse(own | self._service.stats(), headers={"cache-control": "no-store"})

    def _select(self, model: str, sampling: Sampling) -> Sampling:
        """Return `sampling` with the adapter named `model`, or unchanged if `model` names the base model."""
        self._check_model(model)
        return sampling if model == self._name else replace(sampling, lora=model)

    async def _check(self, prompt: list[int], sampling: Sampling) -> None:
        check = self._service.engine.check
        if sampling.is_constrained:  # compiling a large grammar would block the event loop
            await asyncio.to_thread(check, prompt, sampling)
        else:
            check(prompt, sampling)

    # ---- start ----

    async def _start_completion(self, body: CompletionRequest) -> _Job:
        sampling = self._select(body.model, body.sampling())
        if body.stream and sampling.prompt_logprobs and sampling.n > 1:
            raise RequestError("n", "expected 1 for a stream with echo and logprobs")
        prompts = body.prompts()
        tokens = [
            (await self._encode([prompt], True))[0] if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        echoes = []
        for prompt, own in zip(prompts, tokens, strict=True):
            await self._check(own, sampling)  # also checks the range of the tokens
            text = prompt if isinstance(prompt, str) else self._found.tokenizer.decode(own)
            echoes.append(text if body.echo else "")
        return self._submit(body, sampling, tokens, echoes, "cmpl", "text_completion")

    async def _start_chat(self, body: ChatRequest) -> _Job:
        self._check_model(body.model)
        chat = prepare_chat(body, self._found)
        sampling = self._select(body.model, chat.sampling)
        (tokens,) = await self._encode([chat.prompt], False)
        try:
            await self._check(tokens, sampling)
        except RequestError as error:
            if chat.form is None or error.field != "grammar":
                raise
            raise RequestError("tools", str(error)) from None
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        replies = [chat.reply() for _ in range(body.n)]
        return self._submit(body, sampling, [tokens], [""], "chatcmpl", kind, replies)

    def _submit(
        self,
        body: CompletionRequest | ChatRequest,
        sampling: Sampling,
        prompts: Sequence[list[int]],
        echoes: list[str],
        prefix: str,
        kind: str,
        replies: Sequence[Reply] = (),
    ) -> _Job:
        _ = body.include_usage  # checks the field
        tickets = self._service.submit([(prompt, sampling) for prompt in prompts])
        head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }
        choices = [
            Choice(index, len(echoes[index // sampling.n])) for index in range(len(prompts) * sampling.n)
        ]
        return _Job(body, head, tickets, choices, echoes, list(replies))

    # ---- answer ----

    async def _answer(self, request: Request, job: _Job) -> Response:
        if job.request.stream:
            return StreamingResponse(
                self._stream(job),
                media_type="text/event-stream",
                headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            )
        try:
            async with asyncio.timeout(self._limits.request_s):
                return await unless_disconnected(request, self._collect(job))
        except TimeoutError:
            return error_answer(
                504,
                f"the request took more than {self._limits.request_s:g} s; reduce max_tokens, or shorten the prompt",
                "timeout",
            )
        finally:
            self._service.cancel(job.tickets)

    async def _collect(self, job: _Job) -> Response:
        """Wait for the complete output, and return the response."""
        prompt_logprobs: list[list[Any]] = [[] for _ in job.tickets]
        n = job.request.n
        for number, ticket in enumerate(job.tickets):
            left = n
            while left:
                output = await ticket.outputs.get()
                if output.finish_reason == "error":
                    return error_answer(*self._failure())
                prompt_logprobs[number] += output.prompt_logprobs
                job.choices[number * n + output.choice].add(output)
                left -= output.finish_reason is not None
        found = []
        for choice in job.choices:
            number = choice.index // n
            entry: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
            if isinstance(job.request, ChatRequest):
                reply = job.replies[choice.index]
                reply.add(choice.text, is_last=True)
                entry["message"] = message_of(reply.whole)
                entry["finish_reason"] = reply.finish_reason(choice.finish_reason)
                entry["logprobs"] = (
                    chat_logprobs(self._texts, choice.logprobs) if job.request.logprobs else None
                )
            else:
                entry["text"] = job.echoes[number] + choice.text
                entry["logprobs"] = None
                if job.request.logprobs is not None:
                    before = (
                        self._with_offsets(job.tickets[number], prompt_logprobs[number])
                        if job.request.echo
                        else []
                    )
                    first = job.tickets[number].prompt[0] if job.request.echo else None
                    entry["logprobs"] = completion_logprobs(self._texts, [*before, *choice.logprobs], first)
            found.append(entry)
        return JSONResponse({**job.head, "choices": found, "usage": job.usage})

    async def _stream(self, job: _Job) -> AsyncIterator[str]:
        """Yield the server-sent events of the response."""
        try:
            try:
                async with asyncio.timeout(self._limits.request_s):
                    async for event in self._events(job):
                        yield event
            except TimeoutError:
                message = f"the request took more than {self._limits.request_s:g} s"
                yield _event({"error": error_body(message, "timeout")})
            yield "data: [DONE]\n\n"
        finally:  # also reached if the client disconnects, because this generator is then closed
            self._service.cancel(job.tickets)

    async def _events(self, job: _Job) -> AsyncIterator[str]:
        n = job.request.n
        blank = {"usage": None} if job.request.include_usage else {}
        if isinstance(job.request, ChatRequest):
            for choice in job.choices:
                delta = {"role": "assistant", "content": ""}
                yield _event(
                    {
                        **job.head,
                        "choices": [
                            {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}
                        ],
                        **blank,
                    }
                )
        started: set[int] = set()
        async for number, output in _merged(job.tickets):
            if output.finish_reason == "error":
                _, message, code = self._failure()
                yield _event({"error": error_body(message, code)})
                return
            choice = job.choices[number * n + output.choice]
            text, logprobs = choice.add(output)
            entry: dict[str, Any] = {"index": choice.index, "finish_reason": None, "logprobs": None}
            reason = output.finish_reason
            if isinstance(job.request, ChatRequest):
                reply = job.replies[choice.index]
                before = len(reply.whole.calls)
                part = reply.add(text, is_last=reason is not None)
                reason = reply.finish_reason(reason)
                entries = [{**entry, "delta": delta} for delta in deltas_of(part, before)]
                if job.request.logprobs:
                    entries[0]["logprobs"] = chat_logprobs(self._texts, logprobs)
                is_empty = not entries[0]["delta"]
            else:
                first = None
                shown = logprobs
                if choice.index not in started and job.request.echo:
                    text = job.echoes[number] + text
                    first = job.tickets[number].prompt[0]
                    shown = [
                        *self._with_offsets(job.tickets[number], output.prompt_logprobs),
                        *logprobs,
                    ]
                started.add(choice.index)
                entries = [{**entry, "text": text}]
                if job.request.logprobs is not None:
                    entries[0]["logprobs"] = completion_logprobs(self._texts, shown, first)
                is_empty = not (text or output.prompt_logprobs)
            entries[-1]["finish_reason"] = reason
            if is_empty and not logprobs and not reason:
                continue
            for each in entries:
                yield _event({**job.head, "choices": [each], **blank})
        if job.request.include_usage:
            yield _event({**job.head, "choices": [], "usage": job.usage})

    def _failure(self) -> tuple[int, str, str]:
        """Return the HTTP status, the message and the code for a request that ended with an error."""
        if self._service.failure is not None:
            return 503, f"the service has ended: {self._service.failure}", "service_ended"
        return 500, "the engine failed; see the server's log", "internal_error"

    def _with_offsets(self, ticket: Ticket, logprobs: Sequence[Any]) -> list[tuple[Any, int]]:
        """Pair each prompt token's log-probabilities with the token's offset in the prompt text."""
        found, text = [], TextStream(self._found.tokenizer)
        for before, logprob in zip(ticket.prompt, logprobs, strict=False):
            text.add(before)
            found.append((logprob, text.length))
        return found


async def _merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Any]]:
    """Yield the outputs of all tickets as they arrive, each with the index of its ticket."""
    left = [ticket.sampling.n for ticket in tickets]
    tasks = {asyncio.ensure_future(ticket.outputs.get()): number for number, ticket in enumerate(tickets)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = tasks.pop(task)
                outputs = [task.result()]
                queue = tickets[number].outputs
                while not queue.empty():
                    outputs.append(queue.get_nowait())
                for output in outputs:
                    left[number] -= output.finish_reason is not None
                    yield number, output
                if left[number]:
                    tasks[asyncio.ensure_future(queue.get())] = number
    finally:
        for task in tasks:
            task.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
