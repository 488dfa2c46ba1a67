"""Daemons of several hosts with one --fleet-secret: equal pages have equal keys."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.client.routing import Question, who_has
from kvwarehouse.fleet import FleetSecret
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit.fleet_secrets import secret_file

TOKENS = list(range(40))
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=4, page_bytes=4096
)
SECRET = b"planted0secret0of0the0fleet0here"


def keys_of(serving: Serving) -> list[bytes]:
    """Of the pages of TOKENS, which are stored there first."""
    with serving.connect() as client:
        client.open(SPACE).store(TOKENS, np.zeros((10, 4096), np.uint8))
        return sorted(page.key for page in client.pages(SPACE))


def fleet_of(serving: Serving) -> str:
    with serving.connect() as client:
        return str(client.status()["service"]["fleet_id"])


def shown_forms(data: bytes) -> list[str]:
    """Ways in which a secret may be written; of its first bytes, so that a part will do."""
    part = data[:24]
    forms = [part.hex(), base64.b64encode(part).decode(), repr(part)[2:-1]]
    return [*forms, part.decode("latin-1")]


def test_hosts_with_one_secret_make_equal_keys_and_others_do_not(tmp_path: Path) -> None:
    one = secret_file(tmp_path, "one", SECRET)
    copied = secret_file(tmp_path, "copied", SECRET)
    other = secret_file(tmp_path, "other", SECRET + b"\n")
    with ExitStack() as stack:
        a, b, c, d, e = (
            stack.enter_context(Serving(tmp_path / name, **settings))
            for name, settings in (
                ("a", {"fleet_secret": one}),
                ("b", {"fleet_secret": copied, "nvme_capacity": "64MiB"}),
                ("c", {"fleet_secret": other}),
                ("d", {}),
                ("e", {}),
            )
        )
        keys = {tuple(keys_of(each)) for each in (c, d, e)}
        assert len({key for made in keys for key in made}) == 3 * 10
        assert keys_of(a) == keys_of(b)
        assert tuple(keys_of(a)) not in keys
        assert fleet_of(a) == fleet_of(b) == FleetSecret.derive(SECRET).fleet_id.hex()
        assert len({fleet_of(each) for each in (a, c, d, e)}) == 4
        answers = who_has([a.address, b.address], Question(tokens=TOKENS), timeout_s=30)
        assert len({answer.warehouse_id for answer in answers}) == 2


def test_directories_with_another_secret_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    """Pages of the other secret would all be there, and none would be found."""
    settings = {"fleet_secret": secret_file(tmp_path, "secret", SECRET)}
    with Serving(tmp_path, nvme_capacity="64MiB") as serving:
        keys, random = keys_of(serving), fleet_of(serving)
        serving.stop()
        serving.settings |= settings
        with pytest.raises(RefusedError) as refused:
            serving.start()
        said = str(refused.value)
        for text in ("fleet_secret_differs", random, FleetSecret.derive(SECRET).fleet_id.hex(),
                     str(serving.arena_dir), str(serving.nvme_dir)):  # fmt: skip
            assert text in said
        assert [form for form in shown_forms(SECRET) if form in said] == []
        del serving.settings["fleet_secret"]
        serving.start()
        with serving.connect() as client:
            assert sorted(page.key for page in client.pages(SPACE)) == keys


def test_directories_of_a_fleet_stay_in_it_without_the_option(tmp_path: Path) -> None:
    file = secret_file(tmp_path, "secret", SECRET)
    with Serving(tmp_path, nvme_capacity="64MiB", fleet_secret=file) as serving:
        keys, fleet = keys_of(serving), fleet_of(serving)
        for settings in ({}, {"fleet_secret": file}):
            serving.stop()
            serving.settings.pop("fleet_secret", None)
            serving.settings |= settings
            serving.start()
            assert (keys_of(serving), fleet_of(serving)) == (keys, fleet)


@pytest.mark.parametrize("given", ["flag", "variable", "file"])
def test_secret_is_shown_by_no_command_and_in_no_log(
    tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = secret_file(tmp_path, "secret", SECRET)
    with Serving(tmp_path) as serving:
        serving.stop()
        serving.lose_arena()
        if given == "flag":
            serving.settings["fleet_secret"] = file
        elif given == "variable":
            serving.environment["KVW_FLEET_SECRET"] = file
        else:
            config = tmp_path / "kvw.toml"
            config.write_text(f'fleet_secret = "{file}"\n')
            serving.settings["config"] = str(config)
        serving.start()
        fleet = FleetSecret.derive(SECRET)
        assert fleet_of(serving) == fleet.fleet_id.hex()
        keys_of(serving)
        socket = ["--socket", serving.socket]
        for words in (["status"], ["status", "--json"], ["ls", "--json"]):
            assert main([*words, *socket]) == Exit.OK
        serving.stop()
        shown = capsys.readouterr().out + serving.tail()
        assert main(["serve", "--fleet-secret", file, "--print-config"]) == Exit.OK
        printed = capsys.readouterr().out
        assert f"fleet_secret = {json.dumps(file)}  # --fleet-secret" in printed
        forms = shown_forms(SECRET) + shown_forms(fleet.secret)
        assert [form for form in forms if form in shown + printed] == []
        assert fleet.fleet_id.hex() in shown
