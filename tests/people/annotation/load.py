"""Many people judge at once, in several processes on one database, and processes are killed while
they do.

Measured are the throughput, the latency of `next` and `judge`, and what SQL says afterwards of every
task and judgment. A judgment counts as acknowledged when its process has written it down after
`judge` returned.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sqlalchemy import text

from tether.core.types import assistant, user
from tether.people.annotation.store import Answer, Store
from tether.people.annotation.tables import TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion

FORK = multiprocessing.get_context("spawn")
FAULTS = {
    "judged more often than asked": (
        "SELECT count(*) FROM tasks WHERE known IS NULL AND judged > needed"
    ),
    "taken more often than asked": (
        "SELECT count(*) FROM tasks WHERE known IS NULL AND taken > needed"
    ),
    "`judged` is not the number of judgments": """SELECT count(*) FROM tasks t WHERE judged != (SELECT count(*) FROM judgments j
        JOIN annotators a ON a.id = j.annotator_id WHERE j.task_id = t.id AND j.withdrawn IS NULL AND a.role = 'annotator')""",
    "`taken` is not the number of judgments and leases": """SELECT count(*) FROM tasks t WHERE taken != (SELECT count(*)
        FROM assignments a WHERE a.task_id = t.id AND a.counted AND a.state IN ('judged', 'leased'))""",
    "judged twice by one person": """SELECT count(*) FROM (SELECT task_id FROM judgments WHERE withdrawn IS NULL
        GROUP BY task_id, annotator_id HAVING count(*) > 1) twice""",
    "judged without a judgment": """SELECT count(*) FROM assignments a WHERE a.state = 'judged' AND NOT EXISTS
        (SELECT 1 FROM judgments j WHERE j.assignment_id = a.id AND j.withdrawn IS NULL)""",
    "a judgment without an assignment that is judged": """SELECT count(*) FROM judgments j WHERE j.withdrawn IS NULL
        AND NOT EXISTS (SELECT 1 FROM assignments a WHERE a.id = j.assignment_id AND a.state = 'judged' AND a.task_id = j.task_id
         AND a.annotator_id = j.annotator_id)""",
    "open though all have judged": (
        "SELECT count(*) FROM tasks WHERE known IS NULL AND state = 'open' AND judged >= needed"
    ),
}
"""What may never be, each as a query that counts how often it is."""


def faults(store: Store) -> dict[str, int]:
    """Broken promises by name; empty where all is well."""
    with store.reading() as session:
        found = {name: session.execute(text(query)).scalar_one() for name, query in FAULTS.items()}
        if (
            store.sqlite
            and (told := session.execute(text("PRAGMA integrity_check")).scalar_one()) != "ok"
        ):
            found[f"integrity_check says {told!r}"] = 1
    return {name: count for name, count in found.items() if count}


def build(url: str, tasks: int, needed: int, annotators: int) -> list[int]:
    """A store of so many tasks (three answers a prompt) and people; returns the people's ids."""
    store = Store(url)
    rows = [
        [
            Answer((user(f"{p}: {'why ' * 40}"),), (assistant(f"{k} {p}: {'because ' * 80}"),))
            for k in range(3)
        ]
        for p in range(-(-tasks // 3))
    ]
    store.add_answers(answer for row in rows for answer in row)
    pairs = [pair for row in rows for pair in itertools.combinations(row, 2)][:tasks]
    store.add_tasks(
        TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, needed=needed)
        for a, b in pairs
    )
    for number in range(annotators):
        store.invite(f"person {number}")
    people = [row.id or 0 for row in store.annotators()]
    store.close()
    return people


def judge_all(url: str, people: Sequence[int], journal: str, seed: int, pace: float = 0.0) -> None:
    """These people take tasks and judge them, until there are none; every judgment is noted once it
    has returned.

    `pace` is the mean time in seconds between a judgment and the next one of anybody here; 0: none.
    """
    store, draw = Store(url), random.Random(seed)
    work, left = Work(store), list(people)
    with open(journal, "a", encoding="utf-8", buffering=1) as notes:
        while left:
            person = draw.choice(left)
            if pace:
                time.sleep(draw.expovariate(1 / pace))
            begun = time.perf_counter()
            assigned = work.next(person)
            lent = time.perf_counter()
            if assigned is None:
                left.remove(person)
                continue
            verdict = Opinion(draw.choice(("first", "second", "tie")), seconds=1.0)
            judging = time.perf_counter()
            work.judge(assigned.assignment, person, verdict)
            judged = time.perf_counter()
            note = [assigned.task, person, verdict.choice, lent - begun, judged - judging]
            notes.write(json.dumps(note) + "\n")


def started(
    url: str,
    shares: Sequence[Sequence[int]],
    folder: Path,
    seed: int,
    pace: float = 0.0,
) -> list[BaseProcess]:
    arguments = [
        (url, share, str(folder / f"{seed}-{n}.jsonl"), seed * 1000 + n, pace)
        for n, share in enumerate(shares)
    ]
    processes: list[BaseProcess] = [
        FORK.Process(target=judge_all, args=each, daemon=True) for each in arguments
    ]
    for process in processes:
        process.start()
    return processes


def acknowledged(folder: Path) -> list[list[Any]]:
    """All notes; the last line of a process that was killed while it wrote may be cut off and then
    acknowledges nothing.
    """
    lines = [
        line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().split("\n")
    ]
    return [json.loads(line) for line in lines if line.startswith("[") and line.endswith("]")]


def compare(store: Store, notes: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Judgments that were acknowledged and are not there, or otherwise; those that are there twice;
    those without a note.
    """
    query = "SELECT task_id, annotator_id, choice FROM judgments WHERE withdrawn IS NULL"
    with store.reading() as session:
        kept = Counter(
            (task, person, choice) for task, person, choice in session.execute(text(query))
        )
    noted = {(task, person, choice) for task, person, choice, *_ in notes}
    return {
        "judgments": kept.total(),
        "acknowledged": len(noted),
        "lost": len(noted - kept.keys()),
        "twice": sum(count - 1 for count in kept.values()),
        "kept_without_note": len(kept.keys() - noted),
    }


def kill_test(
    url: str,
    folder: Path,
    people: Sequence[int],
    *,
    processes: int,
    kills: int,
    seed: int,
    within: float,
) -> list[dict]:
    """End all judging processes at random moments, look, and start them again; a row of figures for
    each time.
    """
    draw, rows = random.Random(seed), []
    shares = [list(people[n::processes]) for n in range(processes)]
    for number in range(kills):
        before = len(acknowledged(folder))
        running, deadline = started(url, shares, folder, seed + number), time.monotonic() + 120
        while (
            len(acknowledged(folder)) == before
            and any(p.is_alive() for p in running)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, within))
        for process in running:
            if process.pid and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in running:
            process.join()
        store = Store(url)
        rows.append(
            {"kill": number + 1, **compare(store, acknowledged(folder)), "faults": faults(store)},
        )
        store.close()
    return rows


def load_test(
    url: str,
    folder: Path,
    people: Sequence[int],
    *,
    processes: int,
    rate: float = 0.0,
) -> dict[str, Any]:
    """All tasks judged by all people at once: throughput, and the latencies of `next` and `judge`
    in milliseconds.

    `rate` is how many judgments all people together give in a second at most; 0: as many as the
    store takes.
    """
    begun = time.perf_counter()
    shares = [list(people[n::processes]) for n in range(processes)]
    running = started(url, shares, folder, 10_000, processes / rate if rate else 0.0)
    for process in running:
        process.join()
    seconds = time.perf_counter() - begun
    notes, store = acknowledged(folder), Store(url)
    found = {
        "seconds": round(seconds, 1),
        "judgments_per_second": round(len(notes) / seconds, 1),
        **compare(store, notes),
    }
    found |= {
        "exit_codes": sorted({process.exitcode or 0 for process in running}),
        "faults": faults(store),
    }
    for name, column in (("next_ms", 3), ("judge_ms", 4)):
        times = sorted(note[column] * 1000 for note in notes)
        found[name] = {
            f"p{share}": round(times[min(len(times) - 1, len(times) * share // 100)], 1)
            for share in (50, 95, 99)
        }
    found["open_judgments"] = store.counts()["open_judgments"]
    store.close()
    return found
