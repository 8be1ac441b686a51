"""`python -m benchmarks.annotation_load [--judgments 20000]`: a hundred people judge in their
browsers at once, over HTTP.

The server is `tether prefs serve` in a process of its own, on SQLite or on an empty database
(`--url postgresql://…`). A person asks for a page, sends its form, follows the redirect, as fast as
the server answers or with a `--pause`. Afterwards every judgment that was acknowledged to a person
is looked for in the store, and every task is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parent))

from preferences_load import faults
from sqlalchemy import text

from tether.annotation.store import Answer, Store
from tether.annotation.tables import TaskRow
from tether.core.types import assistant, user

COMMAND = [sys.executable, "-m", "tether", "prefs", "serve"]


@dataclass
class Person:
    """A browser reduced to a connection, cookies and the last page; every answer is timed."""

    host: str
    port: int
    cookies: dict[str, str] = field(default_factory=dict)
    page: str = ""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"task": [], "verdict": []})
    acknowledged: list[int] = field(default_factory=list)

    async def ask(
        self,
        method: str,
        path: str,
        form: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Status and where it leads; the page is kept."""
        body = urlencode(form or {}).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Origin: http://{self.host}:{self.port}",
        ]
        lines += (
            ["Cookie: " + "; ".join(f"{k}={v}" for k, v in self.cookies.items())]
            if self.cookies
            else []
        )
        lines += (
            ["Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(body)}"]
            if form
            else []
        )
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = int(found[1]) if (found := re.search(r"(?im)^content-length: (\d+)", head)) else 0
        self.page = (await self.reader.readexactly(length)).decode()
        self.cookies |= dict(re.findall(r"(?im)^set-cookie: ([^=]+)=([^;]*)", head))
        location = re.search(r"(?im)^location: (\S+)", head)
        return int(head.split(" ", 2)[1]), location[1] if location else ""

    def hidden(self, name: str) -> str:
        found = re.search(rf'name="{name}" value="([^"]*)"', self.page)
        return found[1] if found else ""

    async def work(self, invitation: str, pause: float) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        await self.ask("GET", "/join")
        status, _ = await self.ask(
            "POST",
            "/join",
            {"token": self.hidden("token"), "code": invitation},
        )
        assert status == 303, self.page
        while True:
            began = time.perf_counter()
            status, _ = await self.ask("GET", "/judge")
            shown = time.perf_counter()
            if status != 200 or not self.hidden("assignment"):
                assert status == 200, self.page
                break
            assignment = int(self.hidden("assignment"))
            # One view, so that all agree and no task has to wait for an expert.
            side = (
                "left"
                if self.page.find("better answer") < self.page.find("worse answer")
                else "right"
            )
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            form = {
                "token": self.hidden("token"),
                "assignment": str(assignment),
                "guidelines": "0",
                "choice": side,
            }
            asked = time.perf_counter()
            status, where = await self.ask("POST", "/judge", form)
            ended = time.perf_counter()
            assert status == 303 and where.startswith(("/judge?done=kept", "/rest")), self.page
            self.acknowledged.append(assignment)
            self.seconds["task"].append(shown - began)
            self.seconds["verdict"].append(ended - asked)
        self.writer.close()


def build(url: str, tasks: int, needed: int, people: int) -> list[str]:
    """A store with so many tasks; returns the invitations of its people."""
    store = Store(url)
    words = (
        "as long as an answer of a small model is wont to be, which is to say a few lines of text. "
    ) * 6
    pairs = [
        [
            Answer((user(f"question {n}"),), (assistant(f"the {kind} answer to {n}: {words}"),))
            for kind in ("better", "worse")
        ]
        for n in range(tasks)
    ]
    store.add_answers(answer for pair in pairs for answer in pair)
    store.add_tasks(
        TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, needed=needed)
        for a, b in pairs
    )
    store.invite("administrator", "admin")
    invitations = [store.invite(f"person {n}") for n in range(people)]
    store.close()
    return invitations


@contextlib.contextmanager
def serving(url: str, log: Path) -> Iterator[tuple[str, int]]:
    """Host and port of a server of its own; what it says goes to a file, as in use."""
    with log.open("w") as file:
        options = ["--port", "0", "--rest-every", "50"]
        process = subprocess.Popen([*COMMAND, url, *options], stdout=file, stderr=subprocess.STDOUT)
        try:
            while not (
                found := re.search(
                    r"http://([\d.]+):(\d+)\. [\s\S]*startup complete",
                    log.read_text(),
                )
            ):
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield found[1], int(found[2])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


async def rush(host: str, port: int, invitations: list[str], pause: float) -> list[Person]:
    people = [Person(host, port) for _ in invitations]
    await asyncio.gather(
        *(person.work(secret, pause) for person, secret in zip(people, invitations, strict=True)),
    )
    return people


def lost(store: Store, people: list[Person]) -> int:
    """Judgments that were acknowledged and are not in the store, and those that are and were
    not.
    """
    with store.reading() as session:
        kept = (
            session.execute(text("SELECT assignment_id FROM judgments WHERE withdrawn IS NULL"))
            .scalars()
            .all()
        )
    said = [assignment for person in people for assignment in person.acknowledged]
    return len(set(said) ^ set(kept)) + len(said) - len(set(said))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--judgments", type=int, default=20_000)
    parser.add_argument("--people", type=int, default=100)
    parser.add_argument("--needed", type=int, default=4, help="judgments of each task")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        help=("seconds that people look at a task, give or take half"),
    )
    parser.add_argument("--url", help="an empty database; default: an SQLite file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url, log = given.url or str(Path(folder) / "prefs.db"), Path(folder) / "log"
        invitations = build(url, given.judgments // given.needed, given.needed, given.people)
        with serving(url, log) as (host, port):
            began = time.perf_counter()
            people = asyncio.run(rush(host, port, invitations, given.pause))
            took = time.perf_counter() - began
        store = Store(url)
        counts, missing, wrong = store.counts(), lost(store, people), faults(store)
        complaints = len(re.findall(r"Traceback|\" 5\d\d", log.read_text()))
        store.close()
    print(
        f"{counts['judgments']:,} judgments of {given.people} people in {took:.0f} s: "
        f"{counts['judgments'] / took:.0f} a second",
    )
    for name in ("task", "verdict"):
        seconds = [s for person in people for s in person.seconds[name]]
        print(f"{name}: median {1000 * quantile(seconds, 0.5):.0f} ms, p99 "
              f"{1000 * quantile(seconds, 0.99):.0f} ms, "
              f"longest {1000 * max(seconds):.0f} ms")  # fmt: skip
    print(f"tasks done: {counts['tasks_done']:,} of {counts['tasks']:,}; lost or doubled: "
          f"{missing}; faults: {wrong or 'none'}; "
          f"errors in the server's log: {complaints}")  # fmt: skip
    return int(
        bool(
            missing or wrong or complaints or counts["judgments"] != counts["tasks"] * given.needed,
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
