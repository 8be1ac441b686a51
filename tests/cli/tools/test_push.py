"""Uploading an exported folder: what is asked of the hub, in which order, and what its refusals are
called.
"""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from tether.cli.tools.push import open_hub, push_folder
from tether.cli.trained import export
from tether.core.errors import ConfigError, RunError


class FakeHub:
    """HfApi as far as it is used. `fails`: the error of each call."""

    fails: dict[str, Exception]
    private: bool
    calls: list

    def __init__(self):
        type(self).current = self
        self.calls = []

    def _called(self, name, *given):
        self.calls.append((name, *given))
        if name in self.fails:
            raise self.fails[name]

    def whoami(self):
        self._called("whoami")
        return {"name": "me"}

    def create_repo(self, repo_id, *, private, exist_ok):
        self._called("create_repo", repo_id, private, exist_ok)
        return f"https://huggingface.co/{repo_id}"

    def repo_info(self, repo_id):
        return SimpleNamespace(private=self.private)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self._called("upload_folder", repo_id, sorted(path.name for path in folder_path.iterdir()))


@pytest.fixture
def hub(monkeypatch):
    FakeHub.fails, FakeHub.private = {}, True
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    return FakeHub


def refused(status):
    """What the hub's client raises for an answer of that status."""
    response = SimpleNamespace(status_code=status, request=None, headers={})
    return HfHubHTTPError(f"{status} Client Error", response=response)


@pytest.fixture
def folder(tmp_path):
    for name in ("README.md", "config.json", "model.safetensors"):
        (tmp_path / name).write_text("x")
    return tmp_path


@pytest.mark.parametrize("private", [True, False])
def test_the_folder_and_its_card_arrive(hub, folder, private):
    address = push_folder(open_hub("me/mine"), folder, "me/mine", private=private)
    assert address == "https://huggingface.co/me/mine"
    assert hub.current.calls == [
        ("whoami",),
        ("create_repo", "me/mine", private or None, True),  # None: as the owner's account has it
        ("upload_folder", "me/mine", ["README.md", "config.json", "model.safetensors"]),
    ]


def test_a_private_push_refuses_a_public_repository(hub, folder):
    hub.private = False
    with pytest.raises(ConfigError, match=r"me/mine exists.*is public"):
        push_folder(open_hub("me/mine"), folder, "me/mine", private=True)
    assert [name for name, *_ in hub.current.calls] == ["whoami", "create_repo"]


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/my model", "../x"])
def test_a_wrong_repository_name_is_refused_at_once(hub, name):
    with pytest.raises(ConfigError, match="--push"):
        open_hub(name)


def test_without_a_token_nothing_is_computed(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="`hf auth login`"):
        open_hub("me/mine")


@pytest.mark.parametrize("call", ["whoami", "create_repo", "upload_folder"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refused(401), r"the hub answers 401\. The hub does not take this token"),
        (refused(403), r"the hub answers 403\. This token may not write there"),
        (refused(500), r"the hub answers 500\. Try again"),
        (HTTPError("Name or service not known"), r"no hub can be reached"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_refusal_says_what_to_do_and_where_the_folder_is(hub, folder, call, error, message):
    hub.fails = {call: error}
    with pytest.raises(RunError, match=message) as raised:
        push_folder(open_hub("me/mine"), folder, "me/mine", private=False)
    assert "hf_secret" not in str(raised.value)
    assert (f"{folder} is written" in str(raised.value)) == (call != "whoami")


def test_the_command_asks_the_hub_first_and_uploads_what_was_written(
    hub,
    monkeypatch,
    tmp_path,
    capsys,
):
    hub.fails = {"whoami": refused(401)}
    with pytest.raises(RunError, match="does not take this token"):
        export("tiny", tmp_path / "out", push="me/mine")
    assert not (tmp_path / "out").exists()
    hub.fails = {}
    export("tiny", tmp_path / "out", push="me/mine", private=True)
    assert "Uploaded to https://huggingface.co/me/mine" in capsys.readouterr().out
    (name, repository, files) = hub.current.calls[-1]
    assert (name, repository) == ("upload_folder", "me/mine")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    with pytest.raises(ConfigError, match=r"--private.*without --push"):
        export("tiny", tmp_path / "other", private=True)
