"""Where settings come from, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse import config, places, settings
from kvwarehouse.errors import UsageError
from kvwarehouse.host import memory
from kvwarehouse.remote import object_store

REMOTE = {"fleet_secret": "/s", "remote_capacity": "1TB"}
TLS = {"tls_cert": "/c.pem", "tls_key": "/k.pem", "token_file": "/t"}


def parsed(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return vars(parser.parse_args(arguments))


def refused(flags: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        config.load(flags, environ or {})
    return caught.value.message


def test_flags_are_those_the_documentation_names() -> None:
    flags = "socket listen tls-cert tls-key token-file dram nvme-dir nvme-capacity arena-dir"
    flags += " index-pages http config name print-config"
    known = {key.replace("_", "-") for key in parsed()}
    assert set(flags.split()) <= known


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "kvw.toml"
    file.write_text('name = "file"\ndram = "1GiB"\nstreams = 3\n')
    environ = {"KVW_NAME": "environment", "KVW_DRAM": "2GiB"}
    found = config.load(parsed("--config", str(file), "--name", "flag"), environ)
    assert (found.name, found.dram_bytes, found.streams, found.io_engine) == (
        "flag", 2 << 30, 3, "auto",
    )  # fmt: skip
    assert found.sources["name"] == "--name"
    assert found.sources["dram_bytes"] == "KVW_DRAM"
    assert found.sources["streams"] == str(file)
    assert found.sources["io_engine"] == "default"


def test_config_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kvw.toml"
    file.write_text('name = "there"\n')
    assert config.load({}, {"KVW_CONFIG": str(file)}).name == "there"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dram", "64G"), ("dram", "much"), ("nvme_capacity", "-1"), ("index_pages", "1.5"),
        ("index_pages", "-1"), ("http", "9470"), ("http", "host:99999"), ("listen", "::1:70"),
        ("listen", "[nonsense]:70"), ("name", ""), ("name", "a/b"), ("name", "x" * 33),
        ("policy", "random"), ("io_engine", "libaio"), ("streams", "0"), ("grace_s", "soon"),
        ("grace_s", "nan"), ("flush_interval_s", "0"), ("socket", "a\nb"), ("log_format", "xml"),
    ],
)  # fmt: skip
def test_bad_value_is_refused_with_its_source_whatever_that_is(
    key: str, value: str, tmp_path: Path
) -> None:
    flag = "--" + key.replace("_", "-")
    assert flag in refused({key: value})
    variable = f"KVW_{key.upper()}"
    text = refused({}, {variable: value})
    assert variable in text
    assert repr(value) in text
    file = tmp_path / "kvw.toml"
    file.write_text(f"{key} = {config._toml(value)}\n")
    text = refused({"config": str(file)})
    assert str(file) in text
    assert key in text


@pytest.mark.parametrize(
    "line", ["dram = true", "name = 3", "streams = 1.5", "streams = '3 '", "http = 1", "grace_s=''"]
)
def test_file_value_of_the_wrong_type_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "kvw.toml"
    file.write_text(line + "\n")
    if "3 " in line:
        assert config.load({"config": str(file)}, {}).streams == 3
    else:
        assert str(file) in refused({"config": str(file)})


def test_unknown_setting_is_refused_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvw.toml"
    file.write_text('dran = "1GiB"\n')
    assert "'dran'" in refused({"config": str(file)})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("KVW_DRAN", "did you mean KVW_DRAM?"),
        ("KVW_dram", "did you mean KVW_DRAM?"),
        ("KVW_ADRESS", "did you mean KVW_ADDRESS?"),
        ("KVW_XYZZY_42", "another program takes another prefix"),
    ],
)
def test_unknown_variable_is_a_warning_and_no_setting(name: str, said: str) -> None:
    """Incident: one of another program kept the daemon from starting."""
    found = config.load({}, {name: "1GiB"})
    assert found == config.load({}, {})
    assert [name in text and said in text for text in found.warnings] == [True]


def test_unreadable_file_is_refused_by_its_name(tmp_path: Path) -> None:
    assert "nowhere.toml" in refused({"config": str(tmp_path / "nowhere.toml")})
    broken = tmp_path / "broken.toml"
    broken.write_text("dram = \n")
    assert "broken.toml" in refused({"config": str(broken)})
    broken.write_bytes(b"\xff\xfe")
    assert "broken.toml" in refused({"config": str(broken)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvw.toml"
    file.write_text('name = "n"\n')
    file.chmod(0o646)
    assert "chmod o-w" in refused({"config": str(file)})
    file.chmod(0o664)
    assert config.load({"config": str(file)}, {}).name == "n"
    os.chown(file, 1001, -1)
    assert "uid 1001" in refused({}, {"KVW_CONFIG": str(file)})


def test_file_may_be_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'name = "n"\n')
    os.close(writer)
    assert config.load({"config": f"/dev/fd/{reader}"}, {}).name == "n"
    os.close(reader)


def test_variables_of_clients_and_tests_are_left_alone() -> None:
    environ = {"KVW_ADDRESS": "x", "KVW_TOKEN": "y", "KVW_TEST_ANY": "z", "KVW_SEED": "1"}
    environ |= {"KVW_CUDA_DRIVER": "/libcuda.so.1", "KVW_NVRTC": "/libnvrtc.so"}
    found = config.load({}, environ)
    assert (found.name, found.warnings) == ("default", ())


def test_variables_of_a_kubernetes_service_are_no_settings() -> None:
    """A Service named kvw put KVW_PORT into every pod beside it, and the next start refused."""
    address = "tcp://10.96.0.7:7070"
    for service in ("KVW", "KVW_DRAM", "KVW_CACHE_7B"):
        environ = {
            f"{service}_SERVICE_HOST": "10.96.0.7",
            f"{service}_SERVICE_PORT": "7070",
            f"{service}_SERVICE_PORT_GRPC_TLS": "7070",
            f"{service}_PORT": address,
            f"{service}_PORT_7070_TCP": address,
            f"{service}_PORT_7070_TCP_PROTO": "tcp",
            f"{service}_PORT_7070_TCP_PORT": "7070",
            f"{service}_PORT_7070_TCP_ADDR": "10.96.0.7",
            f"{service}_PORT_53_UDP": address,
        }
        found = config.load({}, environ)
        assert not set(found.sources.values()) & set(environ)
        assert not found.warnings
    for name in ("KVW_PORTS", "KVW_PORT_TCP", "KVW_REPORT", "KVW_SERVICE"):
        assert name in config.load({}, {name: address}).warnings[0]


@pytest.mark.parametrize("address", ["0.0.0.0:70", "10.1.2.3:70", "[::]:70", "example.org:70"])
@pytest.mark.parametrize("missing", ["tls_cert", "token_file", "all"])
def test_listening_beyond_loopback_needs_tls_and_tokens(address: str, missing: str) -> None:
    given = {key: value for key, value in TLS.items() if missing not in (key, "all")}
    if missing == "tls_cert":
        given.pop("tls_key")
    assert config._flag(missing.replace("all", "token_file")) in refused(
        {"listen": address, **given}
    )


@pytest.mark.parametrize("address", ["127.0.0.1:70", "[::1]:70", "localhost:0", "127.9.9.9:1"])
def test_listening_on_loopback_needs_tokens_and_no_tls(address: str) -> None:
    text = refused({"listen": address})
    assert "--token-file" in text
    assert "--tls" not in text
    assert config.load({"listen": address, "token_file": "/t"}, {}).listen == address


def test_listening_beyond_loopback_is_accepted_with_tls_and_tokens() -> None:
    assert config.load({"listen": "0.0.0.0:70", **TLS}, {}).token_file == "/t"


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"nvme_dir": "/tmp"}, "--nvme-capacity"),
        ({"nvme_capacity": "1GB"}, "--nvme-dir"),
        ({"listen": "127.0.0.1:0", "tls_cert": "/c"}, "--tls-key"),
        ({"listen": "127.0.0.1:0", "tls_key": "/c"}, "--tls-cert"),
        ({"token_file": "/c"}, "--listen"),
        ({"nvme_dir": "/x/y", "nvme_capacity": "1GB", "arena_dir": "/x/./y"}, "--arena-dir"),
        ({"socket": "/" + "x" * 103}, "--socket"),
        ({"remote": "s3://b/x", "remote_capacity": "1TB"}, "--fleet-secret"),
        ({"remote": "s3://b/x", "fleet_secret": "/s"}, "--remote-capacity"),
        ({"remote_capacity": "1TB"}, "--remote"),
        ({"remote_config": "/c"}, "--remote"),
        ({"nvme_writes_per_day": "1.0"}, "--nvme-dir"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags: dict[str, str], names: str) -> None:
    assert names in refused(flags)


@pytest.mark.parametrize(
    ("said", "bytes_per_day"),
    [("0.5", 2 * 10**9), ("3", 12 * 10**9), (1.5, 6 * 10**9), (2, 8 * 10**9), ("500GB", 5 * 10**11),
     ("1GiB", 2**30), ("0", 0), ("", 0), (0, 0)],
)  # fmt: skip
def test_writes_per_day_are_drive_writes_or_a_size(
    said: str | float, bytes_per_day: int, tmp_path: Path
) -> None:
    nvme = {"nvme_dir": "/n", "nvme_capacity": "4GB"}
    file = tmp_path / "kvw.toml"
    file.write_text(f"nvme_writes_per_day = {json.dumps(said)}\n")
    assert config.load({**nvme, "config": str(file)}, {}).nvme_bytes_per_day == bytes_per_day
    given = config.load({**nvme, "nvme_writes_per_day": str(said)}, {})
    assert given.nvme_bytes_per_day == bytes_per_day


@pytest.mark.parametrize("said", ["-1", "nan", "inf", "1e9", "0.0001", "0GB", "much", "1 a day"])
def test_writes_per_day_that_cannot_be_are_refused(said: str) -> None:
    nvme = {"nvme_dir": "/n", "nvme_capacity": "4GB"}
    assert "--nvme-writes-per-day" in refused({**nvme, "nvme_writes_per_day": said})


def test_printed_config_reads_back_to_the_same_settings(tmp_path: Path) -> None:
    first = config.load(
        {
            "name": "a.b-c", "socket": '/tmp/qu"ote\\é.sock', "dram": "1.5GiB", "streams": "5",
            "nvme_dir": "/var/x", "nvme_capacity": "500GB", "grace_s": "0.25", "http": "off",
            "nvme_writes_per_day": "0.5",
            "listen": "[::1]:0", "token_file": "/t", "index_pages": "1000", "staging": "12345",
        },
        {},
    )  # fmt: skip
    file = tmp_path / "printed.toml"
    file.write_text(config.print_config(first), encoding="utf-8")
    assert config.load({"config": str(file)}, {}) == first


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:planted-secret@bucket/prefix",
        "s3://planted-secret@bucket/prefix",
        "az://container/prefix?sig=planted-secret",
        "s3://bucket/prefix#planted-secret",
        "s3://bucket/planted-secret\n",
        "s3://bucket/" + "planted-secret" * 100,
        "s3://[planted-secret/prefix",
    ],
)
def test_store_url_that_may_have_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.load({"remote": url, **REMOTE}, {})
    assert "--remote " in caught.value.message
    assert "planted-secret" not in caught.value.message + str(caught.value.context)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://b/x", "az://c/x", "file:///mnt/kv cache"]
)
def test_remote_tier_prints_and_reads_back(url: str, tmp_path: Path) -> None:
    details = tmp_path / "remote.toml"
    details.write_text("puts = 4\n")
    first = config.load(
        {"remote": url, "remote_ttl": "3d", "remote_write": "all", "remote_read": "off", **REMOTE,
         "remote_config": str(details)}, {},
    )  # fmt: skip
    assert (first.remote, first.remote_ttl_days, first.remote_file.puts) == (url, 3, 4)
    file = tmp_path / "printed.toml"
    file.write_text(config.print_config(first), encoding="utf-8")
    assert 'remote_ttl = "3d"  # --remote-ttl' in file.read_text()
    assert config.load({"config": str(file)}, {}) == first


def test_what_is_in_the_store_is_read_unless_it_is_said_not_to_be() -> None:
    place = {"remote": "s3://b", **REMOTE}
    assert config.load(place, {}).remote_read == "on"
    assert config.load({**place, "remote_read": "off"}, {}).remote_read == "off"
    assert "on, off" in refused({**place, "remote_read": "yes"})


def test_stores_that_hosts_share_are_those_that_are_reached() -> None:
    assert set(object_store.SCHEMES) - set(settings.SHARED_SCHEMES) == {"memory"}


def test_printed_config_says_where_each_value_came_from() -> None:
    text = config.print_config(config.load({"dram": "1GiB"}, {"KVW_NAME": "n"}))
    assert 'dram = "1GiB"  # --dram' in text
    assert 'name = "n"  # KVW_NAME' in text
    assert 'io_engine = "auto"  # default' in text
    assert set(tomllib.loads(text)) == set(config._FIELDS)


def test_every_setting_says_meaning_and_why() -> None:
    for item in dataclasses.fields(config.Config):
        if item.name not in ("sources", "warnings", "remote_file"):
            assert item.metadata["meaning"], item.name
            assert item.metadata["why"], item.name


def test_default_socket_is_in_a_directory_of_the_user(tmp_path: Path) -> None:
    socket = config.default_socket({"XDG_RUNTIME_DIR": str(tmp_path)}, "n")
    assert socket == f"{tmp_path}/kvwarehouse/n.sock"
    relative = config.default_socket({"XDG_RUNTIME_DIR": "here"}, "n")
    assert str(os.geteuid()) in relative


def test_default_dram_is_a_share_that_does_not_depend_on_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gib, mib = 1 << 30, 1 << 20
    assert places.default_dram_bytes(64 * gib, 100 * gib) == 8 * gib
    assert places.default_dram_bytes(64 * gib, 4 * gib) == 2 * gib
    assert places.default_dram_bytes(64 * gib, 0) == 8 * gib  # a file system that says no size
    assert places.default_dram_bytes(1000 * mib, 100 * gib) == 64 * mib
    assert places.default_dram_bytes(100 * mib, 100 * gib) == 12 * mib
    monkeypatch.setattr(memory, "usable_bytes", lambda: 100 * mib)
    found = config.load({"arena_dir": str(tmp_path / "not" / "there")}, {})
    assert found.dram_bytes == 12 * mib


def test_memory_limits_of_all_groups_above_a_process_bind_it(tmp_path: Path) -> None:
    hybrid = "9:name=systemd:/x\n4:cpu,memory:/pods/a\n0::/unit.slice/kvw.service\n"
    files = [
        "/sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/pods/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/unit.slice/kvw.service/memory.max",
        "/sys/fs/cgroup/unit.slice/memory.max",
        "/sys/fs/cgroup/memory.max",
    ]
    assert memory.group_limit_files(hybrid) == files

    def written(file: str, text: str) -> tuple[int, tuple[int, str]]:
        path = tmp_path / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return memory.usable_bytes("7", tmp_path), memory.group_limit("7", tmp_path)

    machine, none = memory.machine_bytes(), (memory.UNLIMITED, "")
    assert written("/proc/7/cgroup", hybrid) == (machine, none)  # /proc/meminfo is hidden
    assert written("/proc/meminfo", "MemTotal:  4 kB\n") == (4096, none)
    assert written(files[3], "max\n") == (4096, none)
    assert written(files[2], f"{2**63 - 4096}\n") == (4096, none)  # no limit, of version 1
    assert written(files[5], "8192\n") == (4096, (8192, files[5]))
    assert written(files[1], "1024\n") == (1024, (1024, files[1]))


def test_exact_size_reads_back() -> None:
    for size_bytes in (0, 1, 1023, 1024, 3 << 20, 500 * 10**9, 7 << 40, (1 << 40) + 1):
        assert settings.size(settings.exact_size(size_bytes), "x") == size_bytes
