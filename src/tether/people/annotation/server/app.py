"""The web application over a preference store: `create_app` for an ASGI server, `run_server`
to run it here.
"""

from __future__ import annotations

import logging
import socket

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException as PlainHTTPException

from tether.core.errors import TetherError
from tether.people.annotation.server import pages
from tether.people.annotation.server.guard import HEADERS, guarded
from tether.people.annotation.server.site import STATIC, Site, SiteConfig, go, site_of
from tether.people.annotation.store import Store

TITLES = {
    400: "This cannot be read",
    401: "You are not signed in",
    403: "Not allowed",
    404: "There is nothing here",
    405: "This cannot be done here",
    413: "Too large",
    415: "This cannot be read",
}


def create_app(store: Store, settings: SiteConfig | None = None) -> FastAPI:
    """The application; handlers that read or write the store run in threads, so that none holds up
    the others.
    """
    settings = settings or SiteConfig()
    app = FastAPI(title="tether", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.site = Site(store, settings)
    app.include_router(pages.router)
    app.add_api_route("/static/{name}", static, include_in_schema=False)
    for kind in (
        TetherError,
        PlainHTTPException,
        RequestValidationError,
        OperationalError,
        Exception,
    ):
        app.add_exception_handler(kind, _apology)
    app.middleware("http")(guarded)
    return app


async def static(request: Request, name: str) -> Response:
    """One of two files that were read at the start; no path of a request ever reaches the disk."""
    content = site_of(request).static.get(name)
    if content is None:
        raise HTTPException(404)
    return Response(
        content,
        headers={
            "content-type": STATIC[name],
            "cache-control": "public, max-age=31536000, immutable",
        },
    )


def run_server(store: Store, settings: SiteConfig, opened: socket.socket) -> None:
    """Serve until interrupted; what `listen` gave is closed at the end."""
    import uvicorn

    from tether.scale.servers.connections import CONNECTIONS, bounded_protocol

    # A connection outlasts the time for which a task is looked at: a verdict should not meet one
    # that is being closed.
    config = uvicorn.Config(
        create_app(store, settings),
        log_level="info",
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=120,
        proxy_headers=bool(settings.address),
        forwarded_allow_ips="127.0.0.1",
        http=bounded_protocol(None if settings.address else CONNECTIONS),
    )
    uvicorn.Server(config).run(sockets=[opened])


async def _apology(request: Request, error: Exception) -> Response:
    """A page that says in a sentence what did not work, and shows a way on."""
    site = site_of(request)
    match error:
        case PlainHTTPException(status_code=401) if request.method == "GET":
            return go("/join")
        case TetherError():
            text = str(error)
            return site.message(
                409,
                "This did not work",
                text[:1].upper() + text[1:] + ("" if text.endswith(".") else "."),
            )
        case RequestValidationError():
            return site.message(400, TITLES[400], "This address does not hold what it should.")
        case OperationalError():
            logging.getLogger("uvicorn.error").error("the store cannot be used: %s", error.orig)
            text = (
                "The store cannot be reached or written just now, so nothing was kept. Go back "
                "and try again in a moment."
            )
            return site.message(503, "Please try again", text, ("/", "Start again"))
        case PlainHTTPException():
            standard = error.detail in ("Not Found", "Method Not Allowed")
            text = "Perhaps the address was cut off." if standard else str(error.detail)
            link = ("/join", "Sign in") if error.status_code == 401 else ("/", "Go on")
            response = site.message(
                error.status_code,
                TITLES.get(error.status_code, "This did not work"),
                text,
                link,
            )
            response.headers.update(error.headers or {})
            return response
    text = (
        "Something is wrong on our side, and what you sent may not have been kept. The "
        "server's log says more."
    )
    response = site.message(500, "This did not work", text, ("/", "Start again"))
    # this handler stands before the guard
    response.headers.update({**HEADERS, "cache-control": "no-store"})
    return response
