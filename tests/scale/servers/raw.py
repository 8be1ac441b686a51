"""A server of plain sockets on this machine that answers with bytes, whatever they are."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

Bytes = bytes | Iterator[bytes]


def http(body: bytes | object = b"", status: int = 200, **headers: str) -> bytes:
    """An answer of HTTP; values are written as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    usual = {"Content-Type": "application/json", "Content-Length": str(len(content))}
    lines = {**usual, **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}Connection: close\r\n\r\n".encode() + content


class RawServer:
    """Answers each request with what `answer(path, body)` gives; `paths` are those of all."""

    def __init__(self, answer: Callable[[str, bytes], Bytes]) -> None:
        self.answer, self.paths = answer, list[str]()
        self.over = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                path = file.readline().split()[1].decode()
                length = 0
                while (line := file.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                body = file.read(length)
                self.paths.append(path)
                answer = self.answer(path, body)
                for part in [answer] if isinstance(answer, bytes) else answer:
                    if self.over.is_set():
                        return
                    connection.sendall(part)
            except (OSError, IndexError):
                pass

    def close(self) -> None:
        self.over.set()
        self.listener.close()
