"""The demo's table, its remarks and its verdict, out of figures made by hand."""

import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from cli.demo.halves import Half, real, scale
from cli.demo.running import Ran, Verdict
from cli.demo.table import Figures, figures, passed, remarks, table
from cli.embedded.moving import Moved
from cli.trace.measuring import OK, Outcome, report
from services.ledger.audit import Audit

RIGHT = Verdict(answers=2, positions=16, equal=15, within_gap=1, mismatches=0)


def outcome(kind: str = OK, message: str = "", late_s: float = 0.0, ttft_s: float = 0.2) -> Outcome:
    return Outcome(kind, message, 1000, 8, 250, late_s, ttft_s, 0.7)


def ran(
    half: Half,
    *outcomes: Outcome,
    audit: Audit | None = None,
    verdict: Verdict | None = None,
    moved: Sequence[Moved] = (),
) -> Ran:
    record = audit or Audit(events=1234, requests=2, by_end=Counter({"request-completed": 2}))
    return Ran(half, report(outcomes or (outcome(), outcome()), 10.0, half), record, verdict, moved)


REAL, SCALE = real(Path("model")), scale()


def shown(told: dict[str, Figures], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(told))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_times_are_those_of_the_system_that_the_half_stands_for() -> None:
    told = figures(ran(SCALE, outcome(late_s=0.1), outcome()))
    assert told["ttft_s"]["mean"] == pytest.approx(SCALE.speedup * 0.25)
    assert told["tpot_s"]["mean"] == pytest.approx(SCALE.speedup * 0.1)
    assert told["cached_share"] == 0.25
    assert (told["answered"], told["failed"], told["refused"]) == (2, 0, 0)
    json.dumps(told)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_terminal_and_shows_both_halves(width: int) -> None:
    reconfigured = Audit(events=98_765, by_type=Counter({"reconfiguration-planned": 3, "replica-installed": 4}))
    moved = [Moved((1, 1, 2, 2, 2), 0.5, 0.001), Moved((1, 1, 2, 4), 1.25, 0.02), Moved((1, 1, 2, 4), why_not="frozen")]
    told = {
        REAL.name: figures(ran(REAL, verdict=RIGHT, moved=moved)),
        SCALE.name: figures(ran(SCALE, audit=reconfigured)),
    }
    lines = shown(told, width).splitlines()
    assert max(map(len, lines)) <= width
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:4]] for line in lines if "│" in line
    }
    assert cells["requests answered"] == ["2 of 2", "2 of 2"]
    assert cells["TTFT P99, s"] == ["0.20", "1.00"]
    assert cells["tokens as transformers chooses"] == ["15 of 16, 1 undecided", "no tensors"]
    assert cells["reconfigurations, replications"] == ["0, 0", "3, 4"]
    assert cells["split and merge: drains, s"] == ["0.50, 1.25", "none"]
    assert cells["split and merge: switches, s"] == ["0.001, 0.020", "none"]
    assert cells["events on record"] == ["1,234", "98,765"]
    assert cells["audit of the record"] == ["clean", "clean"]


def test_a_half_without_an_answer_has_a_column_too() -> None:
    told = {REAL.name: figures(ran(REAL, outcome("connect", "refused")))}
    assert "–" in shown(told, 80)
    assert not passed(told[REAL.name])


BROKEN = Audit(violation_count=1, violations=["request r: received and never ended"])


@pytest.mark.parametrize(
    ("run", "good"),
    [
        (ran(REAL, verdict=RIGHT), True),
        (ran(SCALE), True),
        (ran(SCALE, outcome(), outcome("http-429", "slow down")), True),
        (ran(SCALE, outcome("http-503", "no worker")), False),
        (ran(SCALE, outcome(), outcome("truncated")), False),
        (ran(REAL, verdict=Verdict(answers=2, positions=16, equal=15, mismatches=1)), False),
        (ran(SCALE, audit=BROKEN), False),
    ],
    ids=["exact", "modelled", "one refused", "all refused", "one failed", "a wrong token", "a violation"],
)
def test_a_half_passes_when_it_answers_right_and_records_all_of_it(run: Ran, good: bool) -> None:
    assert passed(figures(run)) is good


def test_remarks_name_what_went_wrong_and_a_machine_that_is_too_slow() -> None:
    slow = [outcome(late_s=3.0), outcome("http-503", "no [worker] is left")]
    aborted = [Moved((4, 4), why_not="took longer than 15 s")]
    told = {"quick": figures(ran(REAL)), "slow": figures(ran(SCALE, *slow, audit=BROKEN, moved=aborted))}
    assert remarks(told) == [
        "slow: 1 × http-503: no [worker] is left",
        "slow: request r: received and never ended",
        "slow: a reconfiguration was aborted: took longer than 15 s",
        "slow: this machine could not send the requests in time (on average 7.50 s late, which TTFT includes)",
    ]
