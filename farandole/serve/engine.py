"""Generate text for many requests at once.

    engine = GenerationEngine(model, context=2048)
    number = engine.add([1, 2, 3], Sampling(max_tokens=10, temperature=0))
    while engine.has_work:
        for output in engine.step():
            print(output.request, output.tokens, output.finish_reason)

A step consists of scheduling, running the model and post-processing.  There are no separate prefill and decode phases.
Each step computes at most `token_budget` tokens: first one token of every decoding sequence plus its proposed tokens
(`speculation/speculator.py`), and then tokens of prompts, in order of arrival.  Requests can therefore join the batch
between any two steps.  A long prompt is divided among several steps, in which the decoding sequences also advance.

In fp32, the greedy tokens of a request, and the logits from which they are selected, do not depend on the other
requests or on proposed tokens (`rows.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from farandole.data.wording import counted
from farandole.launch.control_groups import available_memory
from farandole.models.sequence import Transformer
from farandole.serve.admission import Admission, Target
from farandole.serve.constraint import Grammars
from farandole.serve.metrics import Metrics
from farandole.serve.request import CONSTRAINTS, Logprob, Output, Progress, RequestError, Sampling
from farandole.serve.runner import Runner, Span
from farandole.serve.sampling import Draw, Sampler, logprobs_of
from farandole.serve.speculation.draft import DraftModel, DraftProposer
from farandole.serve.speculation.ngrams import NgramProposer
from farandole.serve.speculation.speculator import Proposer, Speculation, Speculator
from farandole.serve.store import CHUNK, STORES, Blocks, Store, fitting_positions
from farandole.serve.text import TextStream
from farandole.serve.threads import core_threads

log = logging.getLogger(__name__)

SPECULATE = ("off", "lookup", "draft")


class QueueFullError(Exception):
    """Raised if the queue is full or the time to first token would exceed its target.

    Retry after `retry_after` seconds.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(eq=False)
class _Sequence:
    """One sequence of a request."""

    request: int
    choice: int
    sampling: Sampling
    prompt: int
    tokens: list[int]
    most: int  # the maximum number of generated tokens
    ends: frozenset[int]
    text: TextStream | None
    arrived: float
    arrived_step: int
    blocks: Blocks | None = None
    draw: Draw | None = None
    speculation: Speculation | None = None
    proposed: list[int] = field(default_factory=list)  # the next tokens, to verify in this step
    computed: int = 0
    last_token: float = 0.0
    first_token: float = 0.0
    prompt_logprobs: list[Logprob] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Return the number of tokens that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Return the number of generated tokens."""
        return len(self.tokens) - self.prompt


class GenerationEngine:
    """Generates tokens for requests that arrive and end at any time.

    Args:
        model: a decoder on the CPU, or its runner.
        context: the maximum number of tokens of a sequence, including its prompt.
        tokenizer: converts tokens to text; without a tokenizer, outputs have no text.
        end_tokens: the model's end-of-sequence tokens; tokens outside the vocabulary are ignored.
        store: "slots" or "pages"; see `store.py`.
        kv_positions: the size of the KV cache in positions, for all sequences together, at least 16 for pages and 256
            for slots.  By default, `max_running` sequences of `context` tokens fit in the cache, but the cache uses at
            most half of the free memory.
        max_running: the maximum number of sequences in the batch.
        max_waiting: the maximum number of sequences that wait to join the batch.
        token_budget: the maximum number of tokens per step, at least `max_running`.
        ttft, tpot: target latencies in seconds; see `admission.py`.
        speculate: how tokens are proposed for speculative decoding: "lookup", "draft" or "off"; see
            `speculation/speculator.py`.
        draft: the draft model, required with `speculate="draft"`.

    Raises:
        RequestError: if an argument is out of range or the model is not supported.
    """

    def __init__(
        self,
        model: Transformer | Runner,
        *,
        context: int,
        tokenizer: Tokenizer | None = None,
        end_tokens: Collection[int] = (),
        store: str = "pages",
        kv_positions: int | None = None,
        max_running: int = 16,
        max_waiting: int = 256,
        token_budget: int = 256,
        ttft: float | None = None,
        tpot: float | None = None,
        speculate: str = "off",
        draft: DraftModel | None = None,
    ) -> None:
        if store not in STORES:
            raise RequestError("store", f"expected one of {', '.join(STORES)}, got {store!r}")
        for name, value in (("max_running", max_running), ("max_waiting", max_waiting)):
            if value < 1:
                raise RequestError(name, f"expected at least 1 sequence, got {value}")
        if token_budget < max_running:
            raise RequestError(
                "token_budget", f"expected at least max_running={max_running}, got {token_budget}"
            )
        if speculate not in SPECULATE:
            raise RequestError("speculate", f"expected one of {', '.join(SPECULATE)}, got {speculate!r}")
        if (speculate == "draft") != (draft is not None):
            expected = "a draft model" if draft is None else "no draft model"
            raise RequestError("draft", f"expected {expected} with speculate={speculate!r}")
        self.runner = model if isinstance(model, Runner) else Runner(model)
        self.vocabulary = self.runner.vocabulary
        self.context, self.tokenizer = context, tokenizer
        self.end_tokens = frozenset(token for token in end_tokens if 0 <= token < self.vocabulary)
        self.max_running, self.max_waiting = max_running, max_waiting
        self.admission = Admission(Target(ttft, tpot), max_running, token_budget)
        positions = kv_positions or self._fitting_positions(draft)
        if positions < (least := STORES[store].unit):
            raise RequestError(
                "kv_positions", f"expected at least {least} positions with store={store!r}, got {positions}"
            )
        self.store: Store = STORES[store](self.runner.memory(), positions)
        self._speculator: Speculator | None = None
        if speculate != "off":
            proposer: Proposer = NgramProposer()
            if draft is not None:
                memory = STORES[store](draft.runner.memory(), positions)
                proposer = DraftProposer(draft, memory, self.vocabulary)
            self._speculator = Speculator(proposer)
        grammars = None
        if tokenizer is not None and self.end_tokens:
            grammars = Grammars(tokenizer, self.vocabulary, self.end_tokens)
        self._grammars = grammars
        self._sampler = Sampler(self.vocabulary, max_running, grammars)
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._requests = 0
        self._memory_is_full = False
        self._last_step: float | None = None  # the end of the last step, if work remained
        self.metrics = Metrics()

    def _fitting_positions(self, draft: DraftModel | None) -> int:
        per_position = self.runner.bytes_per_position
        if draft is not None:
            per_position += draft.runner.bytes_per_position
        free = available_memory() // self.runner.ranks
        positions = fitting_positions(free, self.context, self.max_running, per_position)
        if positions < CHUNK:
            raise RequestError(
                "kv_positions",
                f"expected memory for at least {CHUNK} token positions of {per_position} bytes, got memory for "
                f"{positions} positions; free memory on this host",
            )
        return positions

    @property
    def has_work(self) -> bool:
        """Return whether a sequence is running or waiting."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> int:
        """Return the number of sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return the number of sequences that wait to join the batch."""
        return len(self._waiting)

    def progress(self) -> list[Progress]:
        """Return the state of the running sequences, in order of arrival.  Any thread may call this method."""
        return [
            Progress(
                each.request,
                each.choice,
                each.prompt,
                each.generated,
                each.most,
                each.blocks.stored,
                tuple(each.blocks.numbers),
            )
            for each in list(self._running)  # a copy, for calls from other threads
            if each.blocks is not None
        ]

    def queue_delay(self, sequences: int = 0, prompt_tokens: int = 0) -> float:
        """Return the predicted seconds until the engine starts to compute the prompt of a new sequence.

        Args:
            sequences, prompt_tokens: the number of sequences that will be added before the new sequence, and the number
                of tokens in their prompts.
        """
        running, waiting = list(self._running), list(self._waiting)  # copies, for calls from other threads
        places = 0 if self._memory_is_full else self.admission.max_running - len(running)
        work = sum(each.remaining for each in [*running, *waiting] if each.remaining > 1)
        return max(
            self.admission.until_ended(len(waiting) + sequences + 1 - places),
            self.admission.until_computed(work + prompt_tokens, len(running)),
        )

    def queue_full(self, waiting: int, more: int) -> QueueFullError:
        """Return the error for `more` new sequences that do not fit in the queue."""
        return QueueFullError(
            f"{counted(more, 'new sequence')} would exceed the limit of {self.max_waiting} waiting sequences "
            f"(currently {waiting})",
            self.admission.until_ended(waiting + more - self.max_waiting),
        )

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Check a request, and return the maximum number of tokens to generate.

        Raises:
            RequestError: if the engine cannot serve the request.
        """
        if not prompt:
            raise RequestError("prompt", "expected at least one token, got none")
        for name, tokens in (
            ("prompt", prompt),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocabulary):
                odd = next(token for token in tokens if not 0 <= token < self.vocabulary)
                raise RequestError(name, f"expected tokens from 0 to {self.vocabulary - 1}, got {odd}")
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop", "expected no strings, because the engine has no tokenizer")
        if sampling.lora is not None and sampling.lora not in self.runner.adapters:
            known = ", ".join(self.runner.adapters)
            expected = f"expected one of {known}" if known else "no adapters are loaded"
            raise RequestError("lora", f"unknown adapter {sampling.lora!r}; {expected}")
        if sampling.is_constrained:
            if self._grammars is None:
                raise RequestError(
                    next(name for name in CONSTRAINTS if getattr(sampling, name) is not None),
                    "expected no constraint, because the model has no tokenizer or no end-of-sequence token",
                )
            self._grammars.matcher(sampling)
        if sampling.n > self.max_waiting:
            raise RequestError(
                "n", f"expected at most max_waiting={self.max_waiting} sequences, got {sampling.n}"
            )
        if sampling.min_tokens and len(self._ends(sampling)) >= self.vocabulary:
            raise RequestError("min_tokens", "expected 0, because every token ends the sequence")
        limit = self.context - len(prompt)
        most = limit if sampling.max_tokens is None else sampling.max_tokens
        if most > limit or (sampling.max_tokens is None and limit < 1):
            output = "at least 1 output token" if sampling.max_tokens is None else f"max_tokens={most}"
            raise RequestError(
                "max_tokens" if limit > 0 else "prompt",
                f"a prompt of {len(prompt)} tokens with {output} does not fit in the context of {self.context} tokens; "
                "shorten the prompt" + ("" if sampling.max_tokens is None else ", or reduce max_tokens"),
            )
        length = self._positions(len(prompt), most)
        if length > self.store.capacity:
            raise RequestError(
                "max_tokens" if len(prompt) <= self.store.capacity else "prompt",
                f"{length} token positions do not fit in the KV cache of {self.store.capacity} positions; shorten the "
                "prompt, reduce max_tokens, or start the engine with more memory for the cache",
            )
        return most

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        """Return the tokens that end a sequence."""
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.ignore_eos else stops | self.end_tokens

    def add(self, prompt: Sequence[int], sampling: Sampling | None = None) -> int:
        """Add a request, and return its ID.

        Raises:
            RequestError: if the engine cannot serve the request.
            QueueFullError: if too many sequences are waiting.
        """
        sampling = sampling or Sampling()
        most = self.check(prompt, sampling)
        if len(self._waiting) + sampling.n > self.max_waiting:
            self.metrics.refused += 1
            raise self.queue_full(len(self._waiting), sampling.n)
        number = self._requests
        self._requests += 1
        ends = self._ends(sampling)
        now = time.monotonic()
        before = prompt if sampling.continues else ()
        for choice in range(sampling.n):
            text = TextStream(self.tokenizer, sampling.stop, before) if self.tokenizer is not None else None
            self._waiting.append(
                _Sequence(
                    number,
                    choice,
                    sampling,
                    len(prompt),
                    list(prompt),
                    most,
                    ends,
                    text,
                    now,
                    self.metrics.steps,
                )
            )
        return number

    @torch.inference_mode()
    def cancel(self, request: int) -> None:
        """Remove a request, and free its memory.  A request that has ended is ignored."""
        for sequence in [each for each in self._running if each.request == request]:
            self._remove(sequence, "cancelled")
        for sequence in [each for each in self._waiting if each.request == request]:
            self._waiting.remove(sequence)
            self._count_end("cancelled")
        self.store.compact()

    def has_request(self, request: int) -> bool:
        """Return whether a sequence of a request is running or waiting."""
        return any(each.request == request for each in self._running) or any(
            each.request == request for each in self._waiting
        )

    def cancel_all(self) -> list[int]:
        """Remove all requests, and return their IDs."""
        numbers = sorted({each.request for each in [*self._running, *self._waiting]})
        for number in numbers:
            self.cancel(number)
        return numbers

    @torch.inference_mode()
    @core_threads()
    def step(self) -> list[Output]:
        """Advance the batch by one step, and return one output for each sequence that has new tokens or has ended."""
        start = time.perf_counter()
        begin = start if self._last_step is None else self._last_step
        self._last_step = None
        self._propose()
        proposal_time = time.perf_counter() - start
        plan = self._schedule()
        if not plan:
            return []
        decodes = sum(count for sequence, count in plan if sequence.remaining == 1)
        prompt_tokens = sum(count for _, count in plan) - decodes
        running = len(self._running)
        spans = [self._span(sequence, count) for sequence, count in plan]
        before = time.perf_counter()
        logits = self.runner.run(self.store.memory, spans)
        self.metrics.model_time += time.perf_counter() - before
        outputs = self._post_process(plan, spans, logits)
        end = time.perf_counter()
        self.metrics.steps += 1
        self.metrics.step_time += end - start
        self.metrics.proposal_time += proposal_time
        self.admission.observe(
            decodes,
            prompt_tokens,
            end - begin - proposal_time,
            selected=len(outputs),
            ended=running - len(self._running),
        )
        self._last_step = end if self.has_work else None
        return outputs

    def check_idle(self) -> None:
        """Check that the KV cache is consistent, and unused if no sequence is running.

        Raises:
            RuntimeError: if the check fails.
        """
        self.store.check()
        if not self._running and self.store.used:
            raise RuntimeError(
                f"KV cache leak: {self.store.used} token positions are allocated, but no sequence is running"
            )

    # ---- schedule ----

    def _propose(self) -> None:
        """Propose the next tokens of decoding sequences."""
        if self._speculator is None:
            return
        decoding = [each for each in self._running if each.remaining == 1]
        speculations = [each.speculation for each in decoding if each.speculation is not None]
        proposals = self._speculator.propose(
            speculations,
            # the step selects one token more than it verifies
            [each.most - each.generated - 1 for each in decoding],
            self.admission.times.coefficients[:2],
            self.admission.proposal_budget(len(decoding)),
        )
        for sequence, proposal in zip(decoding, proposals, strict=True):
            sequence.proposed = proposal
            self.metrics.proposed_tokens += len(proposal)

    def _schedule(self) -> list[tuple[_Sequence, int]]:
        """Move waiting sequences into the batch, and return the sequences and token counts to compute."""
        plan = [(each, 1 + len(each.proposed)) for each in self._running if each.remaining == 1]
        budget = self.admission.prompt_budget(sum(count for _, count in plan))
        for sequence in self._running:
            if sequence.remaining > 1 and (count := min(sequence.remaining, budget)):
                plan.append((sequence, count))
                budget -= count
        self._memory_is_full = False
        while budget and self._waiting and len(self._running) < self.admission.max_running:
            sequence = self._waiting[0]
            sampling = sequence.sampling
            most = self._positions(sequence.prompt, sequence.most)
            share = not sampling.prompt_logprobs
            blocks = self.store.add(sequence.tokens, most, share=share, model=sampling.lora or "")
            if blocks is None:
                self._memory_is_full = True
                break
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.blocks, sequence.computed = blocks, blocks.stored
            sequence.draw = self._sampler.add(
                sampling, sequence.choice, sequence.tokens, sorted(sequence.ends)
            )
            if self._speculator is not None:
                sequence.speculation = self._speculator.add(sequence.tokens, most)
            self.metrics.shared_tokens += blocks.stored
            self.metrics.queue_time.observe(time.monotonic() - sequence.arrived)
            self.metrics.fusion_delay.observe(self.metrics.steps - sequence.arrived_step + 1)
            count = min(sequence.remaining, budget)
            plan.append((sequence, count))
            budget -= count
        return plan

    def _span(self, sequence: _Sequence, count: int) -> Span:
        start = sequence.computed
        assert sequence.blocks is not None
        self.store.reserve(sequence.blocks, start + count)
        tokens = [*sequence.tokens[start : start + count], *sequence.proposed]
        is_last = start + count >= len(sequence.tokens)
        wants_prompt = sequence.sampling.prompt_logprobs and sequence.choice == 0 and start < sequence.prompt
        logits = count if wants_prompt else is_last * (1 + len(sequence.proposed))
        return Span(tokens, start, sequence.blocks.numbers, logits, sequence.sampling.lora)

    # ---- post-process ----

    def _post_process(
        self, plan: Sequence[tuple[_Sequence, int]], spans: Sequence[Span], logits: Tensor
    ) -> list[Output]:
        """Select tokens, verify proposed tokens, end complete sequences, and return the outputs."""
        ready: list[tuple[_Sequence, int]] = []
        end = 0
        for (sequence, count), span in zip(plan, spans, strict=True):
            start, end = end, end + span.logits
            if span.start < sequence.prompt:
                self.metrics.prompt_tokens += count - len(sequence.proposed)
                if sequence.sampling.prompt_logprobs and sequence.choice == 0:
                    self._add_prompt_logprobs(sequence, span, logits[start:end])
            self._commit(sequence, count - len(sequence.proposed))
            if sequence.remaining == 0:
                ready.append((sequence, end - 1 - len(sequence.proposed)))
        outputs: dict[_Sequence, Output] = {}
        accepted = dict.fromkeys((sequence for sequence, _ in ready), 0)
        while ready:
            following = []
            selected = self._select(logits, ready)
            now = time.monotonic()
            for (sequence, row), (token, logprob) in zip(ready, selected, strict=True):
                verified = accepted[sequence]
                output = self._extend(sequence, token, logprob, now)
                outputs[sequence] = outputs[sequence].joined(output) if sequence in outputs else output
                if sequence.proposed[verified : verified + 1] == [token]:
                    accepted[sequence] += 1
                    if output.finish_reason is None:
                        self._commit(sequence, 1)
                        following.append((sequence, row + 1))
            ready = following
        for sequence, count in accepted.items():
            if self._speculator is not None and sequence.speculation is not None:
                self._speculator.observe(sequence.speculation, len(sequence.proposed), count)
            sequence.proposed = []
        self.metrics.accepted_tokens += sum(accepted.values())
        self.store.compact()
        return list(outputs.values())

    def _commit(self, sequence: _Sequence, count: int) -> None:
        """Record that the next `count` tokens of `sequence` are in the KV cache."""
        assert sequence.blocks is not None
        sequence.computed += count
        self.store.commit(sequence.blocks, sequence.tokens, sequence.computed)

    def _select(
        self, logits: Tensor, ready: Sequence[tuple[_Sequence, int]]
    ) -> list[tuple[int, Logprob | None]]:
        """Return the next token of each sequence from its row of `logits`, with the log-probability if requested."""
        rows = [row for _, row in ready]
        selected = logits if rows == list(range(len(logits))) else logits[rows]
        wanted = max(-1 if each.sampling.logprobs is None else each.sampling.logprobs for each, _ in ready)
        raw = selected.clone() if wanted >= 0 else None
        tokens = self._sampler.draw(selected, [each.draw for each, _ in ready if each.draw is not None])
        if raw is None:
            return [(token, None) for token in tokens]
        return list(zip(tokens, logprobs_of(raw, tokens, wanted), strict=True))

    def _extend(self, sequence: _Sequence, token: int, logprob: Logprob | None, now: float) -> Output:
        """Add a token to a sequence, and end the sequence if this is its last token."""
        sampling, text = sequence.sampling, ""
        prompt_logprobs = tuple(sequence.prompt_logprobs)
        sequence.prompt_logprobs = []
        if sequence.most == 0:
            self._remove(sequence, "length")
            return Output(
                sequence.request, sequence.choice, prompt_logprobs=prompt_logprobs, finish_reason="length"
            )
        sequence.tokens.append(token)
        self.metrics.generated_tokens += 1
        if sequence.last_token:
            self.metrics.between_tokens.observe(now - sequence.last_token)
        else:
            sequence.first_token = now
            self.metrics.first_token.observe(now - sequence.arrived)
        sequence.last_token = now
        offset = 0 if sequence.text is None else sequence.text.length
        reason = None
        if token in sequence.ends:
            reason = "stop"
        elif sequence.text is not None:
            text = sequence.text.add(token)
            if sequence.text.stopped:
                reason = "stop"
        if sequence.draw is not None and (matcher := sequence.draw.matcher) is not None:
            if matcher.add(token):
                reason = "stop"
            if matcher.error:
                log.error("the constraint of request %d failed: %s", sequence.request, matcher.error)
                reason = "error"
        if reason is None and sequence.generated == sequence.most:
            reason = "length"
        if reason is not None:
            if sequence.text is not None:
                text += sequence.text.finish()
                if sequence.text.stopped:
                    reason = "stop"
            self._remove(sequence, reason)
        if logprob is not None and sampling.logprobs is not None:
            logprob = Logprob(logprob.token, logprob.logprob, logprob.top[: sampling.logprobs])
        else:
            logprob = None
        return Output(
            sequence.request,
            sequence.choice,
            (token,),
            text,
            (offset,),
            () if logprob is None else (logprob,),
            prompt_logprobs,
            reason,
        )

    def _add_prompt_logprobs(self, sequence: _Sequence, span: Span, logits: Tensor) -> None:
        """Add log-probabilities of prompt tokens: row i of `logits` predicts the token after token i of `span`."""
        first = span.start + 1
        following = sequence.tokens[first : min(span.start + len(span.tokens) + 1, sequence.prompt)]
        if following:
            top = sequence.sampling.logprobs or 0
            sequence.prompt_logprobs += logprobs_of(logits[: len(following)], following, top)

    def _remove(self, sequence: _Sequence, reason: str) -> None:
        """Remove a running sequence, release its memory, and update the metrics."""
        assert sequence.blocks is not None and sequence.draw is not None
        self._running.remove(sequence)
        self.store.release(sequence.blocks)
        self._sampler.remove(sequence.draw)
        if self._speculator is not None and sequence.speculation is not None:
            self._speculator.remove(sequence.speculation)
        self._count_end(reason)
        if sequence.last_token:
            self.metrics.total_time.observe(sequence.last_token - sequence.arrived)
            if sequence.generated > 1:
                seconds = sequence.last_token - sequence.first_token
                self.metrics.per_output_token.observe(seconds / (sequence.generated - 1))

    def _count_end(self, reason: str) -> None:
        counts = self.metrics.requests
        counts[reason] = counts.get(reason, 0) + 1

    @staticmethod
    def _positions(prompt: int, most: int) -> int:
        """Return the number of KV cache positions of a sequence; the last generated token needs none."""
        return prompt + max(most - 1, 0)
