"""The preallocated cache behaves as the library's own, and never writes what a store reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

from kvwarehouse_connectors.transformers.room import RoomyLayer


@pytest.fixture
def step(torch: Any) -> Any:
    """step(n): keys [1, 2, n, 4] and values [1, 2, n, 6], different each time."""
    generator = torch.Generator().manual_seed(3)
    return lambda tokens: (
        torch.randn(1, 2, tokens, 4, generator=generator),
        torch.randn(1, 2, tokens, 6, generator=generator),
    )


@pytest.fixture
def plain(transformers: Any) -> Any:
    return transformers.cache_utils.DynamicLayer()


def test_layer_has_what_the_librarys_has_after_every_step(
    torch: Any, plain: Any, step: Any
) -> None:
    layer = RoomyLayer(8)
    actions: list[Any] = [5, 1, 1, 4, -3, 2, 20, -1, 1]
    for action in actions:
        if action > 0:
            keys, values = step(action)
            got, expected = layer.update(keys, values), plain.update(keys, values)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])
        else:
            layer.crop(action)
            plain.crop(action)
        assert layer.get_seq_length() == plain.get_seq_length()
        assert torch.equal(layer.keys, plain.keys)


def test_empty_layer_can_be_cropped_and_reset(step: Any) -> None:
    layer = RoomyLayer(8)
    layer.crop(-1)
    layer.reset()
    layer.crop(-1)
    layer.update(*step(3))
    assert layer.get_seq_length() == 3


def test_layer_that_was_reset_begins_anew(torch: Any, step: Any) -> None:
    """As the library's in 5.24; in 5.16 its tokens stay there as zeros."""
    layer = RoomyLayer(8)
    layer.update(*step(5))
    layer.reset()
    assert layer.get_seq_length() == 0
    keys, values = step(2)
    got = layer.update(keys, values)
    assert torch.equal(got[0], keys)
    assert torch.equal(got[1], values)


def test_layer_does_not_move_while_its_room_suffices(step: Any) -> None:
    layer = RoomyLayer(8)
    layer.update(*step(5))
    at = layer.keys.data_ptr()
    for _ in range(3):
        layer.update(*step(1))
    assert layer.keys.data_ptr() == at


def test_held_tokens_are_not_written_again(torch: Any, step: Any) -> None:
    layer = RoomyLayer(8)
    layer.update(*step(6))
    layer.hold(4)
    rooms = layer.rooms
    before = [room[:, :, :4].clone() for room in rooms]
    layer.crop(-4)
    layer.update(*step(3))
    assert layer.get_seq_length() == 5
    assert all(torch.equal(room[:, :, :4], old) for room, old in zip(rooms, before, strict=True))


def test_held_tokens_stay_when_the_layer_is_reset(torch: Any, step: Any) -> None:
    """transformers 5.16 wrote zeros over them: a store that was still to come stored those."""
    layer = RoomyLayer(8)
    layer.update(*step(6))
    layer.hold(4)
    rooms = layer.rooms
    before = [room[:, :, :4].clone() for room in rooms]
    layer.reset()
    layer.update(*step(3))
    assert all(torch.equal(room[:, :, :4], old) for room, old in zip(rooms, before, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda torch, layer: layer.batch_repeat_interleave(3),
        lambda torch, layer: layer.reorder_cache(torch.tensor([0, 0])),
    ],
    ids=["repeat", "reorder"],
)
def test_layer_goes_on_as_the_librarys_after_its_tensors_were_replaced(
    torch: Any, plain: Any, step: Any, change: Any
) -> None:
    layer = RoomyLayer(8)
    first = step(3)
    for one in (layer, plain):
        one.update(*first)
        change(torch, one)
    keys, values = step(2)
    batch = plain.keys.shape[0]
    keys, values = keys.repeat(batch, 1, 1, 1), values.repeat(batch, 1, 1, 1)
    assert torch.equal(layer.update(keys, values)[0], plain.update(keys, values)[0])
    assert layer.get_seq_length() == plain.get_seq_length()


def test_copy_of_a_layer_does_not_share_its_room(torch: Any, step: Any) -> None:
    layer = RoomyLayer(8)
    layer.update(*step(3))
    twin = copy.deepcopy(layer)
    layer.update(*step(1))
    kept = layer.keys.clone()
    twin.update(*step(2))
    assert twin.get_seq_length() == 5
    assert torch.equal(layer.keys, kept)


def test_layer_made_under_inference_mode_takes_steps_outside_of_it(torch: Any, step: Any) -> None:
    layer = RoomyLayer(8)
    with torch.inference_mode():
        layer.update(*step(3))
    with torch.no_grad():
        layer.update(*step(1))
    assert layer.get_seq_length() == 4
