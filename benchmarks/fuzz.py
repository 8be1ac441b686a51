"""`python -m benchmarks.fuzz --minutes 30 [--target files|rows|importers|config|overrides]...`:
fuzzing guided by coverage.

What is fed to the parsers is bent by the code that it reaches (atheris, which is libFuzzer for
Python: `pip install atheris`). A parser may give records or raise a `TetherError`; any other
exception, and an input that takes longer than a minute, is a finding. It is kept as a file in
--folder; what it teaches belongs into tests/bad_input.

`files` are bytes in every container, `rows` and `importers` are rows of every format
(tests/bad_input/seeds.jsonl) bent field by field, `config` is the text of a recipe and `overrides`
are those of a command line.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import importlib
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bad_input.rows import HARSH, SEEDS

FOLDER = Path(__file__).resolve().parent
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".jsonl.gz")


def atheris() -> Any:
    """libFuzzer for Python, which no extra installs."""
    try:
        return importlib.import_module("atheris")
    except ImportError:
        raise SystemExit("benchmarks.fuzz needs atheris: pip install atheris") from None


def bent(data: bytes, seeds: list[dict[str, Any]]) -> tuple[dict[str, Any], Any]:
    """One of the seeds, and its row with as many edits as the bytes order."""
    choose = atheris().FuzzedDataProvider(data)
    seed = seeds[choose.ConsumeIntInRange(0, len(seeds) - 1)]
    row: Any = copy.deepcopy(seed["row"])
    for _ in range(choose.ConsumeIntInRange(1, 4)):
        node: Any = None
        key: Any = None
        inside: Any = row
        while isinstance(inside, dict | list) and inside and (node is None or choose.ConsumeBool()):
            node = inside
            key = choose.PickValueInList(
                sorted(node) if isinstance(node, dict) else list(range(len(node))),
            )
            inside = node[key]
        if node is None:
            break
        match choose.ConsumeIntInRange(0, 5):
            case 0:
                del node[key]
            case 1:
                node[key] = copy.deepcopy(HARSH[choose.ConsumeIntInRange(0, len(HARSH) - 1)])
            case 2:
                node[key] = choose.ConsumeUnicode(24)
            case 3:
                node[key] = [node[key]] * choose.ConsumeIntInRange(1, 3)
            case 4:
                node[key] = (
                    json.dumps(node[key])
                    if choose.ConsumeBool()
                    else {choose.ConsumeUnicode(6): node[key]}
                )
            case 5:
                other = seeds[choose.ConsumeIntInRange(0, len(seeds) - 1)]["row"]
                row |= {
                    name: copy.deepcopy(value)
                    for name, value in other.items()
                    if choose.ConsumeBool()
                }
    return seed, row


def target_files(folder: Path) -> Callable[[bytes], None]:
    import tether.core.types as types
    from tether.data.sources import Quarantine, detect_format, read

    kinds = [
        getattr(types, name)
        for name in ("Prompt", "Demonstration", "Comparison", "Feedback", "StepLabels", "Problem")
    ]

    def run(data: bytes) -> None:
        if len(data) < 2:
            return
        path = folder / f"input{SUFFIXES[data[0] % len(SUFFIXES)]}"
        path.write_bytes(
            gzip.compress(data[2:]) if path.suffix == ".gz" and data[1] & 8 else data[2:],
        )
        list(read(path, kinds[data[1] % len(kinds)], quarantine=Quarantine(keep=2)))
        detect_format(path)

    return run


def target_rows(folder: Path) -> Callable[[bytes], None]:
    import tether.core.types as types
    from tether.data.formats.registry import FORMATS
    from tether.data.sources import Quarantine, read

    seeds = [seed for seed in SEEDS if seed["format"] in {layout.name for layout in FORMATS}]

    def run(data: bytes) -> None:
        seed, row = bent(data, seeds)
        path = folder / "input.jsonl"
        path.write_text(json.dumps(row) + "\n" + json.dumps(seed["row"]) + "\n")
        forced = seed["format"] if data[-1:] > b"\x80" else "auto"
        list(read(path, getattr(types, seed["kind"]), format=forced, quarantine=Quarantine(keep=2)))

    return run


def target_importers(folder: Path) -> Callable[[bytes], None]:
    from tether.annotation.answers import read_answers
    from tether.annotation.importing import read_cases
    from tether.data.sources import Quarantine

    seeds = [seed for seed in SEEDS if seed["kind"] in ("Case", "Answer", "Comparison")]

    def run(data: bytes) -> None:
        seed, row = bent(data, seeds)
        path = folder / "input.jsonl"
        path.write_text(json.dumps(row) + "\n" + json.dumps(seed["row"]) + "\n")
        reader: Any = read_answers if seed["kind"] == "Answer" else read_cases
        list(reader(path, quarantine=Quarantine(keep=2)))

    return run


def target_config(folder: Path) -> Callable[[bytes], None]:
    from tether.settings.reading import load_recipe
    from tether.settings.recipe import Recipe

    def run(data: bytes) -> None:
        (folder / "recipe.toml").write_bytes(data)
        load_recipe(folder / "recipe.toml", Recipe)

    return run


def target_overrides(folder: Path) -> Callable[[bytes], None]:
    from tether.settings.reading import build
    from tether.settings.recipe import Recipe

    values = {"run": "x", "model": {"source": "tiny"}}

    def run(data: bytes) -> None:
        build(Recipe, values, data.decode("utf-8", "surrogateescape").split("\x1f"))

    return run


TARGETS = {
    name.removeprefix("target_"): value
    for name, value in list(globals().items())
    if name.startswith("target_")
}


def seeds_of(target: str) -> list[bytes]:
    """What the first generation is made of."""
    recipes = sorted((FOLDER.parent / "src/tether/recipes").glob("*.toml"))
    if target == "config":
        return [path.read_bytes() for path in recipes]
    if target == "overrides":
        lines = [
            line
            for path in recipes
            for line in path.read_text("utf-8").splitlines()
            if " = " in line
        ]
        return [line.replace(" = ", "=").encode() for line in lines] + [
            b"sft.optimizer.learning_rate=1e-4\x1fseed=3",
            b"a.b=[1, 2]",
        ]
    if target != "files":
        return [bytes([index, *b"\x01\x02\x03\x04\x05\x06\x07\x08"]) for index in range(len(SEEDS))]
    kinds = ("Prompt", "Demonstration", "Comparison", "Feedback", "StepLabels", "Problem")
    found = []
    for seed in SEEDS:
        if seed["kind"] not in kinds:
            continue
        head, row = kinds.index(seed["kind"]), json.dumps(seed["row"]).encode()
        found += [
            bytes([0, head]) + row + b"\n" + row,
            bytes([1, head]) + b"[" + row + b", " + row + b"]",
        ]
        if all(isinstance(value, str) for value in seed["row"].values()):
            cells = ['"' + value.replace('"', '""') + '"' for value in seed["row"].values()]
            found += [
                bytes([n, head]) + f"{mark.join(seed['row'])}\n{mark.join(cells)}\n".encode()
                for n, mark in ((2, ","), (3, "\t"))
            ]
    return [*found, b"\x04\x00one\ntwo\n", b"\x06\x0a" + found[4][2:], *_packed()]


def _packed() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"]}),
        sink,
        compression="none",
    )
    return [
        b"\x05\x02" + sink.getvalue().to_pybytes(),
        b"\x06\x00" + gzip.compress(b'{"prompt": "p"}\n', mtime=0),
    ]


def child(target: str, corpus: str, seconds: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    fuzzer = atheris()
    with fuzzer.instrument_imports(
        include=[
            "tether.data",
            "tether.core",
            "tether.annotation",
            "tether.labels",
            "tomllib",
            "json",
            "csv",
        ],
    ):
        from tether.core.errors import TetherError

        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        run = TARGETS[target](folder)
    logging.disable(logging.CRITICAL)

    def one(data: bytes) -> None:
        with contextlib.suppress(TetherError):
            run(data)

    options = [
        f"-max_total_time={seconds}",
        "-timeout=60",
        "-max_len=4096",
        "-print_final_stats=1",
        "-rss_limit_mb=4096",
    ]
    fuzzer.Setup(
        [sys.argv[0], corpus, *options, f"-artifact_prefix={corpus}/../finding-{target}-"],
        one,
    )
    fuzzer.Fuzz()


def campaign(target: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Fuzz a target for so long, starting again after each finding; the findings are files in
    `folder`.
    """
    corpus = folder / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds_of(target)):
        (corpus / f"seed-{number}").write_bytes(seed)
    runs, edges, errors, end = 0, 0, [], time.monotonic() + seconds
    while (left := int(end - time.monotonic())) > 5 and len(errors) < 20:
        command = [
            sys.executable,
            "-m",
            "benchmarks.fuzz",
            "--child",
            target,
            str(corpus),
            str(left),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        statuses = re.findall(r"#(\d+)\s.*?cov: (\d+)", done.stderr)
        runs += max((int(count) for count, _ in statuses), default=0)
        edges = max([edges, *(int(cover) for _, cover in statuses)])
        if done.returncode == 0:
            break
        trace = re.findall(r"^ ===.*?(?==|\Z)", done.stderr, re.DOTALL | re.MULTILINE)
        errors.append((trace[-1] if trace else done.stderr)[-1500:])
        (folder / f"finding-{target}-{len(errors)}.txt").write_text(
            done.stderr[-6000:],
            encoding="utf-8",
        )
    return {
        "target": target,
        "seconds": round(seconds),
        "executions": runs,
        "edges": edges,
        "findings": len(errors),
    }


def main() -> None:
    if "--child" in sys.argv:
        return child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help=("altogether, shared evenly by the targets"),
    )
    parser.add_argument(
        "--target",
        action="append",
        choices=sorted(TARGETS),
        help=("may be given several times; default: all"),
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".fuzz"),
        help=("corpora and findings; a later run goes on from them"),
    )
    options = parser.parse_args()
    atheris()
    wanted = options.target or list(TARGETS)
    for target in wanted:
        print(
            json.dumps(campaign(target, 60 * options.minutes / len(wanted), options.folder)),
            flush=True,
        )


if __name__ == "__main__":
    main()
