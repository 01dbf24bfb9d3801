"""Describe generation requests and their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

MAX_LOGPROBS = 20
MAX_CHOICES = 64
CONSTRAINTS = ("json_schema", "regex", "grammar")
"""The fields of `Sampling` that constrain the text; at most one may be set."""


class RequestError(ValueError):
    """Raised if a request cannot be served; `field` is the name of the invalid field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self._message = field, message

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return RequestError, (self.field, self._message)


def _all(kind: type, values: Iterable[object]) -> bool:
    return all(isinstance(value, kind) for value in values)


_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
_OPTIONAL = ("max_tokens", "logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class Sampling:
    """The parameters of a request: how tokens are selected, and when a sequence ends.

    The logits are processed in this order: logit_bias, repetition, presence and frequency penalties, minimum tokens,
    temperature, top_k, top_p, min_p.

    Args:
        max_tokens: the maximum number of generated tokens; None for as many as the context allows.
        min_tokens: the minimum number of tokens before an end-of-sequence token or a stop token can be generated.
        temperature: the sampling temperature; 0 selects the most likely token.
        top_k: the number of most likely tokens to sample from; 0 for all.  With ties, more tokens are kept.
        top_p: sample from the smallest set of most likely tokens whose total probability reaches `top_p`.
        min_p: the minimum probability of the tokens to sample from, relative to the probability of the most likely
            token.
        repetition_penalty: a number that divides the positive logits and multiplies the negative logits of tokens in
            the prompt or the output.
        presence_penalty, frequency_penalty: numbers that are subtracted from the logits of generated tokens:
            `presence_penalty` once per distinct token, and `frequency_penalty` once per occurrence.
        seed: with the same seed, a request gets the same tokens.
        n: the number of sequences to generate for the prompt.
        logprobs: the number of most likely tokens to report with log-probabilities; None for no log-probabilities.
            Log-probabilities describe the model's distribution, before any processing.
        prompt_logprobs: whether to report log-probabilities of the prompt's tokens.
        logit_bias: numbers that are added to the logits, keyed by token.
        stop: strings that end the sequence; they are not part of the returned text.
        stop_token_ids: tokens that end the sequence.
        ignore_eos: whether the sequence continues after the model's end-of-sequence tokens.
        json_schema: a JSON schema to which the text must conform.
        regex: a regular expression that the whole text must match.
        grammar: a grammar that the text must match, in llguidance's variant of Lark's syntax.  At most one of
            `json_schema`, `regex` and `grammar` is allowed.  A constrained text that reaches `max_tokens` can be
            incomplete.
        lora: the name of the LoRA adapter to apply; None for the base model.
        continues: whether the output continues the text of the prompt.  If the output starts a new text, such as a chat
            message, tokenizers such as SentencePiece remove the space before the first word of this text.

    Raises:
        RequestError: if a value is out of range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    json_schema: Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    lora: str | None = None
    continues: bool = True

    def __post_init__(self) -> None:
        for name in (*_INTEGERS, *_NUMBERS):
            kinds = int if name in _INTEGERS else int | float
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "an integer" if name in _INTEGERS else "a number"
                raise RequestError(name, f"expected {what}, got {value!r}")
        for name, low, high in (
            ("max_tokens", 0, math.inf),
            ("min_tokens", 0, math.inf),
            ("temperature", 0, 100),
            ("top_k", 0, 2**31 - 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("n", 1, MAX_CHOICES),
            ("logprobs", 0, MAX_LOGPROBS),
            ("seed", -(2**63), 2**64 - 1),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                limit = f"at least {low}" if high == math.inf else f"a value from {low} to {high}"
                raise RequestError(name, f"expected {limit}, got {value}")
        if not 0 < self.top_p <= 1:
            raise RequestError("top_p", f"expected a value above 0 and at most 1, got {self.top_p}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"expected at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        is_sequence = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        if not is_sequence or not all(isinstance(each, str) for each in self.stop):
            raise RequestError("stop", f"expected a list of strings, got {self.stop!r:.100}")
        if "" in self.stop:
            raise RequestError("stop", "expected non-empty strings, got an empty string")
        if not isinstance(self.stop_token_ids, Sequence | Set) or not _all(Integral, self.stop_token_ids):
            raise RequestError(
                "stop_token_ids", f"expected a list of tokens, got {self.stop_token_ids!r:.100}"
            )
        bias_of = self.logit_bias
        if (
            not isinstance(bias_of, Mapping)
            or not _all(Integral, bias_of)
            or not _all(Real, bias_of.values())
        ):
            raise RequestError(
                "logit_bias", f"expected a dict of numbers keyed by token, got {bias_of!r:.100}"
            )
        for token, bias in bias_of.items():
            if not -100 <= bias <= 100:
                raise RequestError(
                    "logit_bias", f"expected values from -100 to 100, got {bias} for token {token}"
                )

        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(given[1], f"expected one constraint, but {given[0]} is also set")
        if given and self.min_tokens:
            raise RequestError("min_tokens", f"not supported together with {given[0]}; omit one of them")
        if given and self.ignore_eos:
            raise RequestError("ignore_eos", f"not supported together with {given[0]}; omit one of them")
        for name in ("regex", "grammar", "lora"):
            if not isinstance(value := getattr(self, name), str | None):
                raise RequestError(name, f"expected text, got {value!r}")

    @property
    def is_constrained(self) -> bool:
        """Return whether a schema, a regular expression or a grammar limits the text."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    @property
    def has_penalties(self) -> bool:
        """Return whether any penalty is applied to the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, in nats.

    Args:
        token: the token.
        logprob: its log-probability.
        top: the most likely tokens with their log-probabilities, most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """The new tokens and the new text of one sequence in a step.

    Args:
        request: the request's number.
        choice: the index of the sequence in its request, from 0 to n - 1.
        tokens: the new tokens.
        text: the new text, which can lag behind the tokens.
        offsets: for each new token, the number of complete characters in the text before this token, including text
            that is held back.
        logprobs: the log-probabilities of each new token, if requested.
        prompt_logprobs: the log-probabilities of each token of the prompt except the first, in the first output of
            choice 0, if requested.
        finish_reason: "stop", "length", "cancelled" or "error" in the sequence's last output; otherwise None.
    """

    request: int
    choice: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    offsets: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None

    def joined(self, later: Output) -> Output:
        """Return one output that combines this output and a later output of the same sequence."""
        return replace(
            later,
            tokens=self.tokens + later.tokens,
            text=self.text + later.text,
            offsets=self.offsets + later.offsets,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
        )


@dataclass(frozen=True)
class Progress:
    """The state of a running sequence.

    Args:
        request: the request's number.
        choice: the index of the sequence in its request, from 0 to n - 1.
        prompt: the number of tokens in the prompt.
        generated: the number of generated tokens.
        most: the maximum number of generated tokens.
        stored: the number of the sequence's tokens in the KV cache.
        blocks: the indices of the sequence's blocks in the store.
    """

    request: int
    choice: int
    prompt: int
    generated: int
    most: int
    stored: int
    blocks: tuple[int, ...]
