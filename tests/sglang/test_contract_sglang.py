"""The contract of every engine, on a real server of four units with our plug-in."""

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from services.worker.engine.protocol import Engine
from services.worker.engine.sglang.engine import SglangEngine
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock
from tests.services.worker.engine.contract import EngineContract, Node
from tests.sglang.adapter_requests import ON_REAL_SERVERS, settings_for
from tests.support.adapter_servers import Running

pytestmark = ON_REAL_SERVERS

UNITS, BLOCKS = 4, 64
QUEUES = "SGLang queues what finds no room, and ends no step with `OutOfBlocks`"
SEEDS = "choice depends on the seed alone only with --enable-deterministic-inference, whose kernels are not for CPUs"

DIFFERENT = {
    "test_a_step_is_refused_whole_if_one_prompt_has_no_room": QUEUES,
    "test_a_begun_prompt_has_room_for_its_end": QUEUES,
    "test_a_prompt_without_room_changes_nothing": QUEUES,
    "test_a_finished_prefill_stays_pinned_until_release": QUEUES,
    "test_evicts_under_pressure_and_says_what": "its cache evicts by itself and by its own size; what has gone is told by the"
    " next step or when the agent asks (`test_adapter_static.py`)",
    "test_blocks_without_an_id_are_computed_and_not_stored": "they are held, and found again by a prompt that names them",
    "test_a_prefix_that_two_requests_of_a_step_share_is_stored_once": "whether the second one finds the first one's pages is"
    " up to its scheduler",
    "test_an_unfinished_prompt_goes_on_after_a_switch": "KV is whole on every rank, so a merge keeps what all of them have"
    " (`test_adapter_switching.py`)",
    "test_a_switch_keeps_what_the_new_workers_can_reach": "the same",
    "test_hand_off_needs_a_finished_prefill": "a hand-off within one server has no bytes (`test_adapter_decode.py`)",
    "test_a_closed_decode_makes_room_for_the_same_request": "it generates once",
    "test_sampling_depends_on_the_seed_and_nothing_else": SEEDS,
}
"""What of the contract SGLang does in another way, and which test shows how."""


class TestSglang(EngineContract):
    deadline_s = 600

    @pytest.fixture(autouse=True)
    def _applies(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        if (why := DIFFERENT.get(name)) is not None:
            pytest.skip(why)
        if "sampling" in request.fixturenames and request.getfixturevalue("sampling").temperature:
            pytest.skip(SEEDS)

    @pytest.fixture
    def new_engine(self, model: Path, four_units: Running) -> Callable[[], Engine]:
        """Engines that find the server's caches empty."""
        flush(four_units)
        return lambda: SglangEngine(
            settings_for(model, four_units, UNITS, blocks=BLOCKS), SystemClock(), random.SystemRandom()
        )

    @pytest.fixture(autouse=True)
    def _server(self, four_units: Running) -> None:
        self.server = four_units

    async def _push_out(self, node: Node, group: Group) -> None:
        """Its pages are more than 64 blocks; nobody has named what else lies there."""
        flush(self.server)
        while node.engine.resident(group).runs:
            node.engine.take_evicted(group)
            await SystemClock().sleep(0.05)

    def test_what_differs_is_part_of_the_contract(self) -> None:
        assert all(hasattr(EngineContract, name) for name in DIFFERENT)


def flush(running: Running) -> None:
    """Once nothing runs."""
    httpx.post(f"{running.url}/flush_cache?timeout=300", timeout=400).raise_for_status()
