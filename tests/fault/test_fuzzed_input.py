"""Hostile input to what is in Python: requests of the gRPC service, settings, the small files, the
ledger's records, traces. The corpus of each target (tests/fuzz/corpus), then changes of it that
follow from the seed; `make fuzz` runs the same targets for longer. Native ones: native/fuzz."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from testkit import fuzz, fuzz_targets, tally

pytestmark = pytest.mark.timeout(600)

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"

# Inputs beside the corpus: what takes each about half a second.
USUAL = {
    "settings": 150,
    "identity_or_epoch": 500,
    "ledger_records": 2000,
    "trace_file": 250,
    "service": 800,
}


def test_every_target_has_a_corpus_and_is_run() -> None:
    assert set(USUAL) == set(fuzz_targets.TARGETS)
    assert all((CORPUS / name).is_dir() for name in fuzz_targets.TARGETS)


@pytest.mark.parametrize("name", USUAL)
def test_input_of_noise_is_refused_or_served_and_never_an_internal_error(
    name: str, rng: random.Random
) -> None:
    corpus = fuzz.read_corpus([CORPUS / name])
    inputs = 0
    for data in corpus:
        feed(name, data)
    for _ in range(tally.rounds(USUAL[name])):
        feed(name, fuzz.changed(corpus, rng))
        inputs += 1
    if name == "service":
        fuzz_targets.close_service()
    print(f"{name}: {len(corpus) + inputs} inputs")
    tally.count("hostile input: Python", len(corpus) + inputs)


def feed(name: str, data: bytes) -> None:
    try:
        fuzz_targets.TARGETS[name](data)
    except BaseException as error:
        error.add_note(f"the input was {data!r}; keep it in {CORPUS / name}")
        raise
