"""`tether export --push`: an exported folder as a repository of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tether.core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ADVICE = {
    401: "The hub does not take this token: `hf auth login` with a new one",
    403: "This token may not write there: take one with the right to write, of the owner or a member",
}
"""By the status of the hub's answer."""


def open_hub(repository: str) -> HfApi:
    """The hub's interface (HfApi), of which is known that it answers, and to whom, before anything
    is computed.

    Args:
        repository: `owner/name`.

    Raises:
        ConfigError: that is no name, or there is no token.
        RunError: the hub does not answer, or does not take the token.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push {repository!r} is no name of a repository: {error}") from error
    if repository.count("/") != 1:
        raise ConfigError(f"--push {repository!r} needs owner and name, such as me/my-model")
    if not get_token():
        raise ConfigError(
            "--push needs a token of the hub: `hf auth login` keeps one, or set "
            "HF_TOKEN to one that may write",
        )
    api = HfApi()
    with _in_words(f"{repository} cannot be written"):
        api.whoami()
    return api


def push_folder(api: HfApi, folder: Path, repository: str, *, private: bool) -> str:
    """Upload `folder`, its model card included, into a repository that is made where there is none;
    returns its address.

    Raises:
        ConfigError: it is to be private, and there is a public one of that name.
        RunError: the hub refuses, or cannot be reached any more; the folder stays.
    """
    with _in_words(f"{folder} is written, and not uploaded"):
        address = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise ConfigError(
                f"{repository} exists and is public, so nothing was uploaded: "
                f"{folder} is written. Name another",
            )
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export of tether")
    return str(address)


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """The hub's errors as a sentence that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise RunError(f"{what}: HF_HUB_OFFLINE is set. Unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = ADVICE.get(status, "Try again with `hf upload`, which goes on where it was")
        raise RunError(f"{what}: the hub answers {status}. {advice}") from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise RunError(
            f"{what}: no hub can be reached ({type(error).__name__}). Is the machine online?",
        ) from error
