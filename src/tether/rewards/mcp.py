"""Tools of servers of the Model Context Protocol, by the official SDK (2.0 or later)."""

from __future__ import annotations

import asyncio
import shlex
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tether.core.errors import ConfigError, RunError, error_words
from tether.core.types import JsonValue

if TYPE_CHECKING:
    from mcp.client import Client
    from mcp.types import Tool

SCHEME = "mcp:"
FIRST_ANSWER = 60.0
"""Seconds in which a server must have named its tools."""


class McpTool:
    """A tool as a function, with the schema that its server gave."""

    def __init__(self, tool: Tool, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self.__name__ = tool.name
        described = {"name": tool.name, "description": tool.description or tool.name}
        self.schema = {
            "type": "function",
            "function": {**described, "parameters": tool.input_schema},
        }
        self.client = client
        self.loop = loop

    def __call__(self, **arguments: JsonValue) -> str:
        call = self.client.call_tool(self.__name__, arguments)
        result = asyncio.run_coroutine_threadsafe(call, self.loop).result()
        words = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RunError(words)
        return words


def mcp_tools(address: str) -> list[McpTool]:
    """The tools of a server: `mcp:` and the address of one that runs, or the command that starts it.
    It is connected until this process ends.

    Raises:
        ConfigError: the SDK is missing, or the server names no tools within FIRST_ANSWER seconds.
    """
    loop = asyncio.new_event_loop()
    ready: Future[list[McpTool]] = Future()

    async def connect() -> None:
        try:
            async with _client(address.removeprefix(SCHEME)) as client:
                tools = []
                page = await client.list_tools()
                while tools.extend(page.tools) or page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                ready.set_result([McpTool(tool, client, loop) for tool in tools])
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - servers may do anything
            ready.set_exception(error)

    threading.Thread(target=loop.run_until_complete, args=[connect()], daemon=True).start()
    try:
        return ready.result(FIRST_ANSWER)
    except Exception as error:
        raise ConfigError(
            f"environment.tools: {address} gave no list of its tools: {error_words(error)}. It needs "
            "the package mcp, 2.0 or later, and a server that answers",
        ) from error


def _client(address: str) -> Client:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if address.startswith(("http://", "https://")):
        return Client(address)
    command, *arguments = shlex.split(address)
    return Client(stdio_client(StdioServerParameters(command=command, args=arguments)))
