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
        "PUT http://h/b in 3ms - Server returned non-2xx status code: 403 Forbidden: "
        f"{body}<Code>SignatureDoesNotMatch</Code>"
        f"<Message>The signature is another\nplanted</Message>{planted}</CanonicalRequest></Error>"
    )
    assert first_line(error) == (
        "403 Forbidden: SignatureDoesNotMatch: The signature is another (PUT http://h/b in 3ms)"
    )


@pytest.mark.parametrize(
    ("inside", "cause"),
    [
        ('Os {\n  code: 111,\n  message: "Connection refused",\n}', "Connection refused"),
        (
            'error: "failed to lookup address information: Name or service not known",',
            "failed to lookup address information: Name or service not known",
        ),
        (
            "error: InvalidCertificate(\n    UnknownIssuer,\n),",
            "its certificate is not believed: UnknownIssuer",
        ),
    ],
)
def test_connection_that_failed_says_why(inside: str, cause: str) -> None:
    """As obstore 0.12.1 prints them; its first line has no cause."""
    said = "Error performing GET https://h/a in 2ms - HTTP error: error sending request"
    error = ValueError(f"{said}\n\nDebug source:\nGeneric {{ {inside} }}")
    assert first_line(error) == f"{cause} ({said})"
    assert first_line(ValueError(said)) == said
