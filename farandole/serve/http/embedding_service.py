"""Compute embeddings in a thread, for clients in an asyncio event loop.

The thread embeds waiting sequences in batches of up to `token_budget` tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from farandole.data.wording import counted
from farandole.serve.encoder import Encoder
from farandole.serve.engine import QueueFullError
from farandole.serve.metrics import Family
from farandole.serve.request import RequestError

log = logging.getLogger(__name__)


class EmbeddingError(RuntimeError):
    """Raised if the encoder fails."""


@dataclass(frozen=True)
class _Job:
    """A waiting sequence; only the event loop may set `result`."""

    tokens: Sequence[int]
    result: asyncio.Future[Tensor]


class EmbeddingService:
    """Runs an encoder in a thread.

    Args:
        max_waiting: the maximum number of waiting sequences.
        token_budget: the maximum number of tokens per batch; a longer sequence is embedded alone.
    """

    def __init__(self, encoder: Encoder, *, max_waiting: int = 2048, token_budget: int = 4096) -> None:
        self.encoder, self.max_waiting, self.token_budget = encoder, max_waiting, token_budget
        self.sequences = self.tokens = self.batches = self.refused = 0
        self.seconds = 0.0
        self._condition = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="farandole-encoder", daemon=True)

    def start(self) -> None:
        """Start the thread.  Call this method from the event loop that receives the embeddings."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after its current batch, and join it.  Waiting sequences are not embedded."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread is running."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._waiting)

    def check(self, tokens: Sequence[int]) -> None:
        """Raise RequestError if the encoder cannot embed a sequence."""
        encoder = self.encoder
        if not tokens:
            raise RequestError("input", "expected at least one token, got none")
        if len(tokens) > encoder.context:
            raise RequestError(
                "input",
                f"an input of {len(tokens)} tokens does not fit in the context of {encoder.context} tokens; shorten the input",
            )
        if min(tokens) < 0 or max(tokens) >= encoder.vocabulary:
            odd = next(token for token in tokens if not 0 <= token < encoder.vocabulary)
            raise RequestError("input", f"expected tokens from 0 to {encoder.vocabulary - 1}, got {odd}")

    def submit(self, sequences: Sequence[Sequence[int]]) -> list[asyncio.Future[Tensor]]:
        """Add all sequences to the queue, or none if an error is raised.  Call this method from the event loop.

        Returns:
            A future for each sequence, in order, whose result is the fp32 embedding of shape (width).  Sequences of
            canceled futures are not embedded.  If the encoder fails, the futures raise EmbeddingError.

        Raises:
            RequestError: if the encoder cannot embed a sequence.
            QueueFullError: if too many sequences are waiting.
        """
        for tokens in sequences:
            self.check(tokens)
        if len(sequences) > self.max_waiting:
            raise RequestError("input", f"expected at most {self.max_waiting} inputs, got {len(sequences)}")
        loop = asyncio.get_running_loop()
        jobs = [_Job(tokens, loop.create_future()) for tokens in sequences]
        with self._condition:
            if len(self._waiting) + len(jobs) > self.max_waiting:
                self.refused += 1
                per_sequence = self.seconds / max(self.sequences, 1)
                raise QueueFullError(
                    f"{counted(len(jobs), 'new input')} would exceed the limit of {self.max_waiting} waiting inputs "
                    f"(currently {len(self._waiting)})",
                    per_sequence * len(self._waiting),
                )
            self._waiting.extend(jobs)
            self._condition.notify()
        return [job.result for job in jobs]

    def metrics(self) -> list[Family]:
        """Return the metrics."""
        return [
            Family(name, kind, text, [("", value)])
            for name, kind, text, value in (
                ("embeddings_waiting", "gauge", "Waiting sequences.", self.waiting),
                ("embeddings_total", "counter", "Sequences computed.", self.sequences),
                ("embedding_tokens_total", "counter", "Tokens computed.", self.tokens),
                ("embedding_batches_total", "counter", "Batches computed.", self.batches),
                ("embedding_seconds_total", "counter", "Time in the model.", self.seconds),
                (
                    "requests_refused_total",
                    "counter",
                    "Requests refused because the queue was full.",
                    self.refused,
                ),
            )
        ]

    def stats(self) -> dict[str, Any]:
        """Return the state that the page at `/` shows.  Times are in seconds."""
        return {
            "time": time.monotonic(),
            "width": self.encoder.width,
            "waiting": self.waiting,
            "max_waiting": self.max_waiting,
            "refused": self.refused,
            "inputs": self.sequences,
            "tokens": self.tokens,
            "batches": self.batches,
            "seconds": self.seconds,
        }

    # ---- in the thread ----

    def _run(self) -> None:
        while batch := self._next():
            start = time.perf_counter()
            try:
                found: Sequence[Tensor] | None = list(self.encoder.embed([job.tokens for job in batch]))
            except Exception:
                log.exception("a batch of embeddings failed; its requests are answered with an error")
                found = None
            self.seconds += time.perf_counter() - start
            self.batches += 1
            self.sequences += len(batch)
            self.tokens += sum(len(job.tokens) for job in batch)
            self._deliver(batch, found)

    def _next(self) -> list[_Job]:
        """Wait for sequences, and return the next batch, or [] after `close`."""
        batch: list[_Job] = []
        with self._condition:
            while not batch and not self._closed:
                tokens = 0
                while self._waiting and (
                    not batch or tokens + len(self._waiting[0].tokens) <= self.token_budget
                ):
                    job = self._waiting.popleft()
                    if not job.result.cancelled():
                        batch.append(job)
                        tokens += len(job.tokens)
                if not batch:
                    self._condition.wait()
        return [] if self._closed else batch

    def _deliver(self, batch: Sequence[_Job], found: Sequence[Tensor] | None) -> None:
        """Set the results of a batch in the event loop, or set EmbeddingError if `found` is None."""

        def put() -> None:
            for number, job in enumerate(batch):
                if job.result.cancelled():
                    continue
                if found is None:
                    job.result.set_exception(EmbeddingError)
                else:
                    job.result.set_result(found[number])

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:  # the event loop is closed
            log.debug("embeddings were dropped, because the event loop is closed")
