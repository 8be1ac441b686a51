"""`tether prefs serve` as a process: what it says, what its log never holds, and what it
refuses.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.cli.test_commands import tether
from tests.people.annotation.conftest import filled

from tether.core.errors import ConfigError
from tether.people.annotation.server.address import listen
from tether.people.annotation.server.site import SiteConfig
from tether.people.annotation.store import Store

COMMAND = [sys.executable, "-m", "tether", "prefs", "serve"]


@contextlib.contextmanager
def serving(path: Path, *options: str) -> Iterator[tuple[str, list[str], Any]]:
    """Its address, the lines it prints, and the process; the lines are complete when it has
    ended.
    """
    process = subprocess.Popen([*COMMAND, str(path), "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            if "startup complete" in line:
                break
        address = re.search(r"People judge at (http://\S+)\. ", "".join(lines))
        assert address, "".join(lines)
        yield address[1], lines, process
    finally:
        process.send_signal(signal.SIGINT)
        lines.append(process.communicate(timeout=20)[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = Store(tmp_path / "prefs.db")
    filled(store)
    store.close()
    return tmp_path / "prefs.db"


def hidden(page: str) -> dict[str, str]:
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page)[::-1])


def test_a_whole_session_leaves_no_secret_in_the_log(path: Path) -> None:
    with serving(path, "--criterion", "kind") as (address, lines, _):
        first = re.search(r"(http://\S+)/join#(\S+)", "".join(lines))
        assert first and first[1] == address
        secrets = [first[2]]
        with httpx2.Client(
            base_url=address,
            headers={"origin": address},
            follow_redirects=True,
            timeout=30,
        ) as client:

            def send(where: str, page: Any, **fields: str) -> Any:
                answer = client.post(where, data={**hidden(page.text), **fields})
                secrets.extend(
                    [*client.cookies.values(), hidden(answer.text).get("token", first[2])],
                )
                return answer

            page = send("/join", client.get("/join"), code=first[2])
            assert page.url.path == "/admin"
            invited = send("/admin/invite", page, name="Ann", role="annotator", days="3")
            secrets.append(re.search(r"/join#([\w-]+)", invited.text)[1])  # type: ignore[index]
            send("/leave", client.get("/admin"))
            page = send("/join", client.get("/join"), code="a-forged-invitation-of-some-length")
            page = send(
                "/join",
                page,
                code=secrets[-1]
                if len(secrets[-1]) < 60
                else [s for s in secrets if len(s) == 43][-1],
            )
            for where, fields in (("/judge", {"choice": "left", "comment": "words of mine"}), ("/undo", {}), ("/skip", {}),
                                  ("/flag", {"reason": "words of mine"})):  # fmt: skip
                page = send(where, client.get("/judge"), **fields)
            send("/leave", client.get("/rest"))
    log = "".join(lines).replace(
        "".join(lines[: next(n for n, line in enumerate(lines) if "Started" in line)]),
        "",
    )
    assert log.count("POST /join") == 3 and log.count("POST /judge") == 1 and "Traceback" not in log
    kinds = {secret for secret in secrets if secret}
    assert len(kinds) > 6 and [secret for secret in kinds if secret in log] == []
    assert "forged" not in log and "words of mine" not in log and "Ann" not in log


def test_a_body_that_never_ends_is_cut_off(path: Path) -> None:
    with serving(path) as (address, _, process):
        host, port = address.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.putrequest("POST", "/join")
        for name, value in (
            ("Origin", address),
            ("Content-Type", "application/x-www-form-urlencoded"),
            ("Transfer-Encoding", "chunked"),
        ):
            connection.putheader(name, value)
        connection.endheaders()
        sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 1
        assert sent < 1000
        connection.close()
        assert (
            process.poll() is None and httpx2.get(f"{address}/join", timeout=20).status_code == 200
        )


def test_it_says_who_can_reach_it_and_makes_a_first_administrator_only_once(path: Path) -> None:
    with serving(path) as (_, lines, _):
        pass
    assert "Other machines can reach" not in "".join(lines) and "/join#" in "".join(lines)
    with serving(path, "--host", "0.0.0.0", "--address", "http://judge.example.org") as (
        _,
        lines,
        _,
    ):
        pass
    said = "".join(lines)
    assert "Other machines can reach" in said and "unencrypted" in said and "/join#" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.db"], "no preference store at nowhere.db"),
        (["{store}", "--host", "0.0.0.0"], "listens everywhere"),
        (["{store}", "--guidelines", "nowhere.md"], "no guidelines at nowhere.md"),
        (["{store}", "--criterion", "a", "--criterion", "a"], "criteria"),
        (["{store}", "--port", "{taken}"], "Choose another --port"),
        (["{guidelines}"], "cannot be opened"),
    ],
)
def test_a_store_that_cannot_be_served_is_one_message(
    path: Path,
    options: list[str],
    message: str,
) -> None:
    (path.parent / "guidelines.md").write_text("not a database, but long enough to look at" * 30)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {
            "store": path,
            "guidelines": path.parent / "guidelines.md",
            "taken": taken.getsockname()[1],
        }
        ended = tether(
            "prefs",
            "serve",
            *(option.format(**names) for option in options),
            cwd=path.parent,
        )
    assert ended.returncode == 2 and message in ended.stderr and "Traceback" not in ended.stderr


def test_guidelines_and_criteria_are_put_in_force_once(path: Path) -> None:
    text = path.parent / "guidelines.md"
    text.write_text("be kind\n")
    for expected in (1, 1):
        with serving(path, "--guidelines", str(text), "--criterion", "kind"):
            pass
        store = Store(path)
        assert [(g.version, g.text, g.criteria) for g in store.all_guidelines()] == [
            (expected, "be kind", ["kind"]),
        ]
        store.close()


def test_a_port_in_use_puts_no_guidelines_in_force(path: Path) -> None:
    text = path.parent / "guidelines.md"
    text.write_text("be kind\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = tether(
            "prefs",
            "serve",
            str(path),
            "--guidelines",
            str(text),
            "--port",
            port,
            cwd=path.parent,
        )
    assert ended.returncode == 2 and "Choose another --port" in ended.stderr
    store = Store(path)
    assert store.all_guidelines() == []
    store.close()


@pytest.mark.parametrize("host", ["a..b", "ä" * 70, "no such host"])
def test_a_host_that_no_address_has_is_an_error_of_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen at {host} port 0: .* --host"):
        listen(SiteConfig(host=host, port=0))


def test_a_port_in_use_is_an_error_of_ours() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        listen(SiteConfig(port=taken.getsockname()[1]))
    opened, settings = listen(SiteConfig(port=0))
    assert settings.port == opened.getsockname()[1] > 0
    # without it asyncio leaves 40 ms before the end of every response
    assert opened.proto == socket.IPPROTO_TCP
    opened.close()
