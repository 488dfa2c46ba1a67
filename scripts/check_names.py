"""Checks that a class name means one thing: no two classes of the distribution share theirs.

    python scripts/check_names.py           # run by `make lint`
    python scripts/check_names.py --write   # takes off the list what is no longer repeated

The names that were repeated when the check was made are in repeated_class_names.txt, each with how
many classes have it. That list only shrinks: a name that is repeated more often than it says fails,
and so does one that is repeated less often, until the list says so.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvwarehouse", "connectors/kvwarehouse_connectors", "bench/kvwarehouse_bench")
ALLOWED = Path("scripts/repeated_class_names.txt")
_GENERATED = Path("kvwarehouse/wire/generated")


def main() -> int:
    repeated = {name: places for name, places in classes(ROOT).items() if len(places) > 1}
    allowed = read_allowed(ROOT / ALLOWED)
    if "--write" in sys.argv[1:]:
        allowed = {
            name: min(most, len(repeated[name]))
            for name, most in allowed.items()
            if name in repeated
        }
        (ROOT / ALLOWED).write_text(
            "".join(f"{name} {allowed[name]}\n" for name in sorted(allowed))
        )
    problems = list(problems_of(repeated, allowed))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def classes(root: Path) -> dict[str, list[str]]:
    """Where each class name of the packages below `root` is defined: FILE:LINE, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            where = path.relative_to(root)
            if where.is_relative_to(_GENERATED):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{where}:{node.lineno}")
    return dict(found)


def read_allowed(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {name: int(most) for name, most in lines}


def problems_of(repeated: Mapping[str, list[str]], allowed: Mapping[str, int]) -> Iterator[str]:
    """repeated: the places of each name that has more than one."""
    for name, places in sorted(repeated.items()):
        if len(places) > allowed.get(name, 1):
            yield f"class {name} is defined {len(places)} times; rename one: {', '.join(places)}"
    for name, most in sorted(allowed.items()):
        if len(repeated.get(name, ())) < most:
            yield (
                f"{ALLOWED} allows {most} classes named {name}, and there are fewer:"
                " run scripts/check_names.py --write"
            )


if __name__ == "__main__":
    sys.exit(main())
