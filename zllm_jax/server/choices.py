"""Several answers to one prompt, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from zllm_jax.protocol.call import Call
from zllm_jax.server.calls import Calls
from zllm_jax.values import Delta

Deltas = AsyncGenerator[Delta, None]
Numbered = AsyncGenerator[tuple[int, Delta], None]


async def open_choices(calls: Calls, several: Sequence[Call]) -> tuple[Delta, Numbered]:
    """Start the calls: the first delta of the first one, and a stream of all deltas, each with its call's number.

    The others start once the first has its first token: what it computed of the prompt is there for them. Closing the
    stream cancels all, and so does an exception of one, which it raises.
    """
    first, rest = await calls.open(several[0])
    opened = _continued(first, rest)
    return first, _side_by_side(calls, opened, several[1:]) if several[1:] else _alone(opened)


async def _alone(deltas: Deltas) -> Numbered:
    async with aclosing(deltas):
        async for delta in deltas:
            yield 0, delta


async def _side_by_side(calls: Calls, opened: Deltas, others: Sequence[Call]) -> Numbered:
    streams = [opened, *(_opening(calls, call) for call in others)]
    arrived: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(len(streams))  # a slow reader is waited for

    async def read(number: int, stream: Deltas) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await arrived.put((number, delta))
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        going = len(streams)
        while going:
            found = await arrived.get()
            if isinstance(found, Exception):
                raise found
            going -= found[1].envelope is not None
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _opening(calls: Calls, call: Call) -> Deltas:
    async with aclosing(_continued(*await calls.open(call))) as deltas:
        async for delta in deltas:
            yield delta


async def _continued(first: Delta, rest: Deltas) -> Deltas:
    async with aclosing(rest):
        yield first
        async for delta in rest:
            yield delta
