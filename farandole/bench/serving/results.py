"""Summarize the samples of a scenario, and report them together with the lower bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from farandole.bench.serving.client import Sample
from farandole.bench.serving.limit import Limit
from farandole.bench.serving.setup import SCENARIOS, ServingSetup

TIMES = {
    "ttft_s": "time to first token (ms)",
    "tpot_s": "time per output token (ms)",
    "itl_s": "inter-token latency (ms)",
    "latency_s": "request latency (ms)",
}
"""The times of a summary, with their names in the table."""
RATES = {"output_tokens_per_s": "output tokens/s", "requests_per_s": "requests/s"}
"""The rates of a summary, with their names in the table."""
_NAME, _CELL = 28, 11

Summary = dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile `percent` (from 0 to 100) of `values`, computed by the nearest-rank method."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def summarize(scenario: str, samples: Sequence[Sample], setup: ServingSetup, limit: Limit | None) -> Summary:
    """Return the counts, the percentiles of the times, and the rates of a scenario, as a JSON-serializable dict.

    If `limit` is not None, the dict also contains the bounds on the times and the rates.
    """
    complete = [sample for sample in samples if sample.is_complete]
    seconds = max(sample.end for sample in samples) - min(sample.arrival for sample in samples)
    summary: Summary = {
        "scenario": scenario,
        "requests": len(samples),
        "complete": len(complete),
        "refused": sum(sample.refused for sample in samples),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "seconds": seconds,
        "prompt_tokens": sum(sample.prompt_tokens for sample in complete),
        "output_tokens": sum(sample.output_tokens for sample in complete),
        "text_parts": sum(len(sample.texts) for sample in complete),
        "samples": [_values(sample) for sample in samples],
    }
    summary["output_tokens_per_s"] = summary["output_tokens"] / seconds
    summary["requests_per_s"] = len(complete) / seconds
    for name in TIMES:
        values = [value for sample in complete for value in _times(sample)[name]]
        if values:
            summary[name] = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    if limit is not None and complete:
        summary["limit"] = _limits(scenario, complete, setup, limit)
    summary["mlperf"] = _mlperf(summary, setup)
    return summary


def _times(sample: Sample) -> dict[str, list[float]]:
    return {
        "ttft_s": [sample.ttft],
        "tpot_s": [] if sample.tpot is None else [sample.tpot],
        "itl_s": sample.gaps,
        "latency_s": [sample.latency],
    }


def _values(sample: Sample) -> dict[str, Any]:
    if not sample.is_complete:
        return {"refused": sample.refused, "error": sample.error}
    counts = {"prompt_tokens": sample.prompt_tokens, "output_tokens": sample.output_tokens}
    return {**counts, **_times(sample), "refused": False, "error": None}


def _limits(scenario: str, complete: Sequence[Sample], setup: ServingSetup, limit: Limit) -> dict[str, float]:
    """Return lower bounds on the median times, and upper bounds on the rates of the scenario."""
    lengths = [(sample.prompt_tokens, sample.output_tokens) for sample in complete]
    seconds = limit.total_s(lengths, 1 if scenario == "singlestream" else setup.max_running)
    return {
        "ttft_s": percentile([limit.first_token_s(prompt) for prompt, _ in lengths], 50),
        "tpot_s": limit.step_s,
        "itl_s": limit.step_s,
        "latency_s": percentile([limit.latency_s(*each) for each in lengths], 50),
        "output_tokens_per_s": sum(output for _, output in lengths) / seconds,
        "requests_per_s": len(lengths) / seconds,
    }


def _mlperf(summary: Summary, setup: ServingSetup) -> str:
    """Return a line with the result of the scenario in the metric of MLPerf Inference."""
    name = SCENARIOS[summary["scenario"]]
    if summary["complete"] < summary["requests"]:
        return f"{name}: invalid, because not all requests are complete"
    if summary["scenario"] == "singlestream":
        return (
            f"{name}: {1e3 * summary['latency_s']['p90']:.4g} ms, the 90th percentile of the request latency"
        )
    if summary["scenario"] == "offline":
        return f"{name}: {summary['requests_per_s']:.4g} samples/s"
    ttft, tpot = summary["ttft_s"]["p99"], summary.get("tpot_s", {"p99": 0.0})["p99"]
    is_valid = ttft <= setup.ttft and tpot <= setup.tpot
    return (
        f"{name}: {summary['requests_per_s']:.4g} requests/s, {'valid' if is_valid else 'invalid'}: 99th percentiles "
        f"{1e3 * ttft:.4g} ms to the first token (limit {1e3 * setup.ttft:g}) and {1e3 * tpot:.4g} ms per output token "
        f"(limit {1e3 * setup.tpot:g})"
    )


def report(summary: Summary) -> str:
    """Format the summary of a scenario as the text of the report."""
    limits = summary.get("limit", {})
    errors = sum(summary["errors"].values())
    lines = [
        f"# {summary['scenario']}: {summary['complete']} of {summary['requests']} requests complete, "
        f"{summary['refused']} refused (429), {errors} failed, in {summary['seconds']:.2f} s"
    ]
    lines += [f"# {count} failed: {error}" for error, count in summary["errors"].items()]
    if summary["text_parts"] < 0.9 * summary["output_tokens"]:
        lines.append(
            f"# {summary['output_tokens']} tokens arrived in {summary['text_parts']} parts: times of single tokens are "
            "inexact, because a part may contain several tokens"
        )
    if summary["complete"]:
        lines.append(_line("", ["median", "p90", "p99", *(["limit"] if limits else [])]))
        for key, title in TIMES.items():
            if key in summary:
                values = [*summary[key].values(), *([limits[key]] if limits else [])]
                lines.append(_line(title, [f"{1e3 * value:.2f}" for value in values]))
        lines.append(_line("", ["measured", *(["limit", "of limit"] if limits else [])]))
        for key, title in RATES.items():
            cells = [f"{summary[key]:.2f}"]
            cells += [f"{limits[key]:.2f}", f"{summary[key] / limits[key]:.0%}"] if limits else []
            lines.append(_line(title, cells))
    if limits and summary["output_tokens_per_s"] > limits["output_tokens_per_s"]:
        lines.append(
            "# the throughput is above the limit, because other programs slowed the measurement of this machine's "
            "speeds; repeat when the machine is idle"
        )
    return "\n".join([*lines, f"MLPerf {summary['mlperf']}"])


def report_speed_up(rows: Sequence[Summary]) -> str:
    """Format a table that compares sequential and concurrent requests, with one line per number of requests."""
    lines = ["# total time of sequential and of concurrent requests"]
    has_limit = "limit_s" in rows[0]
    heads = ["sequential", "concurrent", *(["limit"] if has_limit else []), "speed-up"]
    lines.append(_line("requests", heads))
    for row in rows:
        times = [row["sequential_s"], row["concurrent_s"], *([row["limit_s"]] if has_limit else [])]
        cells = [*(f"{value:.2f} s" for value in times), f"{row['speed_up']:.2f}x"]
        lines.append(_line(str(row["requests"]), cells))
    return "\n".join(lines)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<{_NAME}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
