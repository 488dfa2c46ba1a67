"""Token files: read strictly, never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvwarehouse.daemon.credentials import read_tokens
from kvwarehouse.errors import UsageError

TOKEN = "0123456789abcdef-secret"


def token_file(tmp_path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = tmp_path / "tokens"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


def test_tokens_are_lines_without_comments(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"# old and new\n{TOKEN}\n\n  {TOKEN}2  \n")
    assert read_tokens(path) == [TOKEN, TOKEN + "2"]


@pytest.mark.parametrize(
    "text", ["", "# none\n", "short\n", f"{TOKEN}\nshort\n", f"{TOKEN}\x07\n", f"{TOKEN}é\n",
             b"\xff" * 20, f"{TOKEN}\n" * 65]
)  # fmt: skip
def test_bad_token_file_is_refused_without_showing_a_token(
    tmp_path: Path, text: str | bytes
) -> None:
    path = token_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_tokens(path)
    assert path in caught.value.message
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602])
def test_token_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match="chmod 600"):
        read_tokens(token_file(tmp_path, TOKEN, mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("linked", [False, True])
def test_token_file_of_another_user_is_refused(tmp_path: Path, linked: bool) -> None:
    path = token_file(tmp_path, TOKEN)
    os.chown(path, 1001, -1)
    if linked:
        link = tmp_path / "link"
        link.symlink_to(path)
        path = str(link)
    with pytest.raises(UsageError, match="uid 1001"):
        read_tokens(path)


def test_token_file_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path, TOKEN)
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match=f"{tmp_path} has mode 0777"):
        read_tokens(path)
    tmp_path.chmod(0o1777)
    assert read_tokens(path) == [TOKEN]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_token_file_in_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path, TOKEN)
    os.chown(tmp_path, 1001, -1)
    with pytest.raises(UsageError, match=f"{tmp_path} belongs to uid 1001"):
        read_tokens(path)


def test_pipe_is_no_token_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="plain file"):
        read_tokens(str(tmp_path / "pipe"))


def test_token_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        read_tokens(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError):
        read_tokens(str(tmp_path))
