"""Three SGLang servers and a pool on them, and what happens to either."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from secrets import randbelow
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.sglang.pool import BACK_S, NEW_TOKENS, NODE, POLLS, TRIES, Pool, settings_of
from tests.sglang.traffic import mixed_prompts
from tests.support.adapter_servers import DECODE, NOTICES_NO_RESTART, PREFILL, Running, launched, log_of, wait_up
from tests.support.switching_servers import fault, wait_ended

UNITS = 4
ONES = "1,1,1,1"


class World:
    """A prefill server of four units and two decode servers, of which the first never notices that the prefill server was
    restarted, behind `vertumnus up`."""

    def __init__(self, model: Path, directory: Path, stack: ExitStack) -> None:
        self._model, self._directory, self._stack = model, directory, stack
        self.faults = directory / "faults"
        self.faults.mkdir()
        self.prefill = self._prefill(0)
        self.decode = [self._decode(0), self._decode(1)]
        wait_up(self.prefill, *self.decode)
        self.pool = Pool(directory / "data", model, ONES, settings_of(self.prefill, UNITS, self.decode))
        stack.callback(self.end)
        self.pool.run("pin", NODE)  # only who tests changes it
        self.prompts = mixed_prompts(8, seed=21)
        self.expected = self.pool.answers(self.prompts)

    def _prefill(self, life: int, port: int | None = None) -> Running:
        return self._stack.enter_context(
            launched(
                self._model,
                self._directory / f"prefill-{life}.log",
                *PREFILL,
                units=UNITS,
                environment={"VERTUMNUS_SGLANG_FAULTS": str(self.faults)},
                port=port,
            )
        )

    def _decode(self, rank: int, port: int | None = None) -> Running:
        log = self._directory / f"decode-{rank}-{'again' if port else 'first'}.log"
        environment = {} if rank else NOTICES_NO_RESTART
        return self._stack.enter_context(launched(self._model, log, *DECODE, environment=environment, port=port))

    def replace_decode(self, rank: int) -> None:
        """Whoever keeps a decode server that has died starts it again."""
        wait_ended(self.decode[rank])
        self.decode[rank] = self._decode(rank, urlsplit(self.decode[rank].url).port)
        wait_up(self.decode[rank])

    def ask(self, composition: str, holds: Callable[[], bool]) -> None:
        """Ask for a composition until something has come of it inside the server: a busy one may not be ready in time."""
        with ThreadPoolExecutor(1) as asking:
            for _ in range(TRIES):
                asked = asking.submit(self.pool.run, "reconfigure", NODE, composition, fails=None)
                deadline = time.monotonic() + POLLS
                while not asked.done() or time.monotonic() < deadline:
                    if holds():
                        return
                    time.sleep(0.02)
        raise AssertionError(f"nothing came of {composition} in {TRIES} tries")

    def aborted(self) -> Callable[[], bool]:
        """Whether a vote has gone against a switch from now on."""
        before = log_of(self.prefill).count(": abort")
        return lambda: log_of(self.prefill).count(": abort") > before

    def replace_prefill(self) -> None:
        """A server has died, and whoever keeps it starts it again; the node comes back by itself."""
        wait_ended(self.prefill)
        life = int(self.pool.node()["incarnation"])
        self.prefill = self._prefill(life, urlsplit(self.prefill.url).port)
        wait_up(self.prefill)
        self.pool.wait_life(life + 1)
        assert self.pool.answers(self.prompts) == self.expected

    def units(self) -> list[dict[str, Any]]:
        """What each unit says of itself."""
        states = httpx.get(f"{self.prefill.url}/server_info", timeout=300).json()["internal_states"]
        return sorted((each["vertumnus"] for each in states), key=lambda each: int(each["unit"]))

    def pid(self, unit: int) -> int:
        """Of the process of a unit."""
        return int(self.units()[unit]["pid"])

    def composition(self) -> str:
        """What the units serve."""
        return ",".join(str(each["degree"]) for each in self.units() if each["unit"] == each["first_unit"])

    def generate(self, prompt: list[int]) -> list[int]:
        """What somebody is answered who asks both servers without an agent."""
        body = {
            "input_ids": prompt,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": randbelow(2**62),
            "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        }

        def ask(server: Running) -> list[int]:
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=BACK_S)
            return list(answer.raise_for_status().json()["output_ids"])

        with ThreadPoolExecutor(2) as both:
            return list(both.map(ask, (self.prefill, self.decode[0])))[1]

    def kill_agent(self, after: str, composition: str) -> int:
        """Ask for a composition, and kill the agent behind this verb. The epoch by which the server knows it."""
        before = max(each["epoch"] for each in self.units())
        agent, last = self.pool.up.child("services.worker"), self.pid(3)

        def killed() -> bool:
            """While a unit has stopped before its vote, or units are asked again and again whether they are ready."""
            if not (_is_stopped(last) if after == "commit" else max(each["epoch"] for each in self.units()) > before):
                return False
            os.kill(agent, signal.SIGKILL)
            if after == "commit":
                os.kill(last, signal.SIGCONT)
            return True

        with fault(self.faults, "refuse-2" if after == "prepare" else "stop-3"):
            self.ask(composition, killed)
        return int(max(each["epoch"] for each in self.units()))

    def end(self) -> None:
        """Safe to repeat."""
        if self.pool.up.process.poll() is None:
            self.pool.up.end()


def _is_stopped(pid: int) -> bool:
    """By a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
