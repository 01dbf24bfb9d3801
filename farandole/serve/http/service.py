"""Run generation engines in threads, for clients in an asyncio event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.serve.engine import GenerationEngine, QueueFullError
from farandole.serve.http.stats import stats_of
from farandole.serve.metrics import Family, of_replicas
from farandole.serve.ranks.errors import RanksFailed
from farandole.serve.request import Output, RequestError, Sampling

log = logging.getLogger(__name__)


class ServiceEndedError(Exception):
    """Raised if the service has ended because a rank failed."""


@dataclass(eq=False)
class Ticket:
    """A submitted request.

    The queue `outputs` receives the engine's outputs; the last output of a sequence has a finish reason.

    Args:
        number: the request ID returned by the engine; None until the engine has received the request.
        service: the service whose engine runs the request.
    """

    prompt: Sequence[int]
    sampling: Sampling
    outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)
    number: int | None = None
    service: Service | None = None


class Service:
    """Runs an engine in a thread.

    Args:
        engine: the engine; after `start`, only the service's thread may use it.
        on_failure: a function that the thread calls after a rank has failed and all requests have received an
            error.
    """

    failure: RanksFailed | None = None
    """The reason why the service has ended."""

    def __init__(self, engine: GenerationEngine, on_failure: Callable[[], None] = lambda: None) -> None:
        self.engine, self._on_failure = engine, on_failure
        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._queued = self._queued_tokens = 0  # sequences in the inbox, and tokens in their prompts
        self._tickets: dict[int, Ticket] = {}
        self._closed = False
        self._ended: RanksFailed | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="farandole-engine", daemon=True)

    def start(self) -> None:
        """Start the thread.  Call this method from the event loop that receives the outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after its current step.  Requests in progress receive no more outputs."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def end(self, failure: RanksFailed) -> None:
        """Fail all requests, and end this service, because ranks of another service have failed."""
        with self._condition:
            self._ended = failure
            self._condition.notify()

    @property
    def queued(self) -> int:
        """Return the number of sequences that the engine has not received yet."""
        return self._queued

    @property
    def sequences(self) -> int:
        """Return the number of running and waiting sequences."""
        return self.engine.running + self.engine.waiting + self._queued

    @property
    def is_alive(self) -> bool:
        """Return whether the thread is running."""
        return self._thread.is_alive()

    def submit(self, requests: Sequence[tuple[Sequence[int], Sampling]]) -> list[Ticket]:
        """Add all requests to the queue, or none if an error is raised.

        Raises:
            RequestError: if the engine cannot serve a request.
            QueueFullError: if too many sequences are waiting, or the expected time to first token exceeds the target
                `ttft`.
            ServiceEndedError: if a rank has failed.
        """
        for prompt, sampling in requests:
            self.engine.check(prompt, sampling)
        count = sum(sampling.n for _, sampling in requests)
        if count > self.engine.max_waiting:
            raise RequestError(
                "prompt",
                f"expected at most {self.engine.max_waiting} sequences in a request, got {count}",
            )
        tickets = [Ticket(prompt, sampling, service=self) for prompt, sampling in requests]
        tokens = sum(len(prompt) * sampling.n for prompt, sampling in requests)
        with self._condition:
            if self.failure is not None:
                raise ServiceEndedError(f"the service has ended: {self.failure}")
            try:
                self._check_queue(count, tokens)
            except QueueFullError:
                self.engine.metrics.refused += len(requests)
                raise
            self._queued += count
            self._queued_tokens += tokens
            self._inbox.append(lambda: self._add(tickets, count, tokens))
            self._condition.notify()
        return tickets

    def _check_queue(self, count: int, tokens: int) -> None:
        """Raise QueueFullError if new sequences do not fit in the queue, or are expected to miss `ttft`."""
        engine = self.engine
        waiting = engine.waiting + self._queued
        if waiting + count > engine.max_waiting:
            raise engine.queue_full(waiting, count)
        ttft = engine.admission.target.ttft
        if ttft is None:
            return
        delay = engine.queue_delay(self._queued, self._queued_tokens)
        expected = engine.queue_delay(self._queued + count - 1, self._queued_tokens + tokens)
        if delay > 0 and expected > ttft:
            raise QueueFullError(
                f"the first token is expected after {expected:.1f} s, which misses the target of {ttft:g} s",
                expected - ttft,
            )

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Cancel requests.  Their memory is freed before the next step."""
        with self._condition:
            self._inbox.append(lambda: self._cancel(tickets))
            self._condition.notify()

    def metrics(self) -> list[Family]:
        """Return the measurements."""
        engine = self.engine
        return engine.metrics.families(
            running=engine.running,
            waiting=engine.waiting + self._queued,
            used=engine.store.used,
            capacity=engine.store.capacity,
            moves=engine.store.moves,
            limit=engine.admission.max_running,
            step=engine.admission.times.coefficients,
        )

    def stats(self) -> dict[str, Any]:
        """Return the state that the page at `/` shows."""
        return stats_of([self.engine], self.queued)

    # ---- in the thread ----

    def _add(self, tickets: Sequence[Ticket], count: int, tokens: int) -> None:
        with self._condition:  # `submit` counts each sequence once: in `_queued` or in the engine
            self._queued -= count
            self._queued_tokens -= tokens
            for ticket in tickets:
                ticket.number = self.engine.add(ticket.prompt, ticket.sampling)
                self._tickets[ticket.number] = ticket

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket.number is not None and self._tickets.pop(ticket.number, None) is not None:
                self.engine.cancel(ticket.number)

    def _run(self) -> None:
        try:
            while self._advance():
                pass
        except RanksFailed as error:
            self._fail(error)
        self.engine.runner.close()

    def _advance(self) -> bool:
        """Wait for work, and run a step; return False after `close`."""
        with self._condition:
            is_idle = False
            while not (self._inbox or self._closed or self._ended or self.engine.has_work or is_idle):
                is_idle = not self._condition.wait(self.engine.runner.heartbeat_s)
            if self._closed:
                return False
            if self._ended is not None:
                raise self._ended
            commands, self._inbox = self._inbox, []
        if is_idle and not commands:
            self.engine.runner.beat()
            return True
        for command in commands:
            command()
        try:
            outputs = self.engine.step()
        except RanksFailed:
            raise
        except Exception:
            log.exception("a step of the generation engine failed; all requests are cancelled")
            outputs = self._cancel_all()
        self._deliver(outputs)
        return True

    def _fail(self, error: RanksFailed) -> None:
        """Answer all requests with an error, and end the service."""
        if self._ended is None:
            log.error("a rank failed, so the service ends: %s", error)
        with self._condition:
            self.failure = error
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        self._deliver(self._cancel_all())
        self._on_failure()

    def _cancel_all(self) -> list[Output]:
        """Cancel all requests, and return an output with an error for each sequence."""
        return [
            Output(number, choice, finish_reason="error")
            for number in self.engine.cancel_all()
            for choice in range(self._tickets[number].sampling.n)
        ]

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Put outputs into the queues of their tickets, in one callback of the event loop."""
        pairs = [(self._tickets[output.request].outputs, output) for output in outputs]
        ended = [output.request for output in outputs if output.finish_reason is not None]
        for number in ended:
            ticket = self._tickets.get(number)
            if ticket is not None and not self.engine.has_request(number):
                del self._tickets[number]
        if pairs and self._loop is not None:

            def put() -> None:
                for queue, output in pairs:
                    queue.put_nowait(output)

            try:
                self._loop.call_soon_threadsafe(put)
            except RuntimeError:  # the event loop is closed
                log.debug("outputs were dropped, because the event loop is closed")


class ReplicatedService:
    """Runs the engines of several replicas, with the interface of `Service`.

    A request goes to the replica with the fewest running and waiting sequences.  If the ranks of one replica fail, the
    services of all replicas end, because the launcher ends all ranks.

    Args:
        engines: the engines of the replicas, created with the same arguments.
        on_failure: see `Service`.
    """

    def __init__(self, engines: Sequence[GenerationEngine], on_failure: Callable[[], None]) -> None:
        self.services = [Service(engine, self._end) for engine in engines]
        self.engine = engines[0]
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._is_ending = False

    def start(self) -> None:
        """Start the threads.  Call this method from the event loop that receives the outputs."""
        for service in self.services:
            service.start()

    def close(self) -> None:
        """Stop the threads after their current steps.  Requests in progress receive no more outputs."""
        for service in self.services:
            service.close()

    @property
    def failure(self) -> RanksFailed | None:
        """Return the error of a failed service, or None."""
        return next((service.failure for service in self.services if service.failure is not None), None)

    @property
    def is_alive(self) -> bool:
        """Return whether all threads are running."""
        return all(service.is_alive for service in self.services)

    def submit(self, requests: Sequence[tuple[Sequence[int], Sampling]]) -> list[Ticket]:
        """Add all requests to the queues of the replicas, or none if an error is raised; see `Service.submit`."""
        count = sum(sampling.n for _, sampling in requests)
        most = sum(service.engine.max_waiting for service in self.services)
        if count > most:
            raise RequestError("prompt", f"expected at most {most} sequences in a request, got {count}")
        tickets: list[Ticket] = []
        try:
            for request in requests:
                tickets += min(self.services, key=lambda service: service.sequences).submit([request])
        except BaseException:
            self.cancel(tickets)
            raise
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Cancel requests.  Their memory is freed before the next step."""
        for service in self.services:
            if own := [ticket for ticket in tickets if ticket.service is service]:
                service.cancel(own)

    def metrics(self) -> list[Family]:
        """Return the metrics summed over all replicas, and the metrics of each replica."""
        return of_replicas([service.metrics() for service in self.services])

    def stats(self) -> dict[str, Any]:
        """Return the state that the page at `/` shows."""
        return stats_of(
            [service.engine for service in self.services], sum(service.queued for service in self.services)
        )

    def _end(self) -> None:
        """End all services."""
        with self._lock:
            if self._is_ending:  # `Service.end` makes the thread of each other service call this method too
                return
            self._is_ending = True
        failure = self.failure
        assert failure is not None
        for service in self.services:
            if service.failure is None:
                service.end(failure)
        self._on_failure()
