"""The measurements of the record, played small: what they measure is what they say."""

from bench import explain, replay, verify


def test_what_a_simulation_decides_comes_out_again() -> None:
    told = replay.measure(replay.life(replay.pool(2), 150))
    assert told["decisions_that_differ"] == 0
    assert told["verified_placements_per_s"] > 0
    assert told["events"] > 900


async def test_no_question_reads_a_whole_table_of_the_log(record_url: str) -> None:
    told = await explain.measure(record_url, 30_000, requests=60, asked=3)
    assert told["events_stored"] == 30_000
    assert told["scanned"] == []


async def test_what_was_recorded_of_a_simulation_is_verified_out_of_the_database(record_url: str) -> None:
    told = await verify.measure(record_url, 40, 2, [1])
    assert told["decisions_that_differ"] == 0
    assert told["placements"] > 20
