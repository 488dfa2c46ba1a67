#!/usr/bin/env bash
# Everything that judges the sources without running them. All judges speak before it fails.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv-lint/bin}
build=${BUILD:-build/editable}
jobs=${JOBS:-2}
failed=()

judge() {
  local name=$1
  shift
  echo "lint: $name"
  "$@" || failed+=("$name")
}

native_format() {
  find native \( -name '*.h' -o -name '*.cc' \) -print0 |
    xargs -0 "$bin/clang-format" --dry-run -Werror
}

judge "ruff check" "$bin/ruff" check --quiet .
judge "ruff format" "$bin/ruff" format --check --quiet .
judge "mypy --strict" env MYPYPATH=connectors:bench:tests/support "$bin/mypy" --strict kvwarehouse connectors bench tests/support/testkit
judge "import layers" env PYTHONPATH=connectors:bench "$bin/lint-imports" --no-logo --cache-dir build/import_linter
judge "class names" "$bin/python" scripts/check_names.py
judge "documents" "$bin/python" scripts/check_docs.py
judge "locks" "$bin/python" scripts/lock.py --check
judge "generated code" "$bin/python" scripts/generate_proto.py --check
judge "dashboards" "$bin/python" scripts/dashboards.py --check
judge "clang-format" native_format
judge "clang-tidy" "$bin/python" scripts/run_clang_tidy.py "$build" --jobs "$jobs"

[ ${#failed[@]} -eq 0 ] && echo "lint: clean" && exit 0
echo "lint: failed: $(IFS=,; echo "${failed[*]}")" >&2
exit 1
