"""The options of the serving benchmark, checked before a server starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farandole.bench.options import PICTURES, BenchError, check_choice, check_output
from farandole.serve.folder import PRECISIONS

SCENARIOS = {"singlestream": "SingleStream", "offline": "Offline", "server": "Server"}
"""The names of the scenarios in this benchmark, mapped to their names in MLPerf."""


@dataclass(frozen=True)
class ServingSetup:
    """Options of the serving benchmark.

    Args:
        folder: the folder of the model that the benchmark serves, or None if `url` is given.
        url: the address of a running server, or None if `folder` is given.
        model: the name of the model on the server at `url`; None for the server's first model.
        api_key_file: a file with the API key for `url`.
        precision, max_running: the options of `farandole serve` for the model in `folder`.
        scenarios: the scenarios to measure, keys of `SCENARIOS`.
        requests: the number of requests per scenario.
        rate: the mean number of requests per second that arrive in the scenario `server`.
        burst: the number of requests that arrive at the same time in the scenario `server`.
        prompt_tokens, output_tokens: the minimum and maximum number of tokens per prompt and per output.
        ttft, tpot: the limits on the time to first token and the time per output token, in seconds.  The result of the
            scenario `server` is valid if the 99th percentiles do not exceed these limits.
        sequential: whether to measure the speed-up of concurrent requests over sequential requests.
    """

    folder: Path | None = None
    url: str | None = None
    model: str | None = None
    api_key_file: Path | None = None
    precision: str = "fp32"
    max_running: int = 16
    scenarios: tuple[str, ...] = ("offline",)
    requests: int = 32
    rate: float | None = None
    burst: int = 1
    prompt_tokens: tuple[int, int] = (8, 128)
    output_tokens: tuple[int, int] = (32, 128)
    seed: int = 0
    ttft: float = 2.0
    tpot: float = 0.1
    sequential: bool = False
    json: str | None = None
    picture: str | None = None

    def check(self) -> None:
        """Raise BenchError for options that are invalid or would have no effect."""
        if (self.folder is None) == (self.url is None):
            raise BenchError("expected either a FOLDER to serve or --url with the address of a server")
        if self.folder is not None and (self.model or self.api_key_file):
            raise BenchError("--model and --api-key-file need --url")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise BenchError(f"--url {self.url}: expected an address that starts with http:// or https://")
        check_choice("--precision", self.precision, PRECISIONS)
        for name in self.scenarios:
            check_choice("--scenario", name, SCENARIOS)
        if (self.rate is None) == ("server" in self.scenarios):
            raise BenchError(
                "--scenario server and --rate require each other: pass both, as in --scenario server --rate 2, or omit both"
            )
        for option, number in (
            ("--requests", self.requests),
            ("--max-running", self.max_running),
            ("--burst", self.burst),
        ):
            if number < 1:
                raise BenchError(f"{option}: expected at least 1, got {number}")
        if self.rate is not None and self.rate <= 0:
            raise BenchError(f"--rate: expected a positive number of requests per second, got {self.rate:g}")
        if self.burst > 1 and self.rate is None:
            raise BenchError(f"--burst {self.burst} needs --scenario server")
        check_output("--json", self.json)
        check_output("--picture", self.picture, PICTURES)


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Parse a range of token counts such as 8:128, or one number such as 64.

    Returns:
        The smallest and the largest number of tokens.

    Raises:
        BenchError: if `text` does not have this format; the message names `option`.
    """
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise BenchError(f"{option}: expected token counts such as 64 or 8:128, got {text!r}")
    return found
