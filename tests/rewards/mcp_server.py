"""A server of the Model Context Protocol with four tools, over its standard streams."""

import os

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("sums")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@server.tool()
def fail(why: str) -> str:
    """Fails for this reason."""
    raise ValueError(why)


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(0)


@server.tool()
def picture() -> list:
    """Draws."""
    return ["a square", Image(data=b"x", format="png")]


if __name__ == "__main__":
    server.run()
