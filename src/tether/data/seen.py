"""The prompts that a model was trained on, kept beside its weights as digests, so that a test can
count them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tether.core.digest import digest
from tether.core.keeping import write_whole
from tether.core.types import Json, Prompt, Record
from tether.data.formats.conversions import prompt_of
from tether.data.formats.fields import prompt_digest

FILE = "trained_prompts.txt"


def digest_of(record: Record, *, task: bool = False) -> str:
    """The digest of a record's prompt: equal for prompts that differ in case and white space
    only.

    Args:
        task: with the columns of a prompt's row, but for its id: an environment may ask the same
            of all tasks.
    """
    own = prompt_digest(prompt_of(record))
    if task and isinstance(record, Prompt):
        own += digest({key: value for key, value in record.row.items() if key != "id"})
    return own


def write_seen(folder: Path, records: Iterable[Record]) -> None:
    """Write the digests of the prompts of these records into a model's folder, sorted, each once, a
    line each.
    """
    digests = sorted({digest_of(record) for record in records})
    write_whole(folder / FILE, "".join(f"{digest}\n" for digest in digests).encode())


def read_seen(folder: Path) -> set[str] | None:
    """The digests in a model's folder; None where nothing is known of its training rows."""
    path = folder / FILE
    return set(path.read_text(encoding="utf-8").split()) if path.is_file() else None


def shared_prompts(
    prompts: Sequence[Prompt],
    trained: Mapping[str, frozenset[str]],
    *,
    task: bool = False,
) -> Json:
    """The number of prompts that stages were trained on, and the names of these stages; empty
    where there is none.

    Args:
        trained: the digests of a stage's prompts, by its name.
    """
    digests = {digest_of(prompt, task=task) for prompt in prompts}
    shared = {name: digests & own for name, own in trained.items() if digests & own}
    if not shared:
        return {}
    count = len(frozenset().union(*shared.values()))
    return {"count": count, "total": len(digests), "stages": list(shared)}
