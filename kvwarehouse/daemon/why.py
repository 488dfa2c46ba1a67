"""Why: what namespaces have of a prompt, why the rest is not there, and what is in its place.
Thread-safe; changes nothing, and counts as no lookup."""

from __future__ import annotations

from typing import Any, Final

from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.daemon.who_has import FoundPrefix, FoundPrefixes
from kvwarehouse.errors import UsageError
from kvwarehouse.wire import fill
from kvwarehouse.wire import warehouse_pb2 as pb

MAX_EXPLAINED: Final = 8
MAX_RUNS: Final = 1000


class Why:
    def __init__(self, warehouse: DaemonWarehouse, prefixes: FoundPrefixes) -> None:
        self._warehouse = warehouse
        self._prefixes = prefixes

    def answer(self, request: pb.WhyRequest) -> pb.WhyResponse:
        """Raises UsageError as FoundPrefixes.of, and where the namespace that is named knows its
        pages by keys and tokens are given, or the other way round."""
        held = self._prefixes.of(request)
        if request.WhichOneof("of") == "namespace_id" and held:
            held[0].whole.check_kind()
        # Of those that have nothing of it, the youngest: it is asked about what happened lately.
        held.sort(key=lambda each: (-each.pages, -each.whole.record.created_at_ns))
        explained = []
        for each in held[:MAX_EXPLAINED]:
            try:
                explained.append(self._explained(each, with_tokens=request.with_tokens))
            except UsageError as error:
                # Forgotten meanwhile.
                if error.code != "namespace_unknown" or request.namespace_id:
                    raise
        explained.sort(key=_most_to_say)
        return pb.WhyResponse(namespaces=explained, others=max(0, len(held) - MAX_EXPLAINED))

    def _explained(self, held: FoundPrefix, *, with_tokens: bool) -> pb.PromptWhy:
        whole = held.whole
        report = self._warehouse.why(whole.record, whole.tokens, whole.keys)
        branches = fill(pb.Branches(), _without_tokens(report["branches"]))
        if with_tokens:
            branches.tokens.extend(report["branches"]["tokens"])
        return pb.PromptWhy(
            namespace=self._warehouse.info(whole.record),
            pages=whole.pages,
            found=report["found"],
            # The core's answer is younger than the look at the store.
            remote_pages=held.remote_pages if held.pages == report["found"] else 0,
            runs=[fill(pb.WhyRun(), run) for run in report["runs"][:MAX_RUNS]],
            branches=branches,
        )


def _most_to_say(explained: pb.PromptWhy) -> tuple[int, int, int]:
    """To sort by: the longest prefix, the prompt that is most alike, what is known to have left."""
    remembered = sum(run.pages for run in explained.runs if run.state in ("left", "refused"))
    return -explained.found, -explained.branches.common_tokens, -remembered


def _without_tokens(branches: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in branches.items() if name != "tokens"}
