"""Half-sent requests shut nobody out."""

import http.client
import socket
import threading
import time

import pytest
import uvicorn

from tether.people.annotation.server.address import listen
from tether.people.annotation.server.app import create_app
from tether.people.annotation.server.site import SiteConfig
from tether.people.annotation.store import Store
from tether.scale.servers.connections import bounded_protocol

BEGINNINGS = [
    b"",
    b"G",
    b"GET /join HTTP/1.1\r\nHost: x\r\n",
    b"POST /join HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
]


@pytest.fixture
def serve(tmp_path):
    """Start a server with these bounds; gives its address."""
    running = []

    def start(most, seconds):
        store = Store(tmp_path / "prefs.db")
        opened, settings = listen(SiteConfig(port=0, gold_every=0))
        protocol = bounded_protocol(most, seconds)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(store, settings),
                log_config=None,
                http=protocol,
                timeout_keep_alive=60,
            ),
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        running.append((server, thread, store))
        return "127.0.0.1", settings.port

    yield start
    for server, thread, store in running:
        server.should_exit = True
        thread.join()
        store.close()


def page(address):
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", "/join", headers={"Host": f"127.0.0.1:{address[1]}"})
        return connection.getresponse().status
    finally:
        connection.close()


def is_closed(half):
    half.settimeout(0.05)
    try:
        while half.recv(1 << 16):  # an early answer, such as that a form comes from nowhere
            pass
        return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_three_hundred_half_sent_requests_are_closed_in_time(serve):
    address = serve(None, 0.5)
    halves = [socket.create_connection(address) for _ in range(300)]
    for number, half in enumerate(halves):
        half.sendall(BEGINNINGS[number % len(BEGINNINGS)])
    assert page(address) == 200
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(map(is_closed, halves[:8])):
        time.sleep(0.1)
    assert all(map(is_closed, halves[:8])) and page(address) == 200
    for half in halves:
        half.close()


def test_one_client_holds_only_so_many_connections(serve):
    address = serve(10, 30.0)
    halves = [socket.create_connection(address) for _ in range(40)]
    for half in halves:
        half.sendall(b"G")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and sum(map(is_closed, halves)) < 30:
        time.sleep(0.1)
    assert sum(map(is_closed, halves)) == 30
    for half in halves:
        half.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert page(address) == 200
            return
        except ConnectionError:  # the server has not seen all ends yet
            time.sleep(0.1)
    raise AssertionError("nobody is served after the others have gone")


def test_a_slow_but_steady_client_and_a_kept_connection_are_served(serve):
    address = serve(10, 1.0)
    connection = http.client.HTTPConnection(*address, timeout=10)
    for _ in range(2):
        connection.request("GET", "/join", headers={"Host": f"127.0.0.1:{address[1]}"})
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        # longer than a request may take: an idle connection is no half-sent request
        time.sleep(1.5)
    connection.close()
