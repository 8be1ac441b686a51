"""A small OpenAI-compatible server on this machine that behaves as a test says."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[[dict[str, Any], int], Any]
"""(request, its number from 0) -> what to do: a completion, (status, headers, body), or one of the
words below.
"""
HANG, DRIP, HANG_UP = "hang", "drip", "hang up"


def completion(text="A", likeliest=None, *, tokens=(100, 1), finish="stop", **more):
    """A chat completion; `likeliest`: for each place a dictionary of tokens and probabilities, the
    drawn one first.
    """
    places = [
        {"token": next(iter(place)), "logprob": math.log(next(iter(place.values()))), "bytes": None, "top_logprobs": [
            {"token": token, "logprob": math.log(share), "bytes": None} for token, share in place.items()]}
        for place in likeliest or ()
    ]  # fmt: skip
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": text},
    }
    choice["logprobs"] = {"content": places} if likeliest else None
    usage = (
        {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
        if tokens
        else None
    )
    whole = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    return {**whole, **more}


def refusal(status, message="no", *, headers=None, **error):
    return (
        status,
        headers or {},
        json.dumps({"error": {"message": message, "type": "error", **error}}),
    )


class Server:
    """Answers POSTs as `behaviour` says; `requests` are their bodies, `keys` their Authorization
    headers.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.requests, self.keys = behaviour, [], []
        self.under_way = self.most_under_way = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    number = len(server.requests)
                    server.requests.append(body)
                    server.keys.append(self.headers.get("Authorization"))
                    server.under_way += 1
                    server.most_under_way = max(server.most_under_way, server.under_way)
                try:
                    words = server.behaviour(body, number)
                finally:  # before the answer, for who has it asks again at once
                    with server.lock:
                        server.under_way -= 1
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.answer(words)  # unless whoever asked has given up

            def answer(self, said: Any) -> None:
                self.close_connection = True
                if said == HANG_UP:
                    return
                if said == HANG:
                    server.over.wait(20)
                    return
                if said == DRIP:
                    self.wfile.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n{",
                    )
                    while not server.over.wait(0.05):
                        self.wfile.write(b" ")
                    return
                status, headers, text = (
                    said if isinstance(said, tuple) else (200, {}, json.dumps(said))
                )
                self.send_response(status)
                usual = {
                    "Content-Type": "application/json",
                    "Content-Length": len(text.encode()),
                    "Connection": "close",
                }
                for name, value in {**usual, **headers}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(text.encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(
            target=self.http.serve_forever,
            kwargs={"poll_interval": 0.02},
            daemon=True,
        ).start()

    def close(self) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()


def slowly(said: Any, seconds: float = 0.05) -> Behaviour:
    def behaviour(request: dict[str, Any], number: int) -> Any:
        time.sleep(seconds)
        return said

    return behaviour
