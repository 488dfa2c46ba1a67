"""The namespaces of the models behind one LMCache server: everything a chunk depends on besides its
tokens, as far as LMCache tells it.

LMCache's keys name model, rank, group, salt and chunk, and neither the weights nor a type: the
weights come from the settings, types and shapes from the layouts that come with the chunks. A field
too many costs a miss, a field left out could cost a wrong answer.

Thread-safe. `weights_of` reads the files of the weights, so not on a thread that anybody waits for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import kvwarehouse as kvw
from kvwarehouse_connectors.core.identity import checkpoint_fingerprint, digest_of
from kvwarehouse_connectors.lmcache.chunks import ChunkLayout, ObjectKey
from kvwarehouse_connectors.lmcache.settings import WHERE, Settings

_log = logging.getLogger(__name__)

LAYOUT = "lmcache/1"
"""A chunk's tensors as LMCache has them in its L1, one after another."""
HASH_SCHEME = "lmcache"
_BY_NAME = "told by LMCache's name of the model"
# A daemon keeps up to 4,096 for all its clients.
_MOST_SPACES = 256


@dataclass(frozen=True)
class Weights:
    """by_model: names or fingerprints. others: of models that it has not; "": they are refused."""

    by_model: Mapping[str, str]
    others: str = ""

    def of(self, model: str) -> str:
        return self.by_model.get(model, self.others)


def weights_of(settings: Settings) -> Weights:
    """Raises UsageError (code "no_weights") where nothing names the weights, or where the files to
    be fingerprinted are not there."""
    by_model = {
        model: checkpoint_fingerprint(path, None, None, WHERE)
        for model, path in settings.checkpoints.items()
    }
    others = ""
    if isinstance(settings.weights, str):
        others = settings.weights
    else:
        by_model = {**by_model, **settings.weights}
    if not others and settings.trust_model_names:
        others = _BY_NAME
        _log.warning(
            "kvwarehouse: kvwarehouse.trust_model_names is set: where the weights of a model change"
            " under its name, what was computed with the old ones is loaded"
        )
    if not by_model and not others:
        raise kvw.UsageError(
            "kvwarehouse cannot tell which weights LMCache's chunks were computed with, its keys do"
            f" not say. In {WHERE} set kvwarehouse.checkpoints (model to path, which is"
            " fingerprinted), kvwarehouse.weights (a name that changes whenever they do), or"
            " kvwarehouse.trust_model_names: true where the models' names are enough",
            code="no_weights",
        )
    return Weights(by_model, others)


class Spaces:
    """version: of LMCache, which decides hashes and the order of bytes."""

    def __init__(self, weights: Weights, salt: str, version: str) -> None:
        self._weights = weights
        self._salt = salt
        self._version = version
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, int, ChunkLayout], kvw.Namespace | None] = {}
        self._warned = False

    def space(self, key: ObjectKey, layout: ChunkLayout) -> kvw.Namespace | None:
        """Of that key's chunk; None, which was logged once, where it cannot be served."""
        name = key.model_name, key.kv_rank, key.object_group_id, layout
        with self._lock:
            if name not in self._known:
                if len(self._known) >= _MOST_SPACES:
                    self._warn_full()
                    return None
                self._known[name] = self._made(key, layout)
            return self._known[name]

    def _made(self, key: ObjectKey, layout: ChunkLayout) -> kvw.Namespace | None:
        weights = self._weights.of(key.model_name)
        if not weights:
            _log.warning(
                "kvwarehouse: nothing of model %r is stored or loaded: nothing names its weights."
                " Add it to kvwarehouse.checkpoints or kvwarehouse.weights in %s",
                key.model_name,
                WHERE,
            )
            return None
        try:
            return self._namespace(key, layout, weights)
        except kvw.UsageError as error:
            _log.warning("kvwarehouse: chunks of %r cannot be kept: %s", key.model_name, error)
            return None

    def _namespace(self, key: ObjectKey, layout: ChunkLayout, weights: str) -> kvw.Namespace:
        return kvw.Namespace(
            model=key.model_name,
            weights=weights,
            dtype="+".join(dict.fromkeys(layout.dtypes)),
            layout=LAYOUT,
            # LMCache tells an adapter no chunk size: figures in tokens are figures in chunks.
            page_tokens=1,
            page_bytes=layout.size_bytes,
            cache_group=str(key.object_group_id),
            salt=self._salt,
            hash_scheme=HASH_SCHEME,
            extra={
                "kv_rank": f"{key.kv_rank:#010x}",
                "lmcache": self._version,
                "tensors": digest_of([layout.shapes, layout.dtypes]),
            },
        )

    def _warn_full(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "kvwarehouse: more than %d kinds of chunks (model, rank, group, layout) came by;"
                " the newest are neither stored nor loaded",
                _MOST_SPACES,
            )
