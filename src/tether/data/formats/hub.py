"""Data sets on the Hugging Face hub, streamed through `datasets`: hub:owner/name, with /config and :split if wanted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tether.core.errors import DataError
from tether.data.formats.format import Row

SCHEME = "hub:"
_ADDRESS = re.compile(r"hub:(?P<name>\w[\w.-]*/\w[\w.-]*)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?")


@dataclass(frozen=True, slots=True)
class Address:
    """owner/name, its configuration and its split."""

    name: str
    config: str | None
    split: str


def address_of(source: str) -> Address:
    """The address in hub:owner/name, hub:owner/name:split or hub:owner/name/config:split; the split is train unless named.

    Raises:
        DataError: it is none of these.
    """
    match = _ADDRESS.fullmatch(source)
    if match is None:
        raise DataError(
            f"{source!r} is no data set on the hub. Write hub:owner/name, hub:owner/name:split or hub:owner/name/config:split."
        )
    return Address(match["name"], match["config"], match["split"] or "train")


def hub_rows(address: Address) -> Iterator[tuple[int, Row]]:
    """The rows of a split as they arrive, numbered from 1.

    Raises:
        DataError: the hub cannot be reached, or the data set, configuration or split is unknown.
    """
    import datasets

    try:
        stream: Any = datasets.load_dataset(address.name, address.config, split=address.split, streaming=True)
        for number, row in enumerate(stream, 1):
            yield number, dict(row)
    except Exception as error:
        place = f"{address.name}{'/' + address.config if address.config else ''}, split {address.split}"
        raise DataError(
            f"the hub data set {place} cannot be read: {type(error).__name__}: {str(error)[:300]}. "
            "Check the name and the connection; without one, download it elsewhere and give the path of its files."
        ) from error
