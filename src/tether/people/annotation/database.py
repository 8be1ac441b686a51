"""The database of a preference store: its address, its connections and its tables' version."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Collection
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, event, inspect, make_url, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlmodel import SQLModel, create_engine

from tether.core.errors import ConfigError
from tether.core.keeping import make_folder

SCHEMA = 2
"""The version of the tables, which a store keeps; one of another version is refused."""
WAIT_FOR_STORE = 10
"""Seconds for which another process may keep a database to itself."""


def database_url(url: str | Path) -> URL:
    """The address of the database at a path or a URL; ConfigError for a text that looks like a URL
    and is none.
    """
    try:
        # The driver is that of the extra `postgres`.
        given = (
            make_url(str(url).replace("postgresql://", "postgresql+psycopg://", 1))
            if "://" in str(url)
            else None
        )
    except (SQLAlchemyError, ValueError):  # the text may hold a password
        raise ConfigError(
            f"{str(url).partition('://')[0]}://…: this is no database's URL. Write "
            "scheme://host/name",
        ) from None
    address = given or URL.create("sqlite", database=str(url))
    if address.get_backend_name() == "sqlite" and address.database:
        address = address.set(database=os.path.expanduser(address.database))
    return address


def _check_ours(names: Collection[str], url: URL) -> None:
    if names and not {"schema_version", "judgments"} <= set(names):
        some = ", ".join(sorted(names)[:3])
        raise ConfigError(
            f"{shown(url)} is no preference store: it has other tables ({some}). Give another place",
        )


def engine_of(url: URL) -> Engine:
    is_file = url.get_backend_name() == "sqlite"
    if is_file and url.database:
        make_folder(Path(url.database).parent)
    engine = create_engine(url, pool_pre_ping=not is_file, pool_size=16, max_overflow=64)
    if not is_file:
        return engine

    @event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute(f"PRAGMA busy_timeout={1000 * WAIT_FOR_STORE}")
        # Write-ahead mode is written into the file, so that it comes after the check.
        _check_ours(
            [
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'",
                )
            ],
            url,
        )
        _write_ahead(connection)
        for setting in ("synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads")
        try:
            connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
        except OperationalError as error:
            raise OperationalError(
                "BEGIN",
                None,
                sqlite3.OperationalError(f"{shown(url)}: {error.orig}"),
            ) from error

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Set the mode, and try again while another process opens the same new store: SQLite does not
    wait here.
    """
    ends = time.monotonic() + WAIT_FOR_STORE
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if (
                error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                or time.monotonic() > ends
            ):
                raise
            time.sleep(0.05)


def make_tables(connection: Connection, url: URL) -> str:
    """Make the tables where there are none; returns the store's own id, by which it knows its
    exports again.

    Raises:
        ConfigError: they are not a store's, or another tether made them.
    """
    _check_ours(inspect(connection).get_table_names(), url)
    connection.execute(text("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)"))
    connection.execute(text("CREATE TABLE IF NOT EXISTS store_id (id TEXT NOT NULL)"))
    version = connection.execute(text("SELECT max(version) FROM schema_version")).scalar()
    if version not in (None, SCHEMA):
        whose = "a newer" if version > SCHEMA else "an older"
        raise ConfigError(
            f"{shown(url)} was written by {whose} tether (schema {version}, here "
            f"{SCHEMA}). Open it with that one",
        )
    if version is None:
        SQLModel.metadata.create_all(connection)
        connection.execute(
            text("INSERT INTO schema_version VALUES (:version)"),
            {"version": SCHEMA},
        )
        connection.execute(text("INSERT INTO store_id VALUES (:id)"), {"id": secrets.token_hex(8)})
    names = [column["name"] for column in inspect(connection).get_columns("judgments")]
    if "correction" not in names:  # a store from before people wrote better answers
        column = "ALTER TABLE judgments ADD correction VARCHAR NOT NULL DEFAULT ''"
        connection.execute(text(column))
    return connection.execute(text("SELECT id FROM store_id")).scalar_one()


def shown(url: URL) -> str:
    """The address as it may be shown; a file's is its path."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.difference_update_query(
        [name for name in url.query if "pass" in name.lower()],
    ).render_as_string()
