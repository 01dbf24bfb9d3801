"""Limit the number of running sequences and of prompt tokens per step to meet target latencies.

The duration of a step is modeled as

    seconds = base + per_decode * decodes + per_prompt_token * prompt tokens

The three coefficients are fitted to the measurements of all steps.  In addition, all three are scaled by a factor that
is fitted to the last few steps, because the whole machine becomes slower or faster when other processes start or end.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from farandole.serve.request import RequestError

MARGIN = 0.9
"""The fraction of a target step duration that a predicted duration may reach."""
MIN_PROMPT_TOKENS = 16
"""The number of prompt tokens that a step may always compute, so that no prompt waits forever."""
FIRST_RUNNING = 4
"""The maximum number of running sequences before the first measured step."""
_SHORTEST_S = 1e-12  # the time of a token is never zero, even if the fit is
_SCALE = np.array((1.0, 16.0, 256.0))  # makes the three terms of similar size


@dataclass(frozen=True)
class Target:
    """Target latencies of an engine, in seconds; None for no target.

    Args:
        ttft: the time from the arrival of a request to its first token.
        tpot: the mean time per token after the first.

    Raises:
        RequestError: if a target is not a positive, finite number.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(name, f"expected a positive, finite time, got {value} s")

    @property
    def step(self) -> float:
        """Return the maximum duration in seconds of a step in which sequences decode."""
        return min(math.inf if self.tpot is None else self.tpot, self.first_step)

    @property
    def first_step(self) -> float:
        """Return the maximum duration in seconds of any step: half of `ttft`.

        A new request waits for the end of the current step, and its prompt then needs another step.
        """
        return math.inf if self.ttft is None else self.ttft / 2


class StepTimes:
    """Estimates the durations of steps by recursive least squares, with constant memory.

    Old measurements are forgotten only in the direction of a new measurement, so steps without prompts do not change
    the coefficient for prompts.  Errors are relative to the predicted time.  Coefficients are never negative.  Before a
    measurement is added, all coefficients are multiplied by 1 + speed x (measured / predicted - 1), to follow the
    machine's speed.  In a least-squares fit, the mean of measured / predicted is 1, so the mean of this factor is 1,
    too.  Otherwise, coefficients that the measurements do not determine would drift.

    L. Cao and H. Schwartz, "A directional forgetting algorithm based on the decomposition of the information matrix",
    Automatica 36 (2000).

    Args:
        forgetting: the factor by which a new measurement multiplies the weight of old measurements in its direction.
        speed: the weight of a new measurement in the estimate of the machine's speed.
    """

    def __init__(self, forgetting: float = 0.95, speed: float = 0.2) -> None:
        self._forgetting = forgetting
        self._speed = speed
        self._solution = np.zeros(3)  # the least-squares solution, which may be negative
        self._information = np.zeros((3, 3))
        self._constrained = np.zeros(3)
        self._steps = 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Return `base`, `per_decode` and `per_prompt_token` in seconds."""
        base, per_decode, per_prompt_token = (self._constrained / _SCALE).tolist()
        return base, per_decode, per_prompt_token

    def predict(self, decodes: float, prompt_tokens: float) -> float:
        """Return the predicted duration of a step in seconds; 0 before the first measurement."""
        return float(self._constrained @ ((1.0, decodes, prompt_tokens) / _SCALE))

    def add(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Update the coefficients with the measured duration of a step.  A duration of 0 is ignored."""
        if seconds <= 0:
            return
        if self._steps >= 20 and (predicted := self.predict(decodes, prompt_tokens)):
            # a single pause of the machine must not dominate the estimate
            seconds = min(max(seconds, predicted / 4), predicted * 4)
            self._multiply(1 + self._speed * (seconds / predicted - 1))
        predicted = max(self.predict(decodes, prompt_tokens), seconds / 4)
        row = (1.0, decodes, prompt_tokens) / _SCALE / predicted
        if not self._steps:
            self._information = 1e-6 * row.max() ** 2 * np.eye(3)
        try:
            with np.errstate(divide="raise", invalid="raise", over="raise"):
                self._update(row, seconds / predicted)
            self._steps += 1
        except (ArithmeticError, np.linalg.LinAlgError):
            self._restart()

    def _update(self, row: np.ndarray, measured: float) -> None:
        """Add a measurement; `row` and `measured` are relative to the predicted duration."""
        known = self._information @ row
        information = self._information - (1 - self._forgetting) / (row @ known) * np.outer(known, known)
        information += np.outer(row, row)
        error = measured - row @ self._solution
        solution = self._solution + np.linalg.solve(information, row) * error
        self._constrained = _nonnegative(information, solution)
        self._information, self._solution = information, solution

    def _restart(self) -> None:
        """Discard the measurements, which no longer determine a solution, but keep the coefficients."""
        if not np.isfinite(self._constrained).all():
            self._constrained = np.zeros(3)
        self._solution, self._steps = self._constrained.copy(), 0

    def _multiply(self, factor: float) -> None:
        """Multiply all coefficients by `factor`, and rescale the earlier measurements accordingly."""
        self._solution, self._constrained = factor * self._solution, factor * self._constrained
        self._information /= factor**2


def _nonnegative(information: np.ndarray, solution: np.ndarray) -> np.ndarray:
    """Return the least-squares solution without negative coefficients."""
    if solution.min() >= 0:
        return solution
    # in lists, because numpy's calls take longer than the arithmetic on three coefficients
    matrix, right = information.tolist(), (information @ solution).tolist()
    best, least = np.zeros(3), math.inf
    for candidate in _partial_solutions(matrix, right):
        # the error minus a constant: x^T A x - 2 x^T A s
        cost = sum(
            value * (sum(map(operator.mul, row, candidate)) - 2 * wanted)
            for value, row, wanted in zip(candidate, matrix, right, strict=True)
        )
        if min(candidate) >= 0 and cost < least:
            best, least = np.array(candidate), cost
    return best


def _partial_solutions(matrix: list[list[float]], right: list[float]) -> Iterator[list[float]]:
    """Yield the least-squares solution for each choice of one or two nonzero coefficients."""
    for i in range(3):
        candidate = [0.0, 0.0, 0.0]
        candidate[i] = right[i] / matrix[i][i]
        yield candidate
    for i, j in ((0, 1), (0, 2), (1, 2)):
        determinant = matrix[i][i] * matrix[j][j] - matrix[i][j] * matrix[j][i]
        candidate = [0.0, 0.0, 0.0]
        candidate[i] = (right[i] * matrix[j][j] - right[j] * matrix[i][j]) / determinant
        candidate[j] = (right[j] * matrix[i][i] - right[i] * matrix[j][i]) / determinant
        yield candidate


class Rate:
    """A ratio of two sums whose old terms decay exponentially.

    Args:
        numerator, denominator: the initial terms, which determine the ratio until there are measurements.
        forgetting: the factor by which each new term multiplies the weights of earlier terms.
    """

    def __init__(self, numerator: float, denominator: float, forgetting: float) -> None:
        self._numerator, self._denominator, self._forgetting = numerator, denominator, forgetting

    def add(self, numerator: float, denominator: float) -> None:
        """Decrease the weight of earlier terms, and add a new term to each sum."""
        self._numerator = self._forgetting * self._numerator + numerator
        self._denominator = self._forgetting * self._denominator + denominator

    @property
    def value(self) -> float:
        """Return the ratio."""
        return self._numerator / self._denominator


class Admission:
    """Limits the number of running sequences and the number of prompt tokens in a step.

    With target latencies, each limit is at most twice the largest number in any step so far.

    Args:
        target: the target latencies.
        max_running: the maximum number of running sequences.
        token_budget: the maximum number of tokens per step.
    """

    def __init__(self, target: Target, max_running: int, token_budget: int) -> None:
        self.target, self._max_running, self._token_budget = target, max_running, token_budget
        self.times = StepTimes()
        self._most_decodes, self._most_prompt_tokens = FIRST_RUNNING / 2, MIN_PROMPT_TOKENS / 2
        self._seconds_per_end = Rate(1.0, 1.0, 0.999)
        self._prompt_per_token = Rate(1.0, 1.0, 0.999)

    def observe(
        self, decodes: int, prompt_tokens: int, seconds: float, *, selected: int = 0, ended: int = 0
    ) -> None:
        """Update the estimates with the measurements of a step.

        Args:
            decodes: the number of tokens computed for decoding sequences, including proposed tokens.
            prompt_tokens: the number of prompt tokens.
            seconds: the duration of the step.
            selected: the number of sequences for which a token was selected.
            ended: the number of sequences that ended.
        """
        self.times.add(decodes, prompt_tokens, seconds)
        self._most_decodes = max(self._most_decodes, decodes)
        self._most_prompt_tokens = max(self._most_prompt_tokens, prompt_tokens)
        self._seconds_per_end.add(seconds, ended)
        self._prompt_per_token.add(prompt_tokens, selected)

    @property
    def max_running(self) -> int:
        """Return the maximum number of running sequences, at least 1.

        The limit assumes that each running sequence decodes one token per step, and reserves time for the prompts of
        new sequences.
        """
        step = MARGIN * self.target.step
        if step == math.inf:
            return self._max_running
        base, per_decode, per_prompt_token = self.times.coefficients
        each = per_decode + per_prompt_token * self._prompt_per_token.value
        fits = (step - base) / max(each, _SHORTEST_S)
        return max(1, int(min(self._max_running, 2 * self._most_decodes, fits)))

    def prompt_budget(self, decodes: int) -> int:
        """Return the maximum number of prompt tokens in a step that also decodes `decodes` tokens."""
        most = self._token_budget - decodes
        step = MARGIN * (self.target.step if decodes else self.target.first_step)
        if step == math.inf:
            return most
        base, per_decode, per_prompt_token = self.times.coefficients
        fits = (step - base - per_decode * decodes) / max(per_prompt_token, _SHORTEST_S)
        return min(most, max(MIN_PROMPT_TOKENS, int(min(2 * self._most_prompt_tokens, fits))))

    def proposal_budget(self, decodes: int) -> int:
        """Return the maximum number of proposed tokens to verify in a step with `decodes` decoding sequences.

        At least half of the remaining token budget is reserved for prompts.
        """
        most = max(self._token_budget - decodes, 0) // 2
        step = MARGIN * self.target.step
        if step == math.inf:
            return most
        base, per_decode, _ = self.times.coefficients
        fits = (step - base - per_decode * decodes) / max(per_decode, _SHORTEST_S)
        return max(0, int(min(most, 2 * self._most_decodes, fits)))

    def until_ended(self, sequences: int) -> float:
        """Return the predicted seconds until `sequences` sequences have ended."""
        return max(sequences, 0) * self._seconds_per_end.value

    def until_computed(self, prompt_tokens: int, decodes: int) -> float:
        """Return the predicted seconds to compute prompt tokens in steps with `decodes` decoding sequences."""
        steps = math.ceil(prompt_tokens / max(self.prompt_budget(decodes), 1))
        return steps * self.times.predict(decodes, prompt_tokens / steps) if steps else 0.0
