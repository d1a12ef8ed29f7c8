"""When a server is given up: each row of `health`, by hand."""

from services.worker.engine.sglang.health import REFUSED_MAX, UNANSWERED_MAX, Vitals

SECOND = 10**9


def vitals() -> Vitals:
    return Vitals("http://n:1", "boot 1", 60 * SECOND)


def test_the_first_answer_may_be_another_life_s_than_was_joined() -> None:
    server = vitals()
    assert server.doubtful
    server.answered("boot 1")
    assert not server.doubtful
    assert server.verdict(0) is None


def test_one_probe_that_is_lost_is_nothing() -> None:
    server = vitals()
    server.answered("boot 1")
    server.failed("refused", "closed")
    assert server.doubtful
    server.answered("boot 1")
    server.failed("refused", "closed")
    assert server.verdict(0) is None


def test_a_closed_port_is_believed_the_second_time() -> None:
    server = vitals()
    for _ in range(REFUSED_MAX):
        assert server.verdict(0) is None
        server.failed("refused", "closed")
    assert server.verdict(0) == "http://n:1 does not answer: closed"


def test_silence_takes_longer_to_be_believed() -> None:
    server = vitals()
    for _ in range(UNANSWERED_MAX):
        assert server.verdict(0) is None
        server.failed("unanswered", "timed out")
    assert server.verdict(0) == "http://n:1 does not answer: timed out"


def test_a_refusal_between_silences_begins_anew() -> None:
    server = vitals()
    for failure in ("refused", "unanswered", "refused", "unanswered"):
        server.failed(failure, "x")
    assert server.verdict(0) is None


def test_another_life_is_not_the_server_that_was_joined() -> None:
    server = vitals()
    server.answered("boot 2")
    assert server.verdict(0) == "http://n:1 was restarted"


def test_events_that_begin_anew_say_the_same() -> None:
    server = vitals()
    server.restarted()
    assert server.verdict(0) == "http://n:1 was restarted"


def test_lost_processes_are_believed_at_once() -> None:
    server = vitals()
    server.lost_processes([17])
    assert server.verdict(0) == "http://n:1 has lost its processes [17]"


def test_schedulers_that_say_nothing_hang() -> None:
    server = vitals()
    assert server.verdict(10**12) is None, "one that publishes no load is not judged by it"
    server.heard(0, 100 * SECOND)
    assert server.verdict(160 * SECOND) is None
    assert server.verdict(161 * SECOND) == "http://n:1: the scheduler of rank 0 has not run for 61 s"


def test_one_scheduler_that_hangs_is_not_hidden_by_the_others() -> None:
    server = vitals()
    for second in range(100, 162):
        server.heard(0, second * SECOND)
    server.heard(1, 100 * SECOND)
    assert server.verdict(160 * SECOND) is None
    assert server.verdict(161 * SECOND) == "http://n:1: the scheduler of rank 1 has not run for 61 s"


def test_a_verdict_stands() -> None:
    server = vitals()
    server.lost_processes([17])
    server.answered("boot 1")
    server.heard(0, 0)
    assert server.verdict(0) == "http://n:1 has lost its processes [17]"
