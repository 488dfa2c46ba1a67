"""What libraries say has no secret in it before it is logged."""

from __future__ import annotations

import pytest

from kvwarehouse.remote.library_texts import first_line, without_secrets


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("PUT https://h/b/k?X-Amz-Signature=planted in 3 ms", "PUT https://h/b/k in 3 ms"),
        ('error(url="https://h/k?sig=planted")', 'error(url="https://h/k'),
        ("proxy http://planted:planted@proxy:3128 refuses", "proxy http://proxy:3128 refuses"),
        ("az://c?planted", "az://c"),
        ("why? because of a?b", "why? because of a?b"),
    ],
)
def test_queries_and_passwords_of_urls_are_cut(text: str, cut: str) -> None:
    assert without_secrets(text) == cut


def test_error_is_its_first_line() -> None:
    assert first_line(ValueError("one  two https://h?planted\nDebug source: planted")) == (
        "one two https://h"
    )
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 1000))) == 400


@pytest.mark.parametrize("body", ["<Error>", '<?xml version="1.0"?><Error>', "<?xml ?>\n<Error>"])
def test_body_of_a_refusal_is_its_code_and_its_message(body: str) -> None:
    """Incident: S3 and what speaks it repeat the key's id and the request that was signed."""
    planted = (
        "<AWSAccessKeyId>planted</AWSAccessKeyId><CanonicalRequest>x-amz-security-token:planted"
    )
    error = ValueError(
        f"PUT http://h/b: 403 Forbidden: {body}<Code>SignatureDoesNotMatch</Code>"
        f"<Message>The signature is another\nplanted</Message>{planted}</CanonicalRequest></Error>"
    )
    assert first_line(error) == (
        "PUT http://h/b: 403 Forbidden: SignatureDoesNotMatch: The signature is another"
    )
