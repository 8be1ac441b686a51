"""The dashboard's server: two pages, a stream of what is new for each, and requests to runs."""

from __future__ import annotations

import asyncio
import hmac
import html
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException as PlainHTTPException

from tether.core import requests
from tether.core.errors import RunError, TetherError
from tether.core.glossary import METRICS
from tether.core.visible import visible
from tether.people.annotation.server.address import Address
from tether.people.annotation.server.guard import (
    Attempts,
    Form,
    check_token,
    form_token,
    guarded,
    posted_form,
)
from tether.watch import report
from tether.watch.live.board import LOOK_EVERY, Board, Look, report_page, write_notes
from tether.watch.live.followed import FollowedRun
from tether.watch.report.evaluators import FIGURE_NAMES, figure_words

PAGES = Path(__file__).parent / "pages"
REPORT = Path(report.__file__).parent
STYLES = (REPORT / "page.css", PAGES / "live.css")
SCRIPTS = {path.name: path for path in (REPORT / "rollouts.js", *PAGES.glob("*.js"))}
COOKIE_SECONDS = 30 * 86400
BEAT_EVERY = 15.0
"""Seconds of a session, and between two signs of life of a stream."""
PAGE_WORDS = html.escape(
    json.dumps(
        [
            METRICS,
            {
                name: ": ".join(figure_words(*name.split("/")))
                for name in FIGURE_NAMES
                if "/" in name
            },
        ],
    ),
)
"""For the pages: meanings of metrics, and titles of those that evaluators measure."""
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of a report, whose own policy names the hash of its script: both hold."""
TO_ENTER = (
    "This page needs the token of the dashboard. Open the whole address that `tether dashboard` "
    "has printed."
)


class DashboardDoor(NamedTuple):
    """The address, and the token that opens the pages."""

    settings: Address
    token: str
    attempts: Attempts

    @property
    def cookie(self) -> str:
        """The name of the cookie: other ports of a machine share its cookies."""
        return f"tether_live_{self.settings.port}"


def dashboard_app(board: Board, settings: Address, token: str) -> FastAPI:
    """The application over a board that another program updates."""
    app = FastAPI(title="tether", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.site = DashboardDoor(settings, token, Attempts(10))
    app.state.board = board
    app.add_api_route("/open", _open)
    app.add_api_route("/", _overview_page)
    app.add_api_route("/run/{key}", _run_page)
    app.add_api_route("/run/{key}/report.html", _report)
    app.add_api_route("/stream", _overview_stream)
    app.add_api_route("/stream/{key}", _run_stream)
    app.add_api_route("/run/{key}/{request_name}", _ask, methods=["POST"])
    app.add_api_route("/static/{name}", _static)
    app.add_exception_handler(PlainHTTPException, _apology)
    app.middleware("http")(guarded)
    return app


def serve_board(folder: Path, settings: Address, opened: socket.socket, token: str) -> None:
    """Serve the pages of the runs in a folder until interrupted."""
    import uvicorn

    from tether.scale.servers.connections import bounded_protocol

    board = Board(folder)
    thread = threading.Thread(target=board.watch, name="dashboard", daemon=True)
    thread.start()
    config = uvicorn.Config(
        dashboard_app(board, settings, token),
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=1,
        http=bounded_protocol(),
        proxy_headers=False,
    )
    try:
        uvicorn.Server(config).run(sockets=[opened])
    finally:
        board.over.set()
        thread.join(LOOK_EVERY)


def _door(request: Request) -> DashboardDoor:
    return request.app.state.site


def _let_in(request: Request) -> Board:
    """The board, for a browser that has the token.

    Raises:
        HTTPException: 401, it has not.
    """
    door = _door(request)
    if not _same(request.cookies.get(door.cookie, ""), door.token):
        raise HTTPException(401, TO_ENTER)
    return request.app.state.board


Inside = Annotated[Board, Depends(_let_in)]


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


async def _open(request: Request, token: str = "") -> Response:
    """Exchange the token for a cookie; the page itself goes on, so that the address is clean."""
    door = _door(request)
    client = request.client.host if request.client else ""
    if not door.attempts.take(client):
        raise HTTPException(429, "There were too many wrong tokens. Try again in a minute.")
    if not _same(token, door.token):
        raise HTTPException(401, TO_ENTER)
    door.attempts.give_back(client)
    response = HTMLResponse('<!DOCTYPE html><meta http-equiv="refresh" content="0;url=/">')
    response.set_cookie(
        door.cookie,
        token,
        COOKIE_SECONDS,
        httponly=True,
        samesite="strict",
        path="/",
        secure=door.settings.secure,
    )
    return response


def _known(board: Board, key: str) -> FollowedRun:
    """The run with this id.

    Raises:
        HTTPException: 404, it has gone.
    """
    if (run := board.runs.get(key)) is None:
        raise HTTPException(404, "There is no such run: it may have been deleted or moved.")
    return run


def _page(request: Request, name: str) -> Response:
    text = (PAGES / name).read_text(encoding="utf-8").replace("{words}", PAGE_WORDS)
    return HTMLResponse(text.replace("{token}", form_token(_door(request).token)))


async def _overview_page(request: Request, _: Inside) -> Response:
    return _page(request, "overview.html")


async def _run_page(request: Request, _: Inside, key: str) -> Response:
    return _page(request, "run.html")


async def _overview_stream(request: Request, board: Inside, metric: str = "") -> Response:
    return _stream(request, board, partial(board.overview, metric))


async def _run_stream(request: Request, board: Inside, key: str) -> Response:
    _known(board, key)
    return _stream(request, board, partial(board.run, key))


def _stream(request: Request, board: Board, look: Look) -> Response:
    """Events that go on after the last one that the browser has."""
    given = request.headers.get("last-event-id") or request.query_params.get("since", "")
    mark, _, tick = given.partition(".")
    since = int(tick) if mark == board.mark and tick.isdecimal() and len(tick) < 16 else 0
    return StreamingResponse(_events(board, look, since), media_type="text/event-stream")


async def _events(board: Board, look: Look, since: int) -> AsyncIterator[bytes]:
    sent = b""
    beaten = time.monotonic()
    while not board.over.is_set():
        try:
            tick, value = await run_in_threadpool(look, since)
        except RunError as error:
            yield b"event: gone\ndata: " + to_json(str(error)) + b"\n\n"
            return
        content = b"" if value is None else await run_in_threadpool(to_json, value)
        if tick and content and content != sent:
            yield f"id: {board.mark}.{tick}\ndata: ".encode() + content + b"\n\n"
            sent = content if len(content) < 1 << 16 else b""
        elif time.monotonic() - beaten > BEAT_EVERY:
            beaten = time.monotonic()
            yield b": still here\n\n"
        since = tick
        await asyncio.sleep(LOOK_EVERY if tick else LOOK_EVERY / 10)


async def _ask(
    request: Request,
    board: Inside,
    key: str,
    request_name: str,
    form: Annotated[Form, Depends(posted_form)],
) -> Response:
    """Leave a request in the folder of the stage that trains, or a note in that of the run."""
    check_token(form, _door(request).token)
    wanted = {one.name.lower(): one for one in requests.Request}.get(request_name)
    run = _known(board, key)
    stage = run.active
    try:
        if request_name == "note":
            write_notes(run.folder, form)
        elif wanted is None:
            raise HTTPException(404)
        elif stage is None or run.condition != "running":
            text = "No process is at work on this run, so nothing was asked of it."
            raise HTTPException(409, text)
        else:
            requests.leave_request(stage.folder, wanted)
    except OSError as error:
        raise HTTPException(
            409,
            f"Nothing could be written into the run's folder: {error.strerror}.",
        ) from error
    return JSONResponse({"asked": request_name})


async def _report(board: Inside, key: str) -> Response:
    """A run's report, made now."""
    try:
        page = await run_in_threadpool(report_page, _known(board, key).folder)
    except TetherError as error:
        raise HTTPException(404, str(error)) from error
    return HTMLResponse(page, headers={"content-security-policy": REPORT_POLICY})


async def _static(request: Request, name: str) -> Response:
    """The style or the script; no path of a request reaches the disk."""
    if name == "live.css":
        return Response("\n".join(path.read_text() for path in STYLES), media_type="text/css")
    if name in SCRIPTS:
        return Response(SCRIPTS[name].read_text(), media_type="text/javascript")
    raise HTTPException(404)


async def _apology(request: Request, error: Exception) -> Response:
    """A sentence: as a page for people, as JSON for the pages' script."""
    assert isinstance(error, PlainHTTPException)
    standard = error.detail == "Not Found"
    text = "There is nothing at this address." if standard else visible(str(error.detail))
    if request.method == "POST":
        return JSONResponse({"error": text}, error.status_code)
    page = (PAGES / "message.html").read_text(encoding="utf-8")
    return HTMLResponse(page.replace("{text}", text.replace("<", "&lt;")), error.status_code)
