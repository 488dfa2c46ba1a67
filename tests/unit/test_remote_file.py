"""The file of --remote-config: what it may say, and what is refused with its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvwarehouse import config, remote_file
from kvwarehouse.errors import UsageError
from kvwarehouse.remote_file import RemoteFile


def refused(file: Path) -> str:
    with pytest.raises(UsageError) as caught:
        remote_file.read(str(file))
    return caught.value.message


def test_file_is_read_and_what_it_leaves_out_has_its_default(tmp_path: Path) -> None:
    file = tmp_path / "remote.toml"
    file.write_text(
        'endpoint = "https://ceph:7480"\nregion = "r"\nca_file = "/ca.pem"\nconnect_s = 1\n'
        'get_deadline_s = 2.5\nputs = 3\nwrite_bytes_per_s = "100MiB"\n'
    )
    assert remote_file.read(str(file)) == RemoteFile(
        endpoint="https://ceph:7480", region="r", ca_file="/ca.pem", connect_s=1.0,
        get_deadline_s=2.5, put_deadline_s=10.0, puts=3, write_bytes_per_s=100 << 20,
    )  # fmt: skip
    assert remote_file.read("") == RemoteFile()


@pytest.mark.parametrize(
    "line",
    [
        "puts = 0", "puts = 33", "puts = '2x'", "connect_s = 0", "put_deadline_s = 'soon'",
        "endpoint = 'ceph:7480'", "endpoint = 'ftp://ceph'", "endpoint = 'https://u:p@ceph'",
        "write_bytes_per_s = '1G'", "region = 3", "ca_file = 1",
    ],
)  # fmt: skip
def test_bad_value_is_refused_with_file_and_key(line: str, tmp_path: Path) -> None:
    file = tmp_path / "remote.toml"
    file.write_text(line + "\n")
    assert f"{file}: {line.split()[0]}" in refused(file)


def test_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "remote.toml"
    file.write_text("secret_access_key = 'planted-secret'\n")
    text = refused(file)
    assert "'secret_access_key'" in text
    assert "environment" in text
    assert "planted-secret" not in text


def test_file_that_is_no_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    assert "nowhere.toml" in refused(tmp_path / "nowhere.toml")
    file = tmp_path / "broken.toml"
    file.write_bytes(b"\xff\xfe")
    assert "broken.toml" in refused(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "remote.toml"
    file.write_text("puts = 2\n")
    file.chmod(0o646)
    given = {"remote": "s3://b", "fleet_secret": "/s", "remote_capacity": "1TB"}
    with pytest.raises(UsageError, match=r"chmod o-w"):
        config.load({**given, "remote_config": str(file)}, {})
