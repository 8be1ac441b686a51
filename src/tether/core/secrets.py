"""Secrets that must not be written down: passwords, keys and tokens, anywhere in a text or in
settings.

Three signs identify them: the name next to them (`api_key=`, `--password`, an address's
`user:password@`), their own shape (`hf_…`, `sk-…`), and the environment. The values of its secret
variables are replaced everywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from tether.core.types import JsonValue, Texts

HIDDEN = "***"
SHORTEST = 6
"""Characters of a value in the environment below which replacing it everywhere would garble more
than it hides.
"""

_NAME = (
    r"(?:(?:api|access|account|secret|private)[_-]?key|secret|passwd|password|passphrase|pwd|credentials?|bearer|auth|"
    r"authorization|cookie|"
    r"(?:access|auth|api|hf|hub|id|refresh|session|bot)[_-]?token|token|sig|signature)"
)
_HUMP = rf"(?-i:(?<=[a-z0-9])(?=[A-Z])){_NAME}"
"""A name at the end of another, such as clientSecret."""
_HEAD = rf"(?:(?:^|[?&;,\s'\"_.-])(?:key|{_NAME})|{_HUMP})['\"]?\s*(?:=|:\s?(?!//))\s*"
_SCHEMES = r"(?:Bearer|Basic|Digest|Token)"
_IS_NAME = re.compile(
    rf"(?:(?:^|[_.-])(?:key|pass|{_NAME})(?<!stop[_-]token)|{_HUMP})$"
    r"|(?:^|[_.-])(?:api[_-]?keys|passwords|secrets)$",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(rf"({_HEAD}['\"]?)(?!{_SCHEMES}\s)([^\s'\"&;,{{}}\[\]]+)", re.IGNORECASE)
_QUOTED = re.compile(
    rf"((?:{_HEAD}|--?[\w-]*{_NAME}\s+)(?P<mark>['\"]))(?!{_SCHEMES}\s)"
    r"(?:\\.|(?!(?P=mark)).)+",
    re.IGNORECASE,
)
"""A value in quotes, which may hold spaces."""
_OPTION = re.compile(rf"(--?[\w-]*{_NAME}\s+['\"]?)(?!-)([^\s'\"]+)", re.IGNORECASE)
_IN_ADDRESS = re.compile(
    r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)([^\s/]+|[^\s@]+(?=@[^\s@/]+(?:[/?#\s]|$)))(?=@)",
    re.IGNORECASE,
)
_AS_USER = re.compile(r"(\bhttps?://)[^\s/:@]{12,}(?=@)", re.IGNORECASE)
"""A token in the place of a user."""
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}|AKIA[A-Z0-9]{12,}"
    r"|AIza[\w-]{20,}|xox[abprs]-[\w-]{8,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
    r"|(?:gsk_|r8_|fw_|tgp_v1_|npm_|[rs]k_(?:live|test)_|nvapi-|xai-|pplx-|pypi-|ya29\.)[\w-]{16,})",
)
_SCHEME = re.compile(
    r"((?:\bauthorization['\"]?\s*[:=]\s*['\"]?)(?:Bearer|Basic|Digest|Token)\s+"
    r"|\b(?:Bearer|Basic|Digest|Token)\s+['\"]?(?=[^\s'\"]*(?:[\d=+/._-]|(?-i:[a-z][A-Z]))|[^\s'\"]{16}))[^\s'\"]{6,}",
    re.IGNORECASE,
)
"""The scheme of an Authorization header, and what follows it; a short plain word is prose."""
_PEM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE "
    r"KEY-----|\Z)",
    re.DOTALL,
)
_SECRET_VARIABLE = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:^|_)(?:KEY|PASS|AUTH))$",
    re.IGNORECASE,
)


def redact_addresses(value: object) -> JsonValue:
    """Plain values without the passwords in their addresses, otherwise unchanged: for settings that
    are read back.
    """
    return with_texts(value, lambda text: _hidden(text, (_IN_ADDRESS, _AS_USER)))


def _hidden(text: str, patterns: Iterable[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def with_texts(value: object, change: Callable[[str], str]) -> JsonValue:
    """Plain values whose texts are changed, at any depth; names stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_texts(item, change) for key, item in value.items()}
    return (
        [with_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value
    )


def redact(text: str, environment: Texts | None = None) -> str:
    """The text with *** for every secret in it; `environment` is that of this process unless
    another is given.
    """
    for secret in _known(os.environ if environment is None else environment):
        text = text.replace(secret, HIDDEN)
    text = _PEM.sub(HIDDEN, text)
    text = _hidden(text, (_IN_ADDRESS, _AS_USER, _SCHEME, _QUOTED, _OPTION, _ASSIGNED))
    return _SHAPES.sub(HIDDEN, text)


def redact_value(value: object, environment: Texts | None = None) -> JsonValue:
    """The same for plain values at any depth: texts, and every text under a name such as
    `password`.
    """
    if isinstance(value, str):
        return redact(value, environment)
    if isinstance(value, Mapping):
        return {
            key: with_texts(item, lambda text: HIDDEN if text else text)
            if isinstance(key, str) and _IS_NAME.search(key)
            else redact_value(item, environment)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [redact_value(item, environment) for item in value]
        for place, option in enumerate(value[:-1]):  # ["--api-key", "..."]
            if (
                isinstance(option, str)
                and option.startswith("-")
                and "=" not in option
                and _IS_NAME.search(option)
            ):
                items[place + 1] = HIDDEN if isinstance(value[place + 1], str) else items[place + 1]
        return items
    return value


def _known(environment: Texts) -> Iterator[str]:
    """The secrets that the environment names, the longest first: one may be part of another."""
    values = {value for name, value in environment.items() if _SECRET_VARIABLE.search(name)}
    values |= {
        match[2]
        for value in environment.values()
        if "://" in value
        for match in _IN_ADDRESS.finditer(value)
    }
    yield from sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)
