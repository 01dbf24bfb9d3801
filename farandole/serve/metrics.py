"""Collect counters and histograms, and write them in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STEPS = (1.0, 2.0, 3.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0)


class Histogram:
    """A histogram, which counts observations in buckets.

    Args:
        bounds: the upper bounds of the buckets, in ascending order.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True)
class Family:
    """The values of one metric.

    Args:
        kind: "counter", "gauge" or "histogram".
        values: (suffix, value) pairs.  The suffix, such as `_count` or `{reason="stop"}`, is appended to `name`.
        adds: whether the values of several engines can be added.
    """

    name: str
    kind: str
    help: str
    values: Sequence[tuple[str, float]]
    adds: bool = True


class Metrics:
    """The metrics of an engine.  Times are in seconds."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.refused = 0
        self.prompt_tokens = self.shared_tokens = self.generated_tokens = 0
        self.proposed_tokens = self.accepted_tokens = 0
        self.steps = 0
        self.step_time, self.model_time, self.proposal_time = 0.0, 0.0, 0.0
        self.queue_time, self.fusion_delay = Histogram(), Histogram(STEPS)
        self.first_token, self.between_tokens = Histogram(), Histogram()
        self.per_output_token, self.total_time = Histogram(), Histogram()

    def families(
        self,
        *,
        running: int,
        waiting: int,
        used: int,
        capacity: int,
        moves: int,
        limit: int,
        step: tuple[float, float, float],
    ) -> list[Family]:
        """Return all metrics.

        Args:
            running, waiting: the numbers of running and waiting sequences.
            used, capacity: the number of used token positions in the KV cache, and the total number.
            moves: the number of times that a sequence was moved in the KV cache.
            limit: the current maximum number of running sequences.
            step: the coefficients of `admission.StepTimes`.
        """
        found: list[Family] = []

        def add(
            name: str, kind: str, help_: str, values: Sequence[tuple[str, float]], *, adds: bool = True
        ) -> None:
            found.append(Family(name, kind, help_, values, adds))

        def one(name: str, kind: str, help_: str, value: float) -> None:
            add(name, kind, help_, [("", value)])

        one("requests_running", "gauge", "Sequences in the running batch.", running)
        one(
            "requests_running_limit",
            "gauge",
            "Largest number of running sequences that meets the latency target.",
            limit,
        )
        one("requests_waiting", "gauge", "Sequences that wait to join the running batch.", waiting)
        one("kv_positions_used", "gauge", "Used token positions in the KV cache.", used)
        one("kv_positions_capacity", "gauge", "Capacity of the KV cache in token positions.", capacity)
        one("compaction_moves_total", "counter", "Sequences moved to close gaps in the KV cache.", moves)
        one("prompt_tokens_total", "counter", "Prompt tokens computed.", self.prompt_tokens)
        one(
            "shared_tokens_total",
            "counter",
            "Prompt tokens found in shared pages of the KV cache.",
            self.shared_tokens,
        )
        one("generated_tokens_total", "counter", "Tokens generated.", self.generated_tokens)
        one(
            "proposed_tokens_total",
            "counter",
            "Tokens proposed by speculative decoding.",
            self.proposed_tokens,
        )
        one("accepted_tokens_total", "counter", "Proposed tokens that were accepted.", self.accepted_tokens)
        one("steps_total", "counter", "Steps of the engine.", self.steps)
        one("step_seconds_total", "counter", "Time in steps of the engine.", self.step_time)
        one(
            "model_seconds_total",
            "counter",
            "Time in the model, included in step_seconds_total.",
            self.model_time,
        )
        one(
            "proposal_seconds_total",
            "counter",
            "Time spent proposing tokens for speculative decoding, included in step_seconds_total.",
            self.proposal_time,
        )
        add(
            "step_model_seconds",
            "gauge",
            "Fitted time of a step, per term.",
            [
                (f'{{term="{term}"}}', seconds)
                for term, seconds in zip(("base", "decode", "prompt_token"), step, strict=True)
            ],
            adds=False,
        )
        one(
            "requests_refused_total",
            "counter",
            "Requests refused because the queue was full or the latency target would be missed.",
            self.refused,
        )
        add(
            "sequences_finished_total",
            "counter",
            "Finished sequences, by reason.",
            [(f'{{reason="{reason}"}}', count) for reason, count in sorted(self.requests.items())],
        )
        for name, help_, histogram in (
            ("queue_seconds", "Time from arrival to the first step.", self.queue_time),
            ("fusion_delay_steps", "Steps from arrival to the first step of a sequence.", self.fusion_delay),
            ("time_to_first_token_seconds", "Time from arrival to the first token.", self.first_token),
            ("inter_token_latency_seconds", "Time between consecutive tokens.", self.between_tokens),
            (
                "time_per_output_token_seconds",
                "Mean time per token after the first.",
                self.per_output_token,
            ),
            ("request_seconds", "Time from arrival to the last token.", self.total_time),
        ):
            total, values = 0, []
            bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
            for bound, count in zip(bounds, histogram.counts, strict=True):
                total += count
                values.append((f'_bucket{{le="{bound}"}}', float(total)))
            values += [("_sum", histogram.sum), ("_count", float(total))]
            add(name, "histogram", help_, values)
        return found


def prometheus_text(families: Iterable[Family]) -> str:
    """Return metrics in Prometheus' text format."""
    lines: list[str] = []
    for family in families:
        name = f"farandole_{family.name}"
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        lines += [f"{name}{end} {value:.17g}" for end, value in family.values]
    return "\n".join(lines) + "\n"


def of_replicas(replicas: Sequence[Sequence[Family]]) -> list[Family]:
    """Return the metrics summed over all replicas, followed by the metrics of each replica.

    Metrics whose values cannot be added have no sum.  The metrics of a replica have the prefix `replica_` and the label
    `replica`.
    """
    sums, own = [], []
    for alike in zip(*replicas, strict=True):
        first = alike[0]
        total: dict[str, float] = {}
        labeled = []
        for number, family in enumerate(alike):
            for end, value in family.values:
                total[end] = total.get(end, 0.0) + value
                labeled.append((_with_label(end, f'replica="{number}"'), value))
        if first.adds:
            sums.append(Family(first.name, first.kind, first.help, list(total.items())))
        own.append(Family(f"replica_{first.name}", first.kind, first.help, labeled))
    return [*sums, *own]


def _with_label(end: str, label: str) -> str:
    """Add a label to `end`, the suffix of a metric's name."""
    return f"{end[:-1]},{label}}}" if end.endswith("}") else f"{end}{{{label}}}"
