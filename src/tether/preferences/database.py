"""How a preference store's database is found, opened and brought up to date."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, event, inspect, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import SQLModel, create_engine

from tether.core.errors import ConfigError
from tether.preferences import tables  # noqa: F401  (declares what is created)

Migration = Callable[[Connection], None]


def _roles_of_leases(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE assignments ADD COLUMN role VARCHAR NOT NULL DEFAULT 'annotator'"))
    who = "(SELECT role FROM annotators WHERE annotators.id = assignments.annotator_id)"
    connection.execute(text(f"UPDATE assignments SET role = {who}"))


MIGRATIONS: tuple[Migration, ...] = (SQLModel.metadata.create_all, _roles_of_leases)
"""What makes a store, and what brings an older one up to date, in order; a store knows how many of them it has seen.

The first makes today's tables, so that a new store needs none of the others.
"""


def address_of(url: str | Path) -> URL:
    """Where the database is, of a path or a URL; ConfigError for what looks like a URL and is none."""
    try:
        # The driver is that of the extra `postgres`.
        known = make_url(str(url).replace("postgresql://", "postgresql+psycopg://", 1)) if "://" in str(url) else None
    except (SQLAlchemyError, ValueError):  # the text may hold a password
        raise ConfigError(f"{str(url).partition('://')[0]}://…: this is no database's URL. Write scheme://host/name") from None
    address = known or URL.create("sqlite", database=str(url))
    if address.get_backend_name() == "sqlite" and address.database:
        address = address.set(database=os.path.expanduser(address.database))
    return address


def _check_ours(names: Collection[str], url: URL) -> None:
    if names and not {"schema_version", "judgments"} <= set(names):
        some = ", ".join(sorted(names)[:3])
        raise ConfigError(f"{shown(url)} is no preference store: it has other tables ({some}). Give another place")


def engine_of(url: URL) -> Engine:
    is_file = url.get_backend_name() == "sqlite"
    if is_file and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, pool_pre_ping=not is_file, pool_size=16, max_overflow=64)
    if not is_file:
        return engine

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute("PRAGMA busy_timeout=60000")
        # Write-ahead mode is written into the file, so that it comes after the check.
        _check_ours([name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")], url)
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def migrate(connection: Connection, url: URL) -> str:
    """Bring the tables up to date; returns the store's own id, by which it knows its exports again.

    Raises:
        ConfigError: they are not a store's, or a newer tether made them.
    """
    _check_ours(inspect(connection).get_table_names(), url)
    connection.execute(text("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)"))
    connection.execute(text("CREATE TABLE IF NOT EXISTS store_id (id TEXT NOT NULL)"))
    known = connection.execute(text("SELECT max(version) FROM schema_version")).scalar() or 0
    if known > len(MIGRATIONS):
        raise ConfigError(f"{shown(url)} was written by a newer tether (schema {known}). Upgrade tether")
    for migration in MIGRATIONS[known:] if known else MIGRATIONS[:1]:
        migration(connection)
    if known < len(MIGRATIONS):
        connection.execute(text("INSERT INTO schema_version VALUES (:version)"), {"version": len(MIGRATIONS)})
    if found := connection.execute(text("SELECT id FROM store_id")).scalar():
        return found
    fresh = secrets.token_hex(8)
    connection.execute(text("INSERT INTO store_id VALUES (:id)"), {"id": fresh})
    return fresh


def shown(url: URL) -> str:
    """The address as it may be shown; a file's is its path."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.difference_update_query([name for name in url.query if "pass" in name.lower()]).render_as_string()
