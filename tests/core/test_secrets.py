"""No planted secret survives; what is no secret stays as it is."""

import json
import re
import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.core.secrets import redact, redact_value

WORDS = st.text(string.ascii_letters + string.digits, min_size=8, max_size=30).map("Zq7".__add__)
PLACES = [
    "postgresql+psycopg://anna:{}@db.example.org:5432/prefs?sslmode=require",
    "postgres://:{}@localhost/prefs",
    "https://api.example.org/v1?api_key={}",
    "https://api.example.org/v1?model=x&api-key={}&n=1",
    "https://api.example.org/v1?key={}",
    "https://api.example.org/v1?access_token={}#end",
    "OPENAI_API_KEY={} tether judge",
    "HF_TOKEN='{}'",
    '{{"api_key": "{}"}}',
    "server.password={}",
    "password: {}",
    "--api-key {} --model x",
    "--hub-token={}",
    "Authorization: Bearer {}",
    "cannot log in with hf_{} here",
    "sk-proj-{}",
    "ghp_{}0123456789abcdef",
    '{{"clientSecret": "{}"}}',
    "dbPassword={}",
    "AccountKey={};EndpointSuffix=core",
    "awsSecretAccessKey={}",
    "Authorization: {}",
    "Cookie: session={}",
    "passphrase: '{}'",
    "https://{}0123456789@github.com/owner/name",
    "postgresql://anna:a@b@{}@db.example.org/prefs",
    "gsk_{}0123456789abcdef",
    "nvapi-{}0123456789abcdef",
    "sk_live_{}0123456789abcdef",
]


@given(st.sampled_from(PLACES), WORDS, st.text(max_size=20), st.text(max_size=20))
def test_no_secret_survives_in_a_text(place, secret, before, after):
    text = f"{before} {place.format(secret)} {after}"
    assert secret not in redact(text, {})
    assert secret not in json.dumps(
        redact_value({"argv": [text], "deep": {"a": [{"b": text}]}}, {}),
    )


@given(
    st.text(string.ascii_letters + string.digits + "%!$~+=:/.@-", min_size=6, max_size=24).map(
        "Zq7".__add__,
    ),
)
def test_passwords_of_any_letters_leave_the_environment_and_addresses(secret):
    for name, value in (
        ("HF_TOKEN", secret),
        ("WANDB_API_KEY", secret),
        ("DB_PASSWORD", secret),
        ("PGPASSWORD", secret),
    ):
        assert secret not in redact(f"said {secret} twice {secret}", {name: value}), name


@given(
    st.sampled_from(
        ["password", "api_key", "hub_token", "openai-api-key", "db.password", "Secret"],
    ),
    st.text(min_size=1),
)
def test_any_value_under_a_secret_name_is_hidden(name, value):
    assert redact_value({"server": {name: value}}, {}) == {"server": {name: "***"}}
    assert redact_value(["tether", f"--{name}", value], {}) == ["tether", f"--{name}", "***"]


@pytest.mark.parametrize(
    "value",
    [
        {
            "max_new_tokens": 48,
            "row_tokens": 256,
            "pad_token": 0,
            "token_level": True,
            "key_variable": "OPENAI_API_KEY",
        },
        "https://huggingface.co/docs?page=2#top",
        "postgresql://db.example.org/prefs",
        "postgresql://anna@db.example.org/prefs",
        "file:///home/anna/a@b:c.txt",
        "step 3: loss 0.5, tokens 300, kl 0.1",
        "ppo.kl.coefficient=0.1",
        "the token that ends an answer is an action",
        "grpo.verifiable.time_limit=5",
        ["tether", "ppo", "recipe.toml", "run=runs/key", "--samples", "3"],
        {"a": None, "b": 1.5, "c": [True, {"d": ()}]},
        "user: how are you? model: fine",
        "task-4: sk and hf_ and ghp_ alone",
        "sortKey=name, primaryKey: id, maxTokens: 5, the author: Smith, oauth flow",
        "https://anna@example.org/a, keyPassword rules, gsk_ and npm_ alone, xai-small",
    ],
)
def test_values_that_are_no_secrets_stay(value):
    assert redact_value(value, {"SHORT_KEY": "abc", "PATH": "/usr/bin"}) == json.loads(
        json.dumps(value),
    )


@pytest.mark.parametrize(
    "value",
    [
        {"Authorization": "Zq7a"},
        {"clientSecret": "Zq7a"},
        {"headers": {"Cookie": "Zq7a"}},
        {"pass": "Zq7a"},
        {"api_keys": ["Zq7a", "Zq7b"]},
        {"password": {"of": ["Zq7a"], "for": "Zq7b"}},
    ],
)
def test_all_texts_under_a_secret_name_are_hidden_at_any_depth(value):
    shown = json.dumps(redact_value(value, {}))
    assert "Zq7" not in shown and "***" in shown


def test_the_rest_of_an_address_stays_readable():
    hidden = redact("postgresql://anna:p%40ss@db.example.org:5432/prefs?sslmode=require", {})
    assert hidden == "postgresql://anna:***@db.example.org:5432/prefs?sslmode=require"
    assert (
        redact("http://h/v1?model=m&api_key=abc&n=2", {}) == "http://h/v1?model=m&api_key=***&n=2"
    )


def test_redacting_twice_changes_nothing():
    for place in PLACES:
        once = redact(place.format("Zq7secret0"), {})
        assert redact(once, {}) == once


def test_it_loads_nothing_heavy():
    program = (
        "import sys, tether.core.secrets; sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_long_texts_take_no_time():
    hostile = "a" * 50_000 + "://" + ":" * 50_000 + " token" * 5_000 + re.escape("@" * 50_000)
    assert len(redact(hostile, {})) > 0


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("authorization: bearer abcdefgh", "abcdefgh"),
        ("sent Basic dXNlcjpwYXNz to it", "dXNlcjpwYXNz"),
        ("password = 'two words here' and more", "words"),
        ('api_key: "a b c", x', "b c"),
        ("--password 'my secret word' next", "secret word"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\nxyz\n-----END RSA PRIVATE KEY-----\nrest",
            "MIIabc",
        ),
        ("-----BEGIN PRIVATE KEY-----\ncut off", "cut off"),
    ],
)
def test_headers_quoted_values_and_keys_in_blocks_are_hidden(text, secret):
    assert secret not in redact(text, {}) and "***" in redact(text, {})


@pytest.mark.parametrize(
    "text",
    ["a basic question about tokens", "the bearer of news came", "token counts are 5 and 6"],
)
def test_prose_stays(text):
    assert redact(text, {}) == text
