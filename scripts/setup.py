"""Makes virtual environments of this project, each from its lock: see CONTRIBUTING.md.

    setup.py NAME [NAME ...]         the environments of requirements/environments.toml
    setup.py --latest NAME [...]     the newest that the ranges allow, in FOLDER-latest

The packages of an environment are installed once for each lock and shared by all clones, in
$XDG_CACHE_HOME/kvwarehouse/venvs; a clone's environment is links to them, and this project. Safe to
repeat, and quick when nothing changed: each step compares what it depends on with what it left.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

from environments import (
    ROOT,
    Environment,
    SetupError,
    cache_folder,
    environments,
    locked,
    python_tag,
    run,
    torch_package,
    uv,
)
from lock import write_latest

# An environment of the cache that no clone was made from for so long is removed when the next of
# its name is made.
_UNUSED_S = 30 * 24 * 3600
_SOURCES = (".cc", ".h", ".cmake")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--latest", action="store_true")
    args = parser.parse_args()
    os.chdir(ROOT)
    known = environments()
    for name in args.names:
        environment, lock = known[name], known[name].lock
        folder = ROOT / environment.folder
        if args.latest:
            lock = write_latest(environment, ROOT / "build" / "latest")
            folder = folder.with_name(f"{folder.name}-latest")
        _install(environment, lock, folder)
        if environment.project:
            _install_project(folder)
    return 0


def _install(environment: Environment, lock: Path, folder: Path) -> None:
    key = _key(environment, lock)
    made = folder / ".kvw-made"
    if made.is_file() and made.read_text() == key:
        return
    base = cache_folder() / "venvs" / f"{environment.name}-{key}"
    with locked(base.with_name(f"{base.name}.lock")):
        if not (base / "complete").exists():
            _remove_unused(base)
            _fill(environment, lock, base)
        (base / "complete").touch()
        _say(f"{folder.name}: from the cache, with {_packages(lock)} packages")
        shutil.rmtree(folder, ignore_errors=True)
        link(base, folder)
    made.write_text(key)


def _key(environment: Environment, lock: Path) -> str:
    """What is in an environment, apart from this project."""
    hashed = hashlib.sha256(lock.read_bytes())
    hashed.update(f"{torch_package() if environment.torch else ''} {environment.metadata}".encode())
    hashed.update(f"{python_tag()} {sys.version} {sys.base_prefix}".encode())
    return hashed.hexdigest()[:16]


def _packages(lock: Path) -> int:
    return sum("==" in line for line in lock.read_text("utf-8").splitlines())


def _fill(environment: Environment, lock: Path, base: Path) -> None:
    _say(f"installing {_packages(lock)} packages for {environment.folder}, once for all clones")
    started = time.monotonic()
    run([sys.executable, "-m", "venv", "--clear", base])
    python = base / "bin" / "python"
    run([uv(), "pip", "install", "--quiet", "--python", python, "--no-deps", "--compile-bytecode",
         "--requirements", lock], env=_uv_environment())  # fmt: skip
    if environment.torch:
        run([python, "-m", "pip", "install", "--quiet", "--constraint", lock, torch_package()])
    if environment.metadata:
        _name_again(environment, base)
    _say(f"installed in {time.monotonic() - started:.0f} s")


def _uv_environment() -> dict[str, str]:
    """pip's index and certificates are uv's too, unless it was told others."""
    found = dict(os.environ)
    for ours, pips in (("UV_DEFAULT_INDEX", "PIP_INDEX_URL"), ("SSL_CERT_FILE", "PIP_CERT")):
        if pips in found:
            found.setdefault(ours, found[pips])
    return found


def _name_again(environment: Environment, base: Path) -> None:
    """Metadata of the first package under another name, with "cpu" in the version."""
    package = environment.packages[0].partition("==")[0].replace("-", "_")
    for own in base.glob(f"lib/python3*/site-packages/{package}-*.dist-info"):
        version = own.name.removeprefix(f"{package}-").removesuffix(".dist-info") + "+cpu"
        info = own.with_name(f"{environment.metadata}-{version}.dist-info")
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {environment.metadata}\nVersion: {version}\n"
        )
        (info / "RECORD").write_text("")


def _remove_unused(base: Path) -> None:
    name = base.name.rpartition("-")[0]
    for other in base.parent.glob(f"{name}-*/complete"):
        if time.time() - other.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(other.parent, ignore_errors=True)


def link(base: Path, folder: Path) -> None:
    """A copy of an environment in hard links, so that it costs no room; what names its own folder
    is written anew. Files are never changed in place: pip and uv replace them."""
    old, new = os.fsencode(base), os.fsencode(folder)
    own = {base / "bin", base}
    for at, folders, files in os.walk(base):
        here, there = Path(at), folder / Path(at).relative_to(base)
        there.mkdir(parents=True, exist_ok=True)
        for name in [each for each in folders if (here / each).is_symlink()]:
            os.symlink(os.readlink(here / name), there / name)
        for name in files:
            _link_file(here / name, there / name, (old, new) if here in own else None)
    (folder / "complete").unlink()


def _link_file(source: Path, target: Path, rename: tuple[bytes, bytes] | None) -> None:
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
        return
    content = source.read_bytes() if rename else b""
    if rename and rename[0] in content:
        target.write_bytes(content.replace(*rename))
        shutil.copymode(source, target)
        return
    try:
        os.link(source, target)
    except OSError:  # the cache lies on another filesystem
        shutil.copy2(source, target)


def _install_project(folder: Path) -> None:
    """The native core is built once, and installed into each environment as one wheel."""
    now = _sources_digest()
    stamp = folder / ".kvw-project"
    if stamp.is_file() and stamp.read_text() == now:
        return
    wheel = _editable_wheel(now)
    run([uv(), "pip", "install", "--quiet", "--python", folder / "bin" / "python", "--no-deps",
         "--offline", "--reinstall", wheel])  # fmt: skip
    stamp.write_text(now)


def _sources_digest() -> str:
    """Of all that the native build depends on. Names are part of it: removed files count."""
    hashed = hashlib.sha256(f"{ROOT} {sys.version} {os.environ.get('CXX', '')}".encode())
    native = [
        path
        for path in (ROOT / "native").rglob("*")
        if (path.suffix in _SOURCES or path.name == "CMakeLists.txt")
        and ROOT / "native" / "tests" not in path.parents
    ]
    for path in [ROOT / "pyproject.toml", *sorted(native)]:
        hashed.update(f"{path}\0".encode() + path.read_bytes())
    return hashed.hexdigest()


def _editable_wheel(digest: str) -> Path:
    """The project as an editable installation has it: sources stay where they are."""
    kept, stamp = ROOT / "build" / "wheel", ROOT / "build" / "wheel" / "sources"
    if not (stamp.is_file() and stamp.read_text() == digest):
        _say("building the native core (first time: about a minute)")
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        tools = ROOT / environments()["test"].folder / "bin"
        hook = (
            "import sys; from scikit_build_core.build import build_editable; "
            "build_editable(sys.argv[1], {'build-dir': 'build/editable'})"
        )
        path = os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])
        run([tools / "python", "-c", hook, kept], env={**os.environ, "PATH": path})
        stamp.write_text(digest)
    return next(kept.glob("*.whl"))


def _say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        sys.exit(f"setup: {error}")
