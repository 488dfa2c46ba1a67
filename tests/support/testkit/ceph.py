"""A Ceph cluster of this machine with an S3 gateway: real object storage, with TLS by an authority
of its own, bounds, and users who can be suspended. One monitor, one manager, one OSD, one gateway;
up in about 20 s. `make test-stores` installs what it needs.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvwarehouse.remote.object_store import ObjectStore, StoreSettings, open_store
from kvwarehouse_bench.harness.eventually import eventually
from testkit.fleet_secrets import secret_file
from testkit.remote_host import NAMES

_PROGRAMS: Final = (
    "ceph-mon",
    "ceph-mgr",
    "ceph-osd",
    "ceph",
    "radosgw",
    "radosgw-admin",
    "openssl",
)
REGION: Final = "default"

_COMMAND_S: Final = 60.0
_START_S: Final = 120.0
_OSD_BYTES: Final = 4 << 30  # sparse

# Single copies are what one OSD can have; the rest is for small machines and short tests.
_CONFIGURATION: Final = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon data avail crit = 1
osd crush chooseleaf type = 0
osd max object name len = 256
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
keyring = {folder}/keyring
mon data = {folder}/mon
mgr data = {folder}/mgr
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = {osd_bytes}
bluestore block create = true
osd memory target = 939524096
mgr initial modules =
rgw frontends = {frontends}
rgw thread pool size = 64
rgw run sync thread = false
rgw bucket quota ttl = 0
rgw user quota bucket sync interval = 1
"""


def missing_programs() -> list[str]:
    return [program for program in _PROGRAMS if not shutil.which(program)]


class CephCluster:
    """In `folder`, whose path has to be short: sockets are in it."""

    KEY_ID: Final = "AKIDKVWAREHOUSE"
    SECRET: Final = "a secret of tests alone"
    USER: Final = "kvwarehouse"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port, self._tls_port, self._mon_port = _free_ports(3)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # --- as a store

    @property
    def endpoint(self) -> str:
        return f"https://localhost:{self._tls_port}"

    @property
    def ca_file(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def credentials(self) -> dict[str, str]:
        """As environment variables."""
        return {"AWS_ACCESS_KEY_ID": self.KEY_ID, "AWS_SECRET_ACCESS_KEY": self.SECRET}

    def make_bucket(self, bucket: str) -> None:
        status, body = self._request("PUT", bucket)
        assert status == 200, body

    def set_quota(self, bucket: str, size_bytes: int | None) -> None:
        """What the bucket may have; None: any."""
        which = ("--quota-scope=bucket", f"--bucket={bucket}")
        if size_bytes is None:
            self._admin("quota", "disable", *which)
            return
        self._admin("quota", "set", *which, f"--max-size={size_bytes}")
        self._admin("quota", "enable", *which)

    def suspend_user(self) -> None:
        """All that the user asks is refused from now on."""
        self._admin("user", "suspend", f"--uid={self.USER}")

    def enable_user(self) -> None:
        self._admin("user", "enable", f"--uid={self.USER}")

    # --- as processes

    def start(self) -> None:
        self._make_certificates()
        fsid = self._configure()
        self._make_keys()
        self._start_monitor(fsid)
        self._start("mgr", "ceph-mgr", "-i", "x")
        self._start_osd()
        self.start_gateway()
        self._admin(
            *("user", "create", f"--uid={self.USER}", "--display-name=tests"),
            *(f"--access-key={self.KEY_ID}", f"--secret-key={self.SECRET}"),
        )

    def start_gateway(self) -> None:
        self._start("gateway", "radosgw", "-n", "client.rgw.a")
        eventually(self._gateway_answers, "the gateway answers", deadline_s=_START_S)

    def signal_gateway(self, number: int) -> None:
        self._processes["gateway"].send_signal(number)
        if number == signal.SIGKILL:
            self._processes.pop("gateway").wait()

    def stop(self) -> None:
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        self._processes.clear()

    def _configure(self) -> str:
        fsid = Path("/proc/sys/kernel/random/uuid").read_text().strip()
        text = _CONFIGURATION.format(
            fsid=fsid,
            folder=self.folder,
            mon_port=self._mon_port,
            frontends=f"beast endpoint=127.0.0.1:{self._port} "
            f"ssl_endpoint=127.0.0.1:{self._tls_port} ssl_certificate={self.folder}/gateway.pem",
            osd_bytes=_OSD_BYTES,
        )
        (self.folder / "ceph.conf").write_text(text)
        for name in ("mon", "mgr", "osd"):
            (self.folder / name).mkdir()
        return fsid

    def _make_keys(self) -> None:
        keys = {
            "mon.": {"mon": "allow *"},
            "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
            "mgr.x": {"mon": "allow profile mgr", "osd": "allow *"},
            "client.rgw.a": {"mon": "allow rw", "osd": "allow rwx"},
            "osd.0": {"mon": "allow profile osd", "mgr": "allow profile osd", "osd": "allow *"},
        }
        self._run("ceph-authtool", "--create-keyring", "keyring")
        for name, may in keys.items():
            caps = [word for part, what in may.items() for word in ("--cap", part, what)]
            self._run("ceph-authtool", "keyring", "--gen-key", "-n", name, *caps)

    def _start_monitor(self, fsid: str) -> None:
        place = f"[v2:127.0.0.1:{self._mon_port}]"
        self._run("monmaptool", "--create", "--addv", "a", place, "--fsid", fsid, "monmap")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring")
        self._start("mon", "ceph-mon", "-i", "a")
        self._ceph("osd", "stat")

    def _start_osd(self) -> None:
        new = Path("/proc/sys/kernel/random/uuid").read_text().strip()
        self._ceph("osd", "new", new)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", new)
        self._ceph("osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here")
        self._start("osd", "ceph-osd", "-i", "0")
        up = lambda: json.loads(self._ceph("osd", "stat", "-f", "json"))["num_up_osds"] == 1  # noqa: E731
        eventually(up, "the OSD is up", deadline_s=_START_S)

    def _make_certificates(self) -> None:
        """obstore believes no certificate that is its own authority."""
        subject = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"
        (self.folder / "extensions").write_text(subject)
        new = ("req", "-newkey", "rsa:2048", "-nodes")
        days = ("-days", "2")
        self._openssl(
            *(*new, "-x509", *days, "-subj", "/CN=an authority of tests"),
            *("-keyout", "authority.key", "-out", "authority.pem"),
        )
        self._openssl(*new, "-subj", "/CN=localhost", "-keyout", "gateway.key", "-out", "request")
        self._openssl(
            *("x509", "-req", "-in", "request", "-extfile", "extensions", *days),
            *("-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial"),
            *("-out", "gateway.crt"),
        )
        both = [(self.folder / name).read_text() for name in ("gateway.key", "gateway.crt")]
        (self.folder / "gateway.pem").write_text("".join(both))

    def _gateway_answers(self) -> bool:
        with suppress(OSError):
            return self._request("GET", "")[0] != 503
        return False

    def _request(self, method: str, bucket: str) -> tuple[int, bytes]:
        """Signed as AWS's documents say (Signature Version 4), with no body."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        empty = hashlib.sha256(b"").hexdigest()
        headers = {
            "host": f"127.0.0.1:{self._port}",
            "x-amz-content-sha256": empty,
            "x-amz-date": now,
        }
        signed, scope = ";".join(headers), f"{now[:8]}/{REGION}/s3/aws4_request"
        lines = [f"{name}:{value}" for name, value in headers.items()]
        request = "\n".join([method, f"/{bucket}", "", *lines, "", signed, empty])
        digest = hashlib.sha256(request.encode()).hexdigest()
        key = b"AWS4" + self.SECRET.encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, digest])
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.KEY_ID}/{scope}, SignedHeaders={signed}, "
            f"Signature={signature}"
        )
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_COMMAND_S)
        try:
            connection.request(method, f"/{bucket}", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                [*command, "-f"], cwd=self.folder, env=self._environment, stdout=out, stderr=out
            )

    def _ceph(self, *arguments: str) -> str:
        return self._run("ceph", "--connect-timeout", str(int(_COMMAND_S)), *arguments)

    def _admin(self, *arguments: str) -> str:
        return self._run("radosgw-admin", *arguments)

    def _openssl(self, *arguments: str) -> None:
        self._run("openssl", *arguments)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
        return done.stdout

    @property
    def _environment(self) -> dict[str, Any]:
        return os.environ | {"CEPH_CONF": str(self.folder / "ceph.conf"), "LC_ALL": "C.UTF-8"}


class Bucket:
    """A new one, and what is in it. `flags`: of the commands that ask a store."""

    def __init__(self, ceph: CephCluster, name: str, folder: Path) -> None:
        self.ceph, self.name = ceph, name
        self.url = f"s3://{name}/prod"
        self.config = folder / "remote.toml"
        self.write_config()
        self.secret = secret_file(folder)
        ceph.make_bucket(name)

    def write_config(self, **lines: str) -> None:
        """Each line is as TOML has it."""
        usual = {
            "endpoint": f'"{self.ceph.endpoint}"',
            "region": f'"{REGION}"',
            "ca_file": f'"{self.ceph.ca_file}"',
        }
        settings = {**usual, **lines}.items()
        self.config.write_text("".join(f"{name} = {value}\n" for name, value in settings))
        self.config.chmod(0o600)

    @property
    def flags(self) -> list[str]:
        return [
            *("--remote", self.url, "--fleet-secret", self.secret),
            *("--remote-config", str(self.config)),
        ]

    @property
    def store(self) -> ObjectStore:
        return open_store(
            StoreSettings(
                self.url,
                endpoint=self.ceph.endpoint,
                region=REGION,
                ca=self.ceph.ca_file.read_bytes(),
                get_s=30.0,
                put_s=30.0,
            )
        )

    def objects(self) -> list[str]:
        """Names of pages."""
        names = [each.name for each in self.store.list("v1/")]
        return [name for name in names if NAMES.pages_of(name) is not None]


def _free_ports(count: int) -> list[int]:
    """Of this moment; held open together, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
