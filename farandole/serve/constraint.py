"""Constrain generated text to a JSON schema, a regular expression or a grammar, with llguidance.

A grammar is compiled once.  Each sequence has its own matcher, which determines the permitted next tokens.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from farandole._extras import optional_import
from farandole.serve.request import CONSTRAINTS, RequestError, Sampling

log = logging.getLogger(__name__)

KEPT = 64
"""The maximum number of compiled grammars in the cache."""

LARGEST = 96
"""The maximum size of a grammar, in KiB.  The time to compile some larger grammars exceeds a minute."""

STACK = 512 << 20
"""The size in bytes of the stack on which grammars are compiled.

llguidance recurses along chains of rules and references, to a depth that the size of the grammar limits.  On a smaller
stack, a grammar of `LARGEST` KiB can end the process.  Only the pages of the stack that are used need memory.
"""

_stack_size_lock = threading.Lock()

# without a bound, a model can generate spaces until its context is full
SPACE = r"[\x20\x09]{1,4}|\x0A[\x20\x09]{0,32}"


class Matcher:
    """The state of a constraint in one sequence."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def add(self, token: int) -> bool:
        """Add a token, and return whether the text is complete and no token can follow."""
        self.core.consume_token(token)
        return bool(self.core.is_stopped())

    @property
    def error(self) -> str:
        """Return the reason why the matcher failed, or an empty string."""
        found: str = self.core.get_error()
        return found


class Grammars:
    """Compiles grammars for a tokenizer.

    Args:
        vocabulary: the number of logits.
        end_tokens: the tokens that may end a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer, self._ends = tokenizer, sorted(end_tokens)
        self._tokens: Any = None
        self._executor: Any = None
        self._new: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, sampling: Sampling) -> Matcher:
        """Return the matcher of a new sequence.

        Raises:
            RequestError: if the grammar is invalid or not supported, or accepts no text, or if llguidance does not
                support the tokenizer.
        """
        with self._lock:
            name, grammar = _grammar_of(sampling)
            if self._tokens is None:
                self._load(name)
            core = self._compiled.get(grammar)
        if core is None:  # compile without the lock, so that the engine's thread does not wait
            core = _on_large_stack(lambda: self._compile(name, grammar))
        with self._lock:
            core = self._compiled.setdefault(grammar, core)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return Matcher(core.deep_copy())

    def _compile(self, name: str, grammar: str) -> Any:
        """Return a new llguidance matcher, after a check that some token can begin a text."""
        core = self._new(self._tokens, grammar, log_level=0)
        if core.is_error():
            reason = " ".join(core.get_error().split())
            raise RequestError(name, f"expected a supported {name}: {reason}")
        first = core.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            reason = first.get_error().partition("\n")[0]
            raise RequestError(
                name,
                f"expected a {name} that some text matches, but no token can begin a matching text ({reason})",
            )
        return core

    def _load(self, name: str) -> None:
        """Load the tables of the vocabulary for a request with the field `name`."""
        # only for the first constrained request, because building the tables of a large vocabulary takes about 1 s
        import llguidance

        text = self._tokenizer.to_str()
        try:
            tokens = llguidance.LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._ends)
        except ValueError as error:
            raise RequestError(
                name, f"constraints do not support this model's tokenizer ({error}); omit {name}"
            ) from None
        self._new = llguidance.LLMatcher
        self._executor = llguidance.LLExecutor(num_threads=torch.get_num_threads())
        self._tokens = tokens

    def mask(self, logits: Tensor, rows: Sequence[int], matchers: Sequence[Matcher]) -> None:
        """For each row in `rows`, set logits to -inf for the tokens that the row's matcher does not permit."""
        words = -(-self._vocabulary // 32)
        bits = np.zeros((len(rows), words), np.int32)
        pairs = [(matcher.core, number) for number, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, 4 * words, len(rows))
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self._vocabulary]
        numbers = list(rows)
        logits[numbers] = logits[numbers].masked_fill(torch.from_numpy(allowed) == 0, -torch.inf)


def _on_large_stack(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, which runs in a new thread."""
    with ThreadPoolExecutor(1) as executor:
        with _stack_size_lock:
            before = threading.stack_size(STACK)
            try:
                result = executor.submit(function)  # starts the thread
            finally:
                threading.stack_size(before)
        return result.result()


def _grammar_of(sampling: Sampling) -> tuple[str, str]:
    """Return the name of the constraint's field in `sampling`, and the constraint as an llguidance grammar."""
    name = next(name for name in CONSTRAINTS if getattr(sampling, name) is not None)
    grammar = _converted(sampling)
    if len(grammar) > LARGEST << 10:
        raise RequestError(
            name, f"expected at most {LARGEST} KiB, got {len(grammar) / 1024:.1f} KiB; use a smaller {name}"
        )
    return name, grammar


def _converted(sampling: Sampling) -> str:
    with optional_import():
        from llguidance import LLMatcher

    grammar: str
    if sampling.regex is not None:
        grammar = LLMatcher.grammar_from_regex(sampling.regex)
    elif sampling.grammar is not None:
        grammar = LLMatcher.grammar_from_lark(sampling.grammar)
    else:
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(sampling.json_schema),
                overrides={"whitespace_pattern": SPACE, "whitespace_flexible": True},
            )
        except (TypeError, ValueError) as error:
            raise RequestError(
                "json_schema", f"expected a valid JSON schema; its conversion to a grammar failed: {error}"
            ) from None
    return grammar
