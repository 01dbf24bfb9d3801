"""Compare language-model training with farandole, a plain loop, the Hugging Face Trainer, and Accelerate.

    python -m benchmarks.language [--model gpt2|llama] [--ranks 1|2] [--rounds 5] [--save]

The models are GPT-2 (124 M parameters) and a Llama (about 100 M parameters).  All implementations train the same
initial weights, which `transformers` has written, on the same tokens, with gradient clipping and AdamW (fused, except
with FSDP2).  The ranks share the cores equally.  The implementations alternate after each step; while one trains, the
others wait without computing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from benchmarks.measure import RESULTS, records_table, save

ONE = ("farandole", "plain loop", "trainer")
ALONE = "farandole without communication"
"""Each rank trains its own samples with the complete optimizer: the limit for "farandole"."""
TWO = ("farandole", "farandole zero=2", "farandole zero=3", ALONE, "accelerate ddp", "accelerate fsdp2")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama": (
        "Llama",
        {
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 10,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
}


class Implementation:
    """The processes of one implementation."""

    def __init__(self, name: str, folder: Path, ranks: int, options: argparse.Namespace) -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        cores = os.cpu_count() or 1
        self.processes = []
        for rank in range(ranks):
            environment = os.environ | {
                "OMP_NUM_THREADS": str(max(1, cores // ranks)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TOKENIZERS_PARALLELISM": "false",
            }
            if ranks > 1 and name != ALONE:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environment |= {"LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"}
            words = [name, str(folder), str(options.rows // ranks), str(options.context), options.precision]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.language_worker", *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=environment,
                )
            )
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak = 0
        self._read()

    def step(self) -> float:
        """Run a training step, and return the slowest rank's time in seconds."""
        for process in self.processes:
            _pipe(process.stdin).write("step\n")
            _pipe(process.stdin).flush()
        if self.name == "trainer":  # answers at the beginning of the next step
            return 0.0
        found = self._read()
        self.losses.append(statistics.fmean(loss for _, loss, _ in found))
        return max(seconds for seconds, _, _ in found)

    def _read(self) -> list[list[float]]:
        lines = [_pipe(process.stdout).readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError(f"{self.name}: a process ended before it finished a step")
        found = [json.loads(line) for line in lines]
        self.peak = max(self.peak, sum(int(peak) for _, _, peak in found))
        return found

    def collect(self) -> float:
        """Return the duration of the Trainer's last step in seconds."""
        return max(seconds for seconds, _, _ in self._read())

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def write_model(name: str, folder: Path) -> None:
    """Write a model with random weights to `folder`."""
    program = (
        "from tests import torchvision_models\nimport json, sys, torch, transformers as t\ntorch.manual_seed(0)\n"
        "kind, options = json.loads(sys.argv[1])\nconfig = getattr(t, kind + 'Config')(**options)\n"
        "t.AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", program, json.dumps(MODELS[name]), str(folder)], check=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2, help="samples per step over all ranks")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--implementations",
        nargs="+",
        help="implementations to measure (default all); --save then updates only their rows",
    )
    parser.add_argument("--save", action="store_true", help="write docs/benchmarks/language-MODEL-RANKS.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / options.model
        write_model(options.model, folder)
        members = [
            Implementation(name, folder, options.ranks, options)
            for name in options.implementations or (ONE if options.ranks == 1 else TWO)
        ]
        try:
            measure(members, options.rounds)
        finally:
            for member in members:
                member.close()
    rows = summarize(members)
    print(records_table(rows))
    if options.save:
        name = f"language-{options.model}-{options.ranks}"
        if options.implementations:
            rows = with_earlier(rows, RESULTS / f"{name}.json")
        given = {k: v for k, v in vars(options).items() if k not in ("save", "implementations")}
        save(name, {"options": given, "rows": rows})


def with_earlier(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Add the rows of an earlier run.  Its first row, the reference, replaces any new row of the same name."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {row["implementation"]: row for row in (*rows, *earlier[:1])}
    found = {row["implementation"]: row for row in earlier} | found
    return sorted(found.values(), key=lambda row: (*ONE, *TWO).index(row["implementation"]))


def measure(members: list[Implementation], rounds: int) -> None:
    """Run one training step of each implementation per round; the first round is not counted."""
    for number in range(rounds + 1):
        for member in members:
            seconds = member.step()
            if member.name == "trainer":
                seconds = member.collect()
            if number:
                member.seconds.append(seconds)
        print(
            f"round {number}: " + ", ".join(f"{m.name} {m.seconds[-1]:.2f} s" for m in members if m.seconds),
            flush=True,
        )


def summarize(members: list[Implementation]) -> list[dict[str, Any]]:
    """Return a row for each implementation, with the ratios of its times to farandole's times."""
    ours = members[0].seconds
    rows = []
    for member in members:
        ratios = sorted(theirs / own for theirs, own in zip(member.seconds, ours, strict=True))
        rows.append(
            {
                "implementation": member.name,
                "seconds per step": round(statistics.median(member.seconds), 3),
                "time relative to farandole": round(statistics.median(ratios), 3),
                "lowest": round(ratios[0], 3),
                "highest": round(ratios[-1], 3),
                "peak memory of all ranks [MB]": member.peak // 10**6,
                "loss after the last step": round(member.losses[-1], 4) if member.losses else None,
            }
        )
    return rows


if __name__ == "__main__":
    main()
