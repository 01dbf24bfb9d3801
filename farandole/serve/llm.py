"""Generate text offline, for many prompts at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from farandole.data.errors import DataError
from farandole.serve.engine import GenerationEngine
from farandole.serve.folder import find_model
from farandole.serve.ranks.offline import ranks_for
from farandole.serve.request import Logprob, Output, RequestError, Sampling
from farandole.serve.speculation.draft import read_draft

Prompt = str | Sequence[int]
"""A prompt, as text or as tokens."""


@dataclass
class Completion:
    """One generated sequence.

    Args:
        text: the text, without stop strings.
        tokens: the generated tokens.
        finish_reason: "stop" or "length".
        logprobs: the log-probabilities of each token, if requested.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[Logprob] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Append an output of the engine."""
        self.text += output.text
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason or self.finish_reason


@dataclass
class Generation:
    """The result for one prompt.

    Args:
        prompt_tokens: the prompt's tokens.
        completions: the `n` generated sequences.
        prompt_logprobs: the log-probabilities of each token of the prompt except the first, if requested.
    """

    prompt_tokens: list[int]
    completions: list[Completion]
    prompt_logprobs: list[Logprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text of the first sequence."""
        return self.completions[0].text


class LLM:
    """A language model for offline generation.

        llm = farandole.LLM("runs")
        for result in llm.generate(["def", "class"], max_tokens=20, temperature=0):
            print(result.text)

    With `tensor` above 1, the model is sharded across several ranks.  Without a launcher, this process is rank 0 and
    starts the other ranks, which exit when this process exits or calls `close`.  While the other ranks exist, this
    process uses as many threads as each of the other ranks (`torch.set_num_threads`).

    Several streams can be open at the same time; their sequences share batches.  Only one thread at a time may call
    the LLM.

    Under a launcher, all ranks of the job run the same program, and must call the constructor, `generate`, `stream`
    and `close`.  These calls use the prompts and parameters of rank 0, and return the results on every rank.

    Args:
        folder: a Hugging Face folder, a checkpoint, a run, or a folder of runs.
        tensor: the number of tensor-parallel ranks.
        precision: "fp32" or "bf16".
        weights: "int8" to compute products with int8 weights, or "" to compute with weights in `precision`; see
            `Runner`.
        context: the maximum number of tokens in a sequence, by default the model's context length.
        chat_template: a file with a chat template, or "chatml"; by default the model's own template.
        draft: the folder of a draft model, for speculate="draft".
        lora: the folders of the LoRA adapters, keyed by name.  A prompt selects an adapter with the field `lora` of
            `Sampling`.
        options: other arguments of `GenerationEngine`, such as max_running=32.

    Raises:
        FolderError, CheckpointError, DataError: if a file is missing or damaged, or the model is not supported.
        RequestError: if an argument is invalid.
        LaunchError: if a rank cannot be started.
    """

    engine: GenerationEngine
    """The engine, on rank 0."""

    def __init__(
        self,
        folder: str | Path,
        *,
        tensor: int = 1,
        precision: str = "fp32",
        weights: str = "",
        context: int | None = None,
        chat_template: str = "",
        draft: str | Path | None = None,
        lora: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        self._results: dict[int, Generation] = {}  # of all open streams, by request number
        self._unfinished: dict[int, int] = {}  # the number of incomplete sequences
        self._ranks = ranks_for(tensor)
        found = self._ranks.read(
            find_model(folder),
            precision=precision,
            weights=weights,
            context=context,
            template=chat_template,
            lora=lora,
        )
        self.tokenizer, self._found = found.tokenizer, found
        runner = self._ranks.runner(found)
        if runner is not None:
            self.engine = GenerationEngine(
                runner,
                context=found.context,
                tokenizer=found.tokenizer,
                end_tokens=found.end_tokens,
                draft=None if draft is None else read_draft(draft, found, precision),
                **options,
            )

    @property
    def rank(self) -> int:
        """Return the rank of this process, 0 without a launcher."""
        return self._ranks.rank

    def close(self) -> None:
        """Stop the other ranks, if any.  Afterwards, the LLM can no longer generate.

        Under a launcher, the other ranks wait in this method until rank 0 calls it.
        """
        self._ranks.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            RequestError: if the prompt is not text or a sequence of integers.
        """
        if isinstance(prompt, str):
            tokens: list[int] = self.tokenizer.encode(prompt).ids
            return tokens
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError("prompt", f"expected text or a list of tokens, got {prompt!r:.100}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the tokens of a conversation, up to the start of the assistant's next message.

        To generate this message, pass `continues=False` to `generate` or `stream`.

        Args:
            variables: further variables of the chat template, such as `enable_thinking=False`.

        Raises:
            DataError: if the model has no chat template, or the template rejects the messages.
        """
        if self._found.template is None:
            raise DataError(self._found.no_template)
        text = self._found.template.render(messages, prompt=True, **variables)
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, **parameters: Any
    ) -> list[Generation]:
        """Return the results for all prompts, in order.

        Args:
            prompts: text or tokens.
            sampling: the sampling parameters; alternatively, pass the fields of `Sampling` as keyword arguments.

        Raises:
            RequestError: if `prompts` is one prompt instead of a list, a prompt is too long, or a parameter is out of
                range.  In this case, no text is generated.
            TypeError: if both `sampling` and its fields are given.
            RanksFailed: if a rank fails; the message names the rank.  A new LLM must then be created.
        """
        return list(self.stream(prompts, sampling, **parameters))

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: Callable[[Sequence[Output]], None] | None = None,
        **parameters: Any,
    ) -> Iterator[Generation]:
        """Yield the results in the order of the prompts, without waiting for later results.

        Args:
            sampling: the sampling parameters of all prompts, or a sequence with the parameters of each prompt.
            progress: a callback that receives the outputs of each step, on rank 0.

        Raises:
            TypeError: if both `sampling` and its fields are given.
            RequestError, RanksFailed: as for `generate`.
        """
        if sampling is not None and parameters:
            raise TypeError("expected either sampling or its fields, got both")
        each = (
            sampling
            if isinstance(sampling, Sequence)
            else [sampling or Sampling(**parameters)] * len(prompts)
        )
        if self.rank:
            yield from self._received()
            return
        results = self._generated(prompts, each, progress)
        while True:
            found: Generation | RequestError | None
            with self._ranks.computing():
                try:
                    found = next(results, None)
                except RequestError as error:  # no step has been computed
                    found = error
            self._ranks.share(found)
            if found is None:
                return
            if isinstance(found, RequestError):
                raise found
            yield found

    def _received(self) -> Iterator[Generation]:
        """Run steps together with rank 0, and yield the results that rank 0 sends."""
        while (found := self._ranks.receive()) is not None:
            if isinstance(found, RequestError):
                raise found
            yield found

    def _generated(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[Sampling],
        progress: Callable[[Sequence[Output]], None] | None,
    ) -> Iterator[Generation]:
        """Yield the results of `stream`, on rank 0."""
        if isinstance(prompts, str) or any(isinstance(prompt, Integral) for prompt in prompts):
            raise RequestError("prompts", f"expected a list of prompts, got {prompts!r:.100}; write [prompt]")
        encoded = []
        for number, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                encoded.append(self.encode(prompt))
                self.engine.check(encoded[-1], own)
            except RequestError as error:
                raise RequestError(
                    f"prompts[{number}], {error.field}", str(error).partition(": ")[2]
                ) from None
        results, unfinished = self._results, self._unfinished
        order: list[int] = []
        next_prompt = next_result = 0
        ahead = min(self.engine.max_running, self.engine.max_waiting)
        try:
            while next_result < len(encoded):
                while next_prompt < len(encoded):
                    own = each[next_prompt]
                    if self.engine.waiting and self.engine.waiting + own.n > ahead:
                        break
                    number = self.engine.add(encoded[next_prompt], own)
                    results[number] = Generation(encoded[next_prompt], [Completion() for _ in range(own.n)])
                    unfinished[number] = own.n
                    order.append(number)
                    next_prompt += 1
                while next_result < len(order) and unfinished[order[next_result]] == 0:
                    yield results.pop(order[next_result])
                    next_result += 1
                if next_result < len(encoded):
                    outputs = self.engine.step()
                    for output in outputs:  # some may belong to another open stream
                        result = results[output.request]
                        result.completions[output.choice].add(output)
                        result.prompt_logprobs += output.prompt_logprobs
                        unfinished[output.request] -= output.finish_reason is not None
                    if progress is not None:
                        progress(outputs)
        finally:
            for number in order:
                if results.pop(number, None) is not None:
                    self.engine.cancel(number)
                del unfinished[number]
