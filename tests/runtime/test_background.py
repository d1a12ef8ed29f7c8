"""A task beside the server: stopped quietly, or failed aloud."""

import asyncio

from shared.runtime.background import Background


async def test_a_failure_is_told_and_so_is_an_end_that_nobody_asked_for() -> None:
    async def fails() -> None:
        raise OSError("broken")

    failing, ending = Background("failing"), Background("ending")
    failing.start(fails())
    ending.start(asyncio.sleep(0))
    assert str(await failing.failed()) == "broken"
    assert str(await ending.failed()) == "ending ended"


async def test_it_is_stopped_whether_or_not_it_was_started() -> None:
    stopped = asyncio.Event()

    async def works() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    work = Background("work")
    await work.stop()
    work.start(works())
    await asyncio.sleep(0)
    await work.stop()
    assert stopped.is_set()
