"""The measurements of the record, played small: what they measure is what they say."""

from bench import explain, replay


def test_what_a_simulation_decides_comes_out_again() -> None:
    told = replay.measure(replay.life(replay.pool(2), 150))
    assert told["decisions_that_differ"] == 0
    assert told["verified_placements_per_s"] > 0
    assert told["events"] > 900


async def test_no_question_reads_a_whole_table_of_the_log(record_url: str) -> None:
    told = await explain.measure(record_url, 30_000, requests=60, asked=3)
    assert told["events_stored"] == 30_000
    assert told["scanned"] == []
