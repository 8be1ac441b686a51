"""Tools of servers of the Model Context Protocol, by the official SDK (2.0 or later)."""

from __future__ import annotations

import asyncio
import shlex
import threading
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING

from tether.core.errors import ConfigError, RunError, error_words
from tether.core.types import Json, JsonValue

if TYPE_CHECKING:
    from mcp.client import Client
    from mcp.types import CallToolResult, Tool

SCHEME = "mcp:"
FIRST_ANSWER = 60.0
"""Seconds in which a server must have named its tools."""
WRONG_ARGUMENTS = -32602
"""The code of JSON-RPC for them."""


class McpTool:
    """A tool as a function, with the schema that its server gave."""

    def __init__(self, tool: Tool, server: McpServer) -> None:
        self.__name__ = tool.name
        described = {"name": tool.name, "description": tool.description or tool.name}
        self.schema = {
            "type": "function",
            "function": {**described, "parameters": tool.input_schema},
        }
        self.server = server

    def __call__(self, /, **arguments: JsonValue) -> str:
        result = self.server.call(self.__name__, arguments)
        words = "\n".join(
            part.text if part.type == "text" else f"[{part.type}, which cannot be shown]"
            for part in result.content
        )
        if result.is_error:
            raise RunError(words)
        return words


class McpServer:
    """A server by its address, `mcp:` and where one runs, or the command that starts it. It is
    connected until this process ends, and anew after it has failed.
    """

    client: Client

    def __init__(self, address: str) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.failed = False
        self.tools = [McpTool(tool, self) for tool in self._connect()]

    def call(self, name: str, arguments: Json) -> CallToolResult:
        """The result of a call.

        Raises:
            RunError: the server refuses the arguments.
        """
        from mcp.shared.exceptions import MCPError

        with self.lock:
            if self.failed:
                self._connect()
        call = self.client.call_tool(name, arguments)
        try:
            return asyncio.run_coroutine_threadsafe(call, self.loop).result()
        except MCPError as error:
            if error.code == WRONG_ARGUMENTS:
                raise RunError(error.message) from error
            self.failed = True
            raise
        except Exception:
            self.failed = True
            raise

    def _connect(self) -> list[Tool]:
        """Connect, and give the tools of the server.

        Raises:
            ConfigError: the SDK is missing, or the server names no tools within FIRST_ANSWER seconds.
        """
        self.loop = asyncio.new_event_loop()
        ready: Future[list[Tool]] = Future()

        async def connect() -> None:
            try:
                async with _client(self.address.removeprefix(SCHEME)) as self.client:
                    tools = []
                    page = await self.client.list_tools()
                    while tools.extend(page.tools) or page.next_cursor:
                        page = await self.client.list_tools(cursor=page.next_cursor)
                    ready.set_result(tools)
                    await asyncio.Event().wait()
            except Exception as error:  # noqa: BLE001 - servers may do anything
                ready.set_exception(error)

        threading.Thread(target=self.loop.run_until_complete, args=[connect()], daemon=True).start()
        try:
            tools = ready.result(FIRST_ANSWER)
        except Exception as error:
            raise ConfigError(
                f"environment.tools: {self.address} gave no list of its tools: {error_words(error)}. "
                "It needs the package mcp, 2.0 or later, and a server that answers",
            ) from error
        self.failed = False
        return tools


@cache
def mcp_tools(address: str) -> list[McpTool]:
    """The tools of a server, which all environments of this process share."""
    return McpServer(address).tools


def _client(address: str) -> Client:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if address.startswith(("http://", "https://")):
        return Client(address)
    command, *arguments = shlex.split(address)
    return Client(stdio_client(StdioServerParameters(command=command, args=arguments)))
