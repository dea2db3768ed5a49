# cython: language_level=3
"""Coroutines compiled by Cython. For ``cython_chains.py``."""


async def nothing():
    pass


async def relay(inner):
    return await inner


async def second(inner):
    await nothing()
    return await inner


async def stream(inner):
    yield 1
    yield await inner


async def consume(inner):
    async for _ in stream(inner):
        pass


class Room:
    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        return None


async def in_a_room(inner):
    async with Room():
        return await inner


cdef class Box:
    async def method(self, inner):
        return await inner


def closure(inner):
    async def nested():
        return await relay(inner)

    return nested()


async def blocks(call):
    call()
