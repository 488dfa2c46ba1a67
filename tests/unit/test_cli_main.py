"""The program itself: help, exit status, and commands of other packages that cannot break it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvwarehouse.cli import commands, main
from kvwarehouse.cli.commands import COMMANDS
from kvwarehouse.cli.exit_codes import MEANINGS, Exit, exit_code_of
from kvwarehouse.daemon.deadline import LONGEST_S
from kvwarehouse.errors import BY_KIND


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVW_ADDRESS", "KVW_SOCKET", "KVW_NAME", "KVW_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_help_lists_every_command_and_every_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"  {command.name} " in shown for command in COMMANDS)
    assert all(meaning in shown for meaning in MEANINGS.values())


@pytest.mark.parametrize("name", ["flush", "drain"])
def test_help_of_a_flush_says_how_long_a_daemon_lets_it_take(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"a daemon ends each after {LONGEST_S:.0f}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", [*(command.name for command in COMMANDS), "bench"])
def test_help_of_every_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"  kvwarehouse {name}" in shown.partition("examples:")[2]


def test_no_command_is_a_usage_error_that_shows_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == Exit.USAGE
    assert "commands" in capsys.readouterr().err


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["statsu"])
    assert caught.value.code == Exit.USAGE
    assert "statsu" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--address", "unix:///x"], ["--json"]])
def test_option_before_its_command_is_a_usage_error_that_says_where_it_belongs(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*given, "status"])
    assert caught.value.code == Exit.USAGE
    assert f"after the command: kvwarehouse status {given[0]} ..." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["status", "--socket", "/tmp/kvw-none.sock"], Exit.NO_DAEMON, "kvwarehouse serve"),
        (["status", "--address", "nowhere"], Exit.USAGE, "nowhere"),
        (["ls", "--limit", "0"], Exit.USAGE, "--limit 0"),
        (["ls", "NS", "--limit", "9" * 20], Exit.USAGE, "1,073,741,824"),
        (["debug", "bundle", "--timeout", "inf"], Exit.USAGE, "--timeout = inf"),
        (["debug", "bundle", "--timeout", "nan"], Exit.USAGE, "--timeout = nan"),
        (["evict", "--all", "--pages", "0"], Exit.USAGE, "--pages 0"),
        (["status", "--timeout", "nan"], Exit.USAGE, "timeout"),
        (["status", "--address", "localhost:1", "--token-file", "/no"], Exit.USAGE, "/no"),
        (["serve", "--dram", "64G", "--print-config"], Exit.USAGE, "64GiB"),
        (["serve", "--dram", "-1GiB", "--print-config"], Exit.USAGE, "'-1GiB' is not a size"),
        (["clear", "-dash", "--socket", "/tmp/kvw-none.sock"], Exit.NO_DAEMON, "no daemon"),
        (["bench", "fast"], Exit.USAGE, "fast"),
        (["bench", "nvme"], Exit.USAGE, "--nvme-dir"),
        (["bench", "idle", "--address", "unix:///x"], Exit.USAGE, "--address"),
        (["bench", "remote", "--address", "unix:///x"], Exit.USAGE, "--address"),
        (["bench", "load", "--remote", "file:///x"], Exit.USAGE, "measure remote"),
        (["bench", "remote", "--remote-config", "x"], Exit.USAGE, "without --remote"),
        (["bench", "load", "--page", "1GiB"], Exit.USAGE, "--page"),
        (["bench", "load", "--page", "-1GiB"], Exit.USAGE, "'-1GiB' is not a size"),
        (["bench", "load", "--rounds", "1"], Exit.USAGE, "--rounds 1"),
    ],
)
def test_error_is_one_line_with_its_exit_status(
    arguments: list[str],
    status: Exit,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(arguments) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvwarehouse: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_output_without_room_is_one_line(more: list[str], unbuffered: str) -> None:
    """Incident: a full disk under the output was a traceback."""
    command = [sys.executable, "-m", "kvwarehouse", "size", "--model", "qwen2.5-7b", *more]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert done.returncode == Exit.FAILED
    assert done.stderr.startswith("kvwarehouse: the output cannot be written: No space left")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["serve"], ["check", "--nvme-dir", "."]])
def test_command_of_a_daemons_modules_says_which_extra_has_them(command: list[str]) -> None:
    """In a process of its own, where the module is as good as not installed."""
    program = (
        "import sys; sys.modules['lmdb'] = None\n"
        "from kvwarehouse.cli import main\n"
        f"sys.stderr = sys.stdout; print('status', main({command!r}))"
    )
    said = said_by(program)
    assert "needs the module lmdb, which is not installed; run pip install" in said
    assert "'kvwarehouse[daemon]' [missing_extra]" in said
    assert f"status {int(Exit.USAGE)}" in said
    assert "Traceback" not in said


def test_command_that_finds_no_daemon_by_default_says_how_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Incident: `serve --name x`, and status knew of no names; KVW_ADRESS, silently ignored."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KVW_ADRESS", "unix:///there/kvw.sock")
    assert main(["status"]) == Exit.NO_DAEMON
    said = capsys.readouterr().err
    assert "--name (or KVW_NAME)" in said
    assert said.count("KVW_ADRESS is set and nobody reads it: did you mean KVW_ADDRESS?") == 1
    assert said.count("\n") == 2
    for chosen in (["--socket", str(tmp_path / "s")], ["--name", "x"]):
        assert main(["status", *chosen]) == Exit.NO_DAEMON
        assert "KVW_NAME" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["status", "--socket", "/nowhere/s"], Exit.NO_DAEMON),
        (["drain", "--socket", "/nowhere/s"], Exit.NO_DAEMON),
        (["serve", "--print-config"], Exit.OK),
        (["serve", "--nvme-capacity", "1GiB"], Exit.USAGE),
    ],
)
def test_command_says_once_which_variable_nobody_reads(
    arguments: list[str],
    status: Exit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Incident: KVW_ADRESS was fatal for serve, and silently ignored by all else."""
    monkeypatch.setenv("KVW_ADRESS", "unix:///there/kvw.sock")
    assert main(arguments) == status
    shown = capsys.readouterr()
    said = "kvwarehouse: KVW_ADRESS is set and nobody reads it: did you mean KVW_ADDRESS?\n"
    assert shown.err.startswith(said)
    assert shown.err.count(said) == 1
    assert "KVW_ADRESS" not in shown.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--address", "a:1", "--socket", "b"], ["clear"], ["clear", "x", "--all"],
        ["evict", "--all"], ["evict", "--all", "--pages", "x"], ["status", "--jso"],
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == Exit.USAGE


def test_every_error_class_has_an_exit_status_that_says_failure() -> None:
    assert all(exit_code_of(cls("text")) != Exit.OK for cls in BY_KIND.values())


def test_print_config_shows_the_settings_in_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "--dram", "3GiB", "--print-config"]) == Exit.OK
    assert 'dram = "3GiB"  # --dram' in capsys.readouterr().out


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose metadata adds commands; its module is empty yet."""
    info = tmp_path / "kvw_extension-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvw-extension\nVersion: 1.0\n"
        'Provides-Extra: heavy\nRequires-Dist: no-such-module>=2; extra == "heavy"\n'
    )
    (info / "entry_points.txt").write_text(
        f"[{commands.GROUP}]\ngreet = kvw_extension_commands:greet\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kvw_extension_commands", raising=False)
    return tmp_path / "kvw_extension_commands.py"


def test_command_of_another_package_gets_its_arguments_and_gives_the_status(
    extension: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extension.write_text("def greet(arguments):\n    print(arguments)\n    return 7\n")
    assert main(["greet", "--help", "x"]) == 7
    assert capsys.readouterr().out == "['--help', 'x']\n"


def test_command_of_another_package_is_listed_without_being_loaded(
    extension: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extension.write_text("raise SystemError('loaded')\n")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "greet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ('SUMMARY = "Greet somebody."\nraise SystemError\n', "greet      Greet somebody."),
        ("raise SystemError\n", "greet      (of an installed extension)"),
        ("SUMMARY = 5\n", "greet      (of an installed extension)"),
        ("def broken(:\n", "greet      (of an installed extension)"),
    ],
)
def test_help_shows_the_summary_of_another_package_without_running_it(
    extension: Path, module: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extension.write_text(module)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"  {line}\n" in capsys.readouterr().out


def said_by(program: str) -> str:
    """By a process of its own, which has imported nothing yet."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_help_says_what_the_other_commands_do_and_imports_none_of_them() -> None:
    program = (
        "import sys; from kvwarehouse.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('imported:', [n for n in sys.modules if n.startswith(('torch', 'kvwarehouse_'))])"
    )
    said = said_by(program)
    assert re.search(r"^  bench +Measure ", said, re.MULTILINE), said
    assert re.search(r"^  demo +Show ", said, re.MULTILINE), said
    assert re.search(r"^  doctor +Say whether ", said, re.MULTILINE), said
    assert "imported: []" in said


def test_package_and_serve_import_nothing_heavy_before_they_need_it() -> None:
    program = (
        "import sys, kvwarehouse, kvwarehouse.cli.serve, kvwarehouse.cli.main, kvwarehouse.config\n"
        "heavy = ('asyncio', 'google', 'grpc', 'numpy')\n"
        "print('imported:', [name for name in heavy if name in sys.modules])\n"
        "missing = [name for name in kvwarehouse.__all__ if not hasattr(kvwarehouse, name)]\n"
        "print('missing:', missing, callable(kvwarehouse.embedded), sorted(dir(kvwarehouse)) != [])"
    )
    said = said_by(program)
    assert "imported: []" in said
    assert "missing: [] True" in said


def test_daemon_without_a_remote_tier_imports_neither_numpy_nor_what_that_tier_needs() -> None:
    said = said_by(
        "import sys, kvwarehouse.daemon\n"
        "needless = ('numpy', 'obstore', 'kvwarehouse.remote.report',"
        " 'kvwarehouse.remote.object_store')\n"
        "print('imported:', [name for name in needless if name in sys.modules])"
    )
    assert "imported: []" in said


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import no_such_module\n", "pip install 'kvw-extension[heavy]'"),
        ("import no_such_module.part\n", "pip install 'kvw-extension[heavy]'"),
        ("import other_missing_thing\n", "other_missing_thing"),
        ("raise RuntimeError('boom')\n", "boom"),
        ("greet = 5\n", "cannot be called"),
        ("", "greet"),
        ("def broken(:\n", "SyntaxError"),
    ],
)
def test_broken_command_of_another_package_is_one_clear_line(
    extension: Path, module: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extension.write_text(module)
    assert main(["greet"]) == Exit.USAGE
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_interrupted_command_ends_with_its_own_status(extension: Path) -> None:
    extension.write_text("def greet(arguments):\n    raise KeyboardInterrupt\n")
    assert main(["greet"]) == Exit.INTERRUPTED
