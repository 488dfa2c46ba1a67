"""What a bundle for a bug report must not have in it."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from kvwarehouse.bundle.redaction import REDACTED, Redactor, is_secret_name

SECRET = 'pl4nted/S3cret+of "ours"'
PLAIN = "plantedWordOfOurs"


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        json.dumps(SECRET),
        repr(SECRET),
        quote(SECRET, safe=""),
        base64.b64encode(SECRET.encode()).decode(),
        SECRET.encode().hex(),
        SECRET.encode().hex().upper(),
    ],
)
def test_secret_that_is_known_is_found_in_each_way_it_may_be_written(form: str) -> None:
    redactor = Redactor([SECRET])
    told = redactor.text(f"before{form}after\n(see '{form}')")
    assert form not in told
    assert form.strip("'\"") not in told
    assert told.startswith("before")
    assert REDACTED in told


@pytest.mark.parametrize(
    "text",
    [
        f"KVW_TOKEN={PLAIN}",
        f"export HF_TOKEN='{PLAIN}'",
        f'"salt": "{PLAIN}"',
        f'{{"event": "namespace_added", "salt":"{PLAIN}","model": "m"}}',
        f'cache_salt="{PLAIN}" model="m"',
        f"--token {PLAIN}",
        f"--api-key={PLAIN}",
        f"Authorization: {PLAIN}",
        f"authorization: Bearer {PLAIN}",
        f"sent 'bearer {PLAIN}' to it",
        f"https://user:{PLAIN}@host:70/x",
        f"redis://{PLAIN}@host",
        f"https://host/x?a=1&access_token={PLAIN}&b=2",
        f"https://bucket/x?X-Amz-Signature={PLAIN}",
        f"/x?sig={PLAIN}&a=1",
        f"https://kv.s3.amazonaws.com/v1/x?X-Amz-Credential={PLAIN}%2F20261128&X-Amz-Expires=1",
        f"PUT https://a.blob.core.windows.net/kv/v1/x?sp=rw&sig={PLAIN} ended: 403",
        f"AWS_ACCESS_KEY_ID={PLAIN}",
        f"AWS_SESSION_TOKEN={PLAIN}",
        f"AZURE_STORAGE_ACCOUNT_KEY={PLAIN}",
        f"aws_secret_access_key = {PLAIN}",
        f"ASIA{PLAIN}",
        f"/x?a=1&key={PLAIN}",
        f"the bearer {PLAIN}",
        f"the basic {PLAIN}",
        f"authorization={PLAIN}",
        f"cookie: {PLAIN}",
        f"credentials={PLAIN}",
        f"input-ids={PLAIN}",
        f"db_pwd={PLAIN}",
        f"client_secret: {PLAIN}",
        f"password: {PLAIN}",
        f"db_passwd = {PLAIN}",
        f"-----BEGIN PRIVATE KEY-----\n{PLAIN}\n-----END PRIVATE KEY-----",
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLAIN}",
        f"sk-{PLAIN}",
        f"hf_{PLAIN}",
        f"error b'{PLAIN}' came",
        f'error b"{PLAIN}" came',
        f'"prompt": "{PLAIN} and more"',
        f'"prompt": "{PLAIN} cut',
        f'token_ids=["{PLAIN}", 2]',
    ],
)
def test_what_looks_like_a_secret_is_taken_out(text: str) -> None:
    told = Redactor().text(text)
    assert PLAIN not in told
    assert "redacted" in told


@pytest.mark.parametrize(
    "text",
    [
        "ab" * 32,
        base64.b64encode(bytes(range(32))).decode(),
        "[101, 7592, 2088, 999, 102, 17, 18, 19]",
        "tokens (101,7592,2088,999,102,17,18,19",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlZGF0YQ",
    ],
)
def test_random_bytes_and_token_ids_are_taken_out_by_their_form(text: str) -> None:
    told = Redactor().text(f"said {text} then")
    assert text not in told
    assert told.startswith("said ")
    assert "7592" not in told


@pytest.mark.parametrize(
    "text",
    [
        '"page_tokens": 64,',
        '"no_token": 3,\n"bad_token": 12345',
        'kvwarehouse_refused_calls_total{reason="no_token"} 3.0',
        'token_file = "/etc/kvw/tokens"  # --token-file',
        "--token-file /etc/kvw/tokens --tls-key /etc/kvw/key.pem",
        'tls_key = "/etc/kvw/key.pem"',
        '"namespace_id": "a2f42f6b0afd0011a2f42f6b0afd0011"',
        "node distances: 10 21 21 10",
        "unix:///run/kvw/kvw.sock",
        "http://127.0.0.1:9470/metrics",
        '{"reason": "bad_token", "count": 3}',
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


def test_names_of_secret_variables() -> None:
    secret = ["KVW_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD"]
    plain = [
        "KVW_TOKEN_FILE",
        "KVW_DRAM",
        "PATH",
        "KVW_TLS_KEY_FILE",
        "MONKEY",
        "HOME",
        "PWD",
        "OLDPWD",
    ]
    assert [name for name in secret + plain if is_secret_name(name)] == secret


def test_short_values_are_not_looked_for_in_words() -> None:
    redactor = Redactor()
    redactor.learn_variables({"MY_TOKEN": "on", "HOME": "/home/somebody", "A_KEY": PLAIN})
    assert redactor.text("once on /home/somebody") == "once on /home/somebody"
    assert PLAIN not in redactor.text(f"x{PLAIN}y")


def test_secret_of_any_characters_is_found_among_others(rng: random.Random) -> None:
    for _ in range(300):
        letters = "ab1'\"\\/+%& =é\u20ac\t"
        secrets = ["x" + "".join(rng.choices(letters, k=rng.randint(5, 30))) + "y" for _ in "abc"]
        forms: list[Callable[[str], str]] = [
            str,
            repr,
            json.dumps,
            lambda secret: json.dumps({"a": [secret]}, ensure_ascii=False),
            lambda secret: quote(secret, safe=""),
            quote_plus,
        ]
        said = [rng.choice(forms)(rng.choice(secrets)).strip("'\"") for _ in range(4)]
        told = Redactor(secrets).text(f"{rng.choice(letters)}z".join(said))
        assert [each for each in said if each in told] == []


def test_long_text_without_ends_takes_no_time_that_grows_with_its_square() -> None:
    """It would take many minutes: the bound is that of pytest."""
    for piece in ("a", "a-", "1,", "[", "://", "b'", "token", "a/", "f0"):
        Redactor().text(piece * 2**16)
