"""An application over a small store, and people who use it as a browser would."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from tests.people.annotation.conftest import filled

pytest.importorskip("fastapi", reason="needs fastapi: pip install 'tether-rlhf[preferences]'")
from fastapi.testclient import TestClient

from tether.people.annotation.server.app import create_app
from tether.people.annotation.server.site import SiteConfig

ORIGIN = "http://127.0.0.1:8765"


class Browser:
    """A client with a cookie jar that fills in the hidden fields of the page it is on."""

    def __init__(self, app: Any) -> None:
        self.client = TestClient(
            app,
            base_url=ORIGIN,
            headers={"origin": ORIGIN},
            raise_server_exceptions=False,
        )
        self.page: Any = None

        self.client.__enter__()  # one event loop for all requests, not one each

    def get(self, path: str, **more: Any) -> Any:
        self.page = self.client.get(path, **more)
        return self.page

    def hidden(self) -> dict[str, str]:
        found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', self.page.text)
        return {name: html.unescape(value) for name, value in reversed(found)}

    def send(self, path: str, *, headers: Any = None, follow: bool = True, **fields: Any) -> Any:
        """Post a form of the current page; a field that is None is left out."""
        data = {
            name: value for name, value in {**self.hidden(), **fields}.items() if value is not None
        }
        self.page = self.client.post(path, data=data, headers=headers, follow_redirects=follow)
        return self.page

    def join(self, secret: str) -> Any:
        self.get("/join")
        return self.send("/join", code=secret)

    @property
    def assignment(self) -> str:
        return self.hidden()["assignment"]

    def close(self) -> None:
        self.client.__exit__()


@pytest.fixture
def settings() -> SiteConfig:
    return SiteConfig(gold_every=0)


@pytest.fixture
def app(store: Any, settings: SiteConfig) -> Any:
    return create_app(store, settings)


@pytest.fixture
def visit(app: Any) -> Any:
    """Somebody who is not signed in."""
    opened: list[Browser] = []

    def anybody() -> Browser:
        opened.append(Browser(app))
        return opened[-1]

    yield anybody
    for browser in opened:
        browser.close()


@pytest.fixture
def come(visit: Any, store: Any) -> Any:
    """Somebody with a role, signed in; the store has twelve tasks."""
    filled(store)

    def somebody(role: Any = "annotator", name: str = "") -> Browser:
        browser = visit()
        answer = browser.join(store.invite(name or f"some {role}", role))
        assert answer.status_code == 200, answer.text
        return browser

    return somebody
