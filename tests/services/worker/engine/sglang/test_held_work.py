"""Work and aborts that wait for a switch to end."""

from services.worker.engine.sglang.plugin.waiting import WAITING_MAX, Waiting


class Socket:
    """What it was sent."""

    def __init__(self) -> None:
        self.got: list[object] = []

    def send_pyobj(self, message: object, flags: int = 0) -> None:
        assert flags == 0
        self.got.append(message)

    def send(self, octets: bytes) -> None:
        self.got.append(octets)


def test_units_that_merged_get_everything_in_the_order_in_which_it_came() -> None:
    waiting, leader = Waiting(), Socket()
    left, right = waiting.keeper(0), waiting.keeper(1)
    left.send_pyobj("first", flags=0)
    right.send(b"second")
    for keeper in (left, right):
        keeper.send_pyobj("abort all", flags=0)
    left.send_pyobj("came later", flags=0)
    waiting.flush({0: leader, 1: leader})
    assert leader.got == ["first", b"second", "abort all", "abort all", "came later"]
    waiting.flush({0: leader, 1: leader})
    assert leader.got[5:] == []


def test_what_waits_for_other_units_stays() -> None:
    waiting, mine, other = Waiting(), Socket(), Socket()
    for unit in (1, 0, 1):
        waiting.keeper(unit).send_pyobj(unit)
    waiting.flush({0: mine})
    assert (mine.got, other.got) == ([0], [])
    waiting.flush({1: other})
    assert (mine.got, other.got) == ([0], [1, 1])


def test_the_line_says_when_it_is_full() -> None:
    waiting, socket = Waiting(), Socket()
    for number in range(WAITING_MAX):
        assert not waiting.full
        waiting.keeper(number % 4).send_pyobj(number)
    assert waiting.full
    waiting.flush(dict.fromkeys(range(4), socket))
    assert socket.got == list(range(WAITING_MAX))
    assert not waiting.full
