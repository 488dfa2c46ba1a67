"""Which of several warehouses has how much of a prompt, asked from an event loop: the twin of
who_has in kvwarehouse/client/routing.py. Stateless."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from kvwarehouse.aio.life import Life
from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.client.endpoint import Credentials, checked_timeout
from kvwarehouse.client.routing import Answer, AskOne, Question, questions
from kvwarehouse.errors import WarehouseError


async def who_has(
    addresses: Sequence[str],
    question: Question,
    *,
    token: str | None = None,
    tls: bool | str | os.PathLike[str] | None = None,
    timeout_s: float = 1.0,
) -> list[Answer]:
    """As kvwarehouse.client.routing.who_has: what each warehouse has, in the order of `addresses`,
    asked all at once, within about `timeout_s`. Cancelling it cancels every call."""
    timeout_s = checked_timeout(timeout_s)
    asked = questions(addresses, question, Credentials(token, tls))
    until = time.monotonic() + timeout_s
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(_ask(one, until)) for one in asked]
    return [each.result() for each in answers]


async def _ask(one: AskOne, until: float) -> Answer:
    began = time.monotonic()
    if until <= began:
        return one.unasked()
    channel = AsyncChannel(one.where, one.credentials, until - began, Life())
    try:
        return await channel.ask(one.call(began))
    except WarehouseError as error:
        return one.failed(error, began)
    finally:
        await channel.close()
