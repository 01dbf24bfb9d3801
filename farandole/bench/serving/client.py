"""Send requests to an OpenAI-compatible server, and record when each part of a response arrives.

Each request has its own connection; requests with an arrival time also have their own threads.  Times are measured from
the planned arrival of a request, so that a delayed client does not hide a slow server.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from farandole.bench.options import BenchError
from farandole.bench.serving.load import Request

TIMEOUT_S = 600.0
"""The time in seconds for which a request waits for the next part of its response."""

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
]
"""The words of prompts for servers whose tokenizer is unknown; token n of a request is sent as word n - 1.

Most tokenizers encode each of these words as one token.
"""


@dataclass
class Sample:
    """The measurements of one request.  Times are in seconds, as returned by `time.perf_counter`.

    Args:
        arrival: the scheduled send time of the request.
        texts: the times at which parts of the text arrived.
        end: the time at which the response ended or the request failed.
        prompt_tokens, output_tokens: the numbers of tokens, as counted by the server.
        refused: whether the server answered with status 429.
        error: the reason for any other failure.
    """

    arrival: float
    texts: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: bool = False
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether the response is complete."""
        return not self.refused and self.error is None

    @property
    def ttft(self) -> float:
        """Return the seconds from the planned arrival to the first text, or to the end if there is no text."""
        return (self.texts[0] if self.texts else self.end) - self.arrival

    @property
    def latency(self) -> float:
        """Return the seconds from the planned arrival to the end of the response."""
        return self.end - self.arrival

    @property
    def tpot(self) -> float | None:
        """Return the mean seconds per token after the first token, or None for fewer than two tokens."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between consecutive parts of the text."""
        return [after - before for before, after in zip(self.texts, self.texts[1:], strict=False)]


class Client:
    """Sends requests to a server with an OpenAI-compatible API.

    Args:
        url: the server's address, with or without `/v1` at the end.
        model: the name of the model, or None for the first model in the server's list.
        vocabulary: the size of the vocabulary.  If None, prompts are sent as text that consists of `WORDS`, not as
            token ids.
        api_key: the API key, or an empty string.

    Raises:
        BenchError: if `model` is None and the server cannot be reached or does not return a list of models.
    """

    def __init__(
        self, url: str, model: str | None = None, vocabulary: int | None = None, api_key: str = ""
    ) -> None:
        address = urlsplit(url)
        self._kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self._host, self._path = address.netloc, address.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.vocabulary = vocabulary or len(WORDS) + 1
        self._as_text = vocabulary is None
        self.model = model or self._first_model(url)

    def _first_model(self, url: str) -> str:
        connection = self._kind(self._host, timeout=TIMEOUT_S)
        try:
            connection.request("GET", f"{self._path}/models", headers=self._headers)
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise BenchError(
                    f"{url} answered GET {self._path}/models with status {response.status}, expected 200; check --url "
                    "and --api-key-file"
                )
            return str(json.loads(content)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(
                f"{url} cannot be reached ({_reason(error)}); check --url, and that the server is running"
            ) from None
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, BenchError):
                raise
            raise BenchError(
                f"{url} answered GET {self._path}/models without a list of models ({_reason(error)}); check --url"
            ) from None
        finally:
            connection.close()

    def one_after_another(self, requests: Sequence[Request]) -> list[Sample]:
        """Send each request when the response to the previous request is complete."""
        return [self.send(request, time.perf_counter()) for request in requests]

    def at_times(self, requests: Sequence[Request], arrivals: Sequence[float]) -> list[Sample]:
        """Send each request at its time in `arrivals`, without waiting for the responses to earlier requests.

        The times are in seconds from now, in ascending order.  The method returns when all responses are complete.
        """
        found: list[Sample | None] = [None] * len(requests)

        def send(number: int, arrival: float) -> None:
            found[number] = self.send(requests[number], arrival)

        threads = []
        start = time.perf_counter()
        for number, offset in enumerate(arrivals):
            time.sleep(max(0.0, start + offset - time.perf_counter()))
            thread = threading.Thread(target=send, args=(number, start + offset), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        return [sample for sample in found if sample is not None]

    def send(self, request: Request, arrival: float) -> Sample:
        """Send a request, wait for its response, and return the measurements.

        If the request fails, the sample contains the reason, and no exception is raised.

        Args:
            arrival: the scheduled send time of the request, in seconds of `time.perf_counter`.
        """
        sample = Sample(arrival)
        connection = self._kind(self._host, timeout=TIMEOUT_S)
        try:
            body = json.dumps(self._body(request))
            connection.request("POST", f"{self._path}/completions", body, self._headers)
            response = connection.getresponse()
            if response.status == 429:
                sample.refused = True
            elif response.status != 200:
                sample.error = f"status {response.status}: {response.read(500).decode(errors='replace')}"
            else:
                _read(response, sample)
        except (OSError, http.client.HTTPException, ValueError) as error:
            sample.error = _reason(error)
        finally:
            connection.close()
        sample.end = sample.end or time.perf_counter()
        return sample

    def _body(self, request: Request) -> dict[str, Any]:
        text = " ".join(WORDS[token - 1] for token in request.prompt) if self._as_text else request.prompt
        return {
            "model": self.model,
            "prompt": text,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _read(response: http.client.HTTPResponse, sample: Sample) -> None:
    """Record the times, token counts and errors of the server-sent events of `response` in `sample`."""
    is_done = False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        now, data = time.perf_counter(), line[5:].strip()
        if data == b"[DONE]":
            is_done = True
            break
        event = json.loads(data)
        if "error" in event:
            sample.error = f"error in the stream: {event['error']}"
            return
        if event.get("choices"):
            sample.end = now
            if event["choices"][0].get("text"):
                sample.texts.append(now)
        if event.get("usage"):
            sample.prompt_tokens = event["usage"]["prompt_tokens"]
            sample.output_tokens = event["usage"]["completion_tokens"]
    if not is_done:
        sample.error = "the stream ended before [DONE]"
    elif not sample.output_tokens:
        sample.error = "the stream has no usage with completion_tokens"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
