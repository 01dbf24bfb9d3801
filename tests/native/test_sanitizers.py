"""The C core in builds with sanitizers: fuzzing of the parsers of network data, and a load of random operations.

The ordinary tests replay a corpus of inputs and run the load for a second.  `make sanitize` runs the long tests:
coverage-guided fuzzing with libFuzzer (Debian: apt install clang), and the load under ASan, UBSan and TSan.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from farandole import native

CORE = Path(native.__file__).parent
HERE = Path(__file__).parent
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-fsanitize=thread", "-fno-sanitize-recover=all")
FRAMES = 1_000_000

TARGETS = {
    "messages": ("matching.c", ".*"),
    "handshake": ("handshake.c", "read_message|prove|respond|continue_connecting|confirm|on_handshake"),
}
"""Each fuzz target, and the file and the functions that it fuzzes."""


def run(
    command: Sequence[str | Path], folder: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-12000:]}"
    return done


def build(folder: Path, program: str, sources: Sequence[str], *flags: str, compiler: str = "gcc") -> Path:
    """Compile a program of tests/native with the C core; return its path."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    probe = [compiler, *flags, "-x", "c", "-", "-o", folder / "probe"]
    text = "int LLVMFuzzerTestOneInput(void) { return 0; }" + (
        "" if "fuzzer" in flags[0] else "int main(void) {}"
    )
    if subprocess.run(probe, input=text, text=True, capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler} has no libraries for {flags[0]}")
    output = folder / program
    skipped = {"matching.c", "handshake.c"} | (
        {"reduce.c", "exchange.c"} if "stress" not in program else set()
    )
    core = [path for path in sorted(CORE.glob("*.c")) if path.name not in skipped]
    if "stress" not in program:  # no collective runs there, and kernels take long to compile
        core = [
            path
            for path in core
            if not path.name.startswith(("kernels", "codecs", "inference", "decoder", "team"))
        ]
    command = [compiler, "-g", "-O0", "-std=gnu11", "-Wall", "-Wextra", f"-I{CORE}", *flags]
    # `fuzz_messages.c` makes allocations of matching.c fail; `fuzz_handshake.c` includes handshake.c
    renames = ["-include", "stdlib.h", "-Dmalloc=fuzz_malloc", "-Dcalloc=fuzz_calloc"] * (
        "messages" in program
    )
    run([*command, *renames, "-c", CORE / "matching.c", "-o", "matching.o"], folder)
    others = [] if "handshake" in program else [CORE / "handshake.c"]
    run(
        [
            *command,
            *(HERE / name for name in sources),
            "matching.o",
            *core,
            *others,
            "-o",
            output,
            "-pthread",
            "-lm",
        ],
        folder,
    )
    return output


def branches_taken(folder: Path, name: str, functions: str) -> tuple[int, int]:
    """Return how many branches in functions of a C file the runs so far have taken, and how many there are."""
    data = next(folder.glob(f"*{'matching' if name == 'matching.c' else 'fuzz_handshake'}.gcda"))
    run(["gcov", "--json-format", "--branch-probabilities", data], folder)
    for path in folder.glob("*.gcov.json.gz"):
        for file in json.loads(gzip.decompress(path.read_bytes()))["files"]:
            if file["file"].endswith(name) and "tests" not in Path(file["file"]).parts[-2:-1]:
                lines = [
                    each for each in file["lines"] if re.fullmatch(functions, each.get("function_name", ""))
                ]
                counts = [branch["count"] for line in lines for branch in line["branches"]]
                if counts:
                    return sum(count > 0 for count in counts), len(counts)
    raise AssertionError(f"no branches of {name}")


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_covers_the_parser(target: str, tmp_path: Path) -> None:
    """The inputs that the fuzzer has found cover at least 95 % of the branches, without an error."""
    sources = [f"fuzz_{target}.c", "replay_corpus.c"]
    for flags in (MEMORY, ["--coverage"]):  # separately, because sanitizers add branches
        program = build(tmp_path, f"replay_{target}", sources, *flags)
        run([program, HERE / f"{target}.corpus"], tmp_path)
    taken, branches = branches_taken(tmp_path, *TARGETS[target])
    print(f"{taken} of {branches} branches")
    assert taken >= 0.95 * branches, f"{taken} of {branches} branches of {TARGETS[target][0]}"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_million_fuzzed_frames(target: str, tmp_path: Path) -> None:
    program = build(
        tmp_path, f"fuzz_{target}", [f"fuzz_{target}.c"], "-fsanitize=fuzzer,address,undefined",
        "-fno-sanitize-recover=all", compiler="clang",
    )  # fmt: skip
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    stored, at, count = (HERE / f"{target}.corpus").read_bytes(), 0, 0
    while at < len(stored):
        (length,) = struct.unpack_from("<H", stored, at)
        (corpus / str(count)).write_bytes(stored[at + 2 : at + 2 + length])
        at, count = at + 2 + length, count + 1
    frames = 0
    while frames < FRAMES:
        done = run([program, "-max_len=400", "-runs=300000", "-timeout=10", corpus], tmp_path, timeout_s=600)
        found = re.search(r"frames: (\d+)", done.stderr)
        assert found is not None
        frames += int(found[1])


# ---- load ----


def stress(tmp_path: Path, flags: Sequence[str], hosts: int, seconds: float) -> None:
    program = build(tmp_path, "stress", ["stress_core.c"], *flags)
    done = run([program, "4", str(hosts), str(seconds), str(hosts)], tmp_path, timeout_s=seconds + 150)
    assert "operations of 4 ranks" in done.stdout


def test_a_second_of_load(tmp_path: Path) -> None:
    stress(tmp_path, MEMORY, hosts=2, seconds=1)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("flags", [MEMORY, THREADS], ids=["address and undefined", "thread"])
def test_load(flags: Sequence[str], hosts: int, tmp_path: Path) -> None:
    stress(tmp_path, flags, hosts, seconds=20)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("flags", [MEMORY, THREADS], ids=["address and undefined", "thread"])
def test_the_kernels_for_generation(flags: Sequence[str], compiler: str, tmp_path: Path) -> None:
    """Random shapes at all vector levels; the results are those of plain loops."""
    program = build(tmp_path, "stress_inference", ["stress_inference.c"], *flags, "-O1", compiler=compiler)
    assert "complete" in run([program, "1000", "1"], tmp_path).stdout
