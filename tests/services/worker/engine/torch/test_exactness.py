"""Context parallelism, prefix reuse and switches change nothing that arithmetic does not force them to change.

Measured against two references on the same weights: float64 (ours) and `transformers` in float32. The engine may differ from
`transformers` by 1e-3 in any log-probability and from float64 by twice what `transformers` does. (A published system lost
9.5 % NLL silently after re-layouts.)
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.worker.engine.protocol import ItemResult, PrefillItem, PrefillStep, Sampling, StepResult
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.blocks import block_chain
from shared.model.lattice import Group
from tests.support.reference import Reference
from tests.support.tiny_models import VOCAB, write_tiny_model

BLOCK = 16
LENGTHS = (1, 3, 15, 16, 17, 31, 48, 100, 129, 255, 300, 511)
DIFFERENCE_MAX = 1e-3
ALL = Sampling(logprobs=VOCAB - 1)


class Prober:
    """Asks an engine for the full log-probabilities after a prompt. Another `salt` makes a prompt cold again."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.epoch = self.count = 0

    async def adopt(self, *composition: int) -> None:
        self.epoch += 1
        await self.engine.adopt(self.epoch, composition)

    def item(self, tokens: np.ndarray, salt: str) -> PrefillItem:
        self.count += 1
        return PrefillItem(RequestId(f"r{self.count}"), tokens, tuple(block_chain(tokens, BLOCK, salt.encode())), ALL)

    async def step(self, group: Group, *items: PrefillItem) -> StepResult:
        return await self.engine.prefill(PrefillStep(self.epoch, group, items))

    async def prefill(self, group: Group, tokens: np.ndarray, salt: str = "", keep: bool = False) -> ItemResult:
        return (await self.prefill_packed(group, [(tokens, salt)], keep))[0]

    async def prefill_packed(
        self, group: Group, prompts: list[tuple[np.ndarray, str]], keep: bool = False
    ) -> tuple[ItemResult, ...]:
        """One step for all of the (tokens, salt)."""
        items = [self.item(tokens, salt) for tokens, salt in prompts]
        results = (await self.step(group, *items)).items
        if not keep:
            for item in items:
                self.engine.release(item.request)
        return results

    async def logprobs(self, group: Group, tokens: np.ndarray, salt: str = "") -> np.ndarray:
        return dense((await self.prefill(group, tokens, salt)).first_token.logprobs)


def dense(logprobs: tuple[tuple[int, float], ...]) -> np.ndarray:
    result = np.full(VOCAB, np.nan)
    for token, logprob in logprobs:
        result[token] = logprob
    assert not np.isnan(result).any()
    return result


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.uint32)


Probing = Callable[..., AbstractAsyncContextManager[Prober]]


@pytest.fixture
def probing(zygote: Zygote) -> Probing:
    @asynccontextmanager
    async def start(model_dir: Path, **settings: float) -> AsyncIterator[Prober]:
        engine = TorchEngine(TorchSettings(model_dir, block_tokens=BLOCK, blocks_per_rank=64, **settings), zygote)  # type: ignore[arg-type]
        await engine.start()
        try:
            yield Prober(engine)
        finally:
            await engine.close()

    return start


class References:
    """Both references' log-probabilities after every prefix of one prompt."""

    def __init__(self, model_dir: Path) -> None:
        tokens = prompt(max(LENGTHS))
        self.exact = Reference(model_dir).logprobs(tokens)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        with torch.inference_mode():
            logits = [model(torch.from_numpy(tokens[:n].astype(np.int64))[None]).logits[0, -1] for n in LENGTHS]
        self.transformers = {n: each.double().log_softmax(0).numpy() for n, each in zip(LENGTHS, logits, strict=True)}


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def family(request: pytest.FixtureRequest) -> tuple[Path, References]:
    model_dir = request.getfixturevalue(f"tiny_{request.param}")
    return model_dir, References(model_dir)


def hits(length: int) -> dict[str, int]:
    """Cached blocks to try: none, about half, all that may be reused."""
    most = (length - 1) // BLOCK
    return {"miss": 0, "partial": most // 2, "near-full": most}


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
async def test_log_probabilities_are_those_of_the_references(
    family: tuple[Path, References], degree: int, probing: Probing
) -> None:
    model_dir, references = family
    tokens, group = prompt(max(LENGTHS)), Group(8 - degree, degree)
    worst, worst_transformers = 0.0, 0.0
    async with probing(model_dir) as prober:
        await prober.adopt(*(8 // degree * (degree,)))
        for length in LENGTHS:
            exact, reference = references.exact[length - 1], references.transformers[length]
            worst_transformers = max(worst_transformers, np.abs(reference - exact).max())
            for name, blocks in hits(length).items():
                salt = f"{length} {name}"
                if blocks:
                    donor = np.concatenate([tokens[: blocks * BLOCK], prompt(5, seed=1)])
                    await prober.prefill(group, donor, salt)
                result = await prober.prefill(group, tokens[:length], salt)
                assert result.cached_tokens == blocks * BLOCK
                found = dense(result.first_token.logprobs)
                assert np.abs(found - reference).max() <= DIFFERENCE_MAX, f"{length} tokens, {name}"
                worst = max(worst, np.abs(found - exact).max())
                second, first = np.sort(exact)[-2:]
                if first - second > DIFFERENCE_MAX:
                    assert result.first_token.token == exact.argmax()
    assert worst <= 2 * worst_transformers, f"off by {worst:.2e}, transformers by {worst_transformers:.2e}"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn-tuned": YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "truncate": False},
}


@pytest.mark.parametrize(
    ("scaling", "written"),
    [("linear", "rope_parameters"), ("yarn", "rope_scaling"), ("yarn-tuned", "rope_parameters")],
)
async def test_scaled_positions_are_those_of_the_references(
    scaling: str, written: str, tmp_path: Path, probing: Probing
) -> None:
    """Both in the newer and in the older way to write them down."""
    model_dir = write_tiny_model(tmp_path, "qwen3")
    config = json.loads((model_dir / "config.json").read_text()) | {"rope_theta": 1e4}
    del config["rope_parameters"]
    config[written] = SCALINGS[scaling] | ({"rope_theta": 1e4} if written == "rope_parameters" else {})
    (model_dir / "config.json").write_text(json.dumps(config))
    references = References(model_dir)
    tokens, lengths = prompt(max(LENGTHS)), (100, 300, 511)
    worst = max(np.abs(references.transformers[length] - references.exact[length - 1]).max() for length in lengths)
    async with probing(model_dir) as prober:
        await prober.adopt(1, 1, 2, 4)
        for length in lengths:
            for group in (Group(0, 1), Group(4, 4)):
                found = await prober.logprobs(group, tokens[:length])
                assert np.abs(found - references.transformers[length]).max() <= DIFFERENCE_MAX
                assert np.abs(found - references.exact[length - 1]).max() <= 2 * worst


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
async def test_bfloat16_is_as_good_as_that_of_transformers(name: str, tmp_path: Path, probing: Probing) -> None:
    model_dir = write_tiny_model(tmp_path, name)
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(model_dir / "model.safetensors").items()}
    save_file({name: tensor.float() for name, tensor in rounded.items()}, model_dir / "model.safetensors")
    exact = Reference(model_dir).logprobs(prompt(300))[-1]
    save_file(rounded, model_dir / "model.safetensors")
    config = (model_dir / "config.json").read_text().replace("float32", "bfloat16")
    (model_dir / "config.json").write_text(config)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(torch.from_numpy(prompt(300).astype(np.int64))[None]).logits[0, -1]
    allowed = 2 * np.abs(logits.double().log_softmax(0).numpy() - exact).max()
    async with probing(model_dir) as prober:
        assert prober.engine.describe().dtype == "bfloat16"
        await prober.adopt(1, 1, 2, 4)
        for group in (Group(0, 1), Group(2, 2), Group(4, 4)):
            assert np.abs(await prober.logprobs(group, prompt(300)) - exact).max() <= allowed
    async with probing(model_dir, collective_byte_cost=0) as prober:
        await prober.adopt(2, 2, 4)
        for group in (Group(0, 2), Group(4, 4)):
            await prober.prefill(group, prompt(300)[: 10 * BLOCK + 1])
            assert np.abs(await prober.logprobs(group, prompt(300)) - exact).max() <= allowed


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
async def test_packed_requests_are_those_of_the_references(
    family: tuple[Path, References], degree: int, probing: Probing
) -> None:
    """Every length in one step, each with a cached prefix of its own."""
    model_dir, references = family
    tokens, group = prompt(max(LENGTHS)), Group(8 - degree, degree)
    worst, worst_transformers = 0.0, 0.0
    async with probing(model_dir) as prober:
        await prober.adopt(*(8 // degree * (degree,)))
        # One worker of degree 1 has no room for all of them at once.
        for lengths in (LENGTHS[::2], LENGTHS[1::2]) if degree == 1 else (LENGTHS,):
            cached = [list(hits(length).values())[turn % 3] for turn, length in enumerate(lengths)]
            for length, blocks in zip(lengths, cached, strict=True):
                if blocks:
                    donor = np.concatenate([tokens[: blocks * BLOCK], prompt(5, seed=1)])
                    await prober.prefill(group, donor, f"{length}")
            results = await prober.prefill_packed(group, [(tokens[:length], f"{length}") for length in lengths])
            assert [result.cached_tokens for result in results] == [blocks * BLOCK for blocks in cached]
            for length, result in zip(lengths, results, strict=True):
                assert result.first_token is not None
                exact, reference = references.exact[length - 1], references.transformers[length]
                found = dense(result.first_token.logprobs)
                assert np.abs(found - reference).max() <= DIFFERENCE_MAX, f"{length} tokens"
                worst = max(worst, np.abs(found - exact).max())
                worst_transformers = max(worst_transformers, np.abs(reference - exact).max())
                second, first = np.sort(exact)[-2:]
                if first - second > DIFFERENCE_MAX:
                    assert result.first_token.token == exact.argmax()
    assert worst <= 2 * worst_transformers, f"off by {worst:.2e}, transformers by {worst_transformers:.2e}"


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
async def test_prompts_in_chunks_are_those_of_the_references(
    family: tuple[Path, References], degree: int, probing: Probing
) -> None:
    """Cold, and behind a prefix that another request has left. (Behind all that may be reused no chunk is left to be cut.)
    Chunks of one block are shorter than 2C tokens at C = 8 and run alone; long ones are cut."""
    model_dir, references = family
    tokens, group = prompt(max(LENGTHS)), Group(8 - degree, degree)
    worst, worst_transformers = 0.0, 0.0
    async with probing(model_dir) as prober:
        await prober.adopt(*(8 // degree * (degree,)))
        cases = ((48, 1, 0), (129, 2, 0), (300, 5, 0), (511, 13, 0), (48, 1, 1), (300, 5, 9), (511, 7, 15))
        for length, chunk_blocks, cached_blocks in cases:
            exact, reference = references.exact[length - 1], references.transformers[length]
            ends = range((cached_blocks + chunk_blocks) * BLOCK, length, chunk_blocks * BLOCK)
            if cached_blocks:
                donor = np.concatenate([tokens[: cached_blocks * BLOCK], prompt(5, seed=1)])
                await prober.prefill(group, donor, f"{length} {cached_blocks}")
            item = prober.item(tokens[:length], f"{length} {cached_blocks}")
            for until in ends:
                (part,) = (await prober.step(group, replace(item, until=until))).items
                assert (part.outcome, part.cached_tokens) == ("unfinished", until - chunk_blocks * BLOCK)
            (last,) = (await prober.step(group, item)).items
            prober.engine.release(item.request)
            assert last.cached_tokens == ends[-1]
            assert last.first_token is not None
            found = dense(last.first_token.logprobs)
            assert np.abs(found - reference).max() <= DIFFERENCE_MAX, f"{length} tokens"
            worst = max(worst, np.abs(found - exact).max())
            worst_transformers = max(worst_transformers, np.abs(reference - exact).max())
    assert worst <= 2 * worst_transformers, f"off by {worst:.2e}, transformers by {worst_transformers:.2e}"


@pytest.mark.parametrize(("name", "degree"), [("qwen3", 1), ("qwen3", 2), ("qwen3", 4), ("qwen3", 8), ("qwen3_moe", 4)])
async def test_equal_cold_prefills_are_bitwise_equal(
    name: str, degree: int, request: pytest.FixtureRequest, probing: Probing
) -> None:
    async with probing(request.getfixturevalue(f"tiny_{name}")) as prober:
        await prober.adopt(*(8 // degree * (degree,)))
        groups = (Group(0, degree), Group(8 - degree, degree))
        for length in (5, 100, 301):
            found = [
                await prober.logprobs(group, prompt(length), f"{turn} {number}")
                for turn in range(2)
                for number, group in enumerate(groups)
            ]
            assert all(np.array_equal(found[0], other) for other in found[1:])


class Judge:
    """Holds results against the references of one prompt's prefixes."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._worst = self._worst_transformers = 0.0

    def judge(self, length: int, result: ItemResult) -> None:
        assert result.first_token is not None
        exact, reference = self._references.exact[length - 1], self._references.transformers[length]
        found = dense(result.first_token.logprobs)
        assert np.abs(found - reference).max() <= DIFFERENCE_MAX, f"{length} tokens"
        self._worst = max(self._worst, np.abs(found - exact).max())
        self._worst_transformers = max(self._worst_transformers, np.abs(reference - exact).max())
        second, first = np.sort(exact)[-2:]
        if first - second > DIFFERENCE_MAX:
            assert result.first_token.token == exact.argmax()

    def end(self) -> None:
        assert self._worst <= 2 * self._worst_transformers


async def test_moved_queries_are_those_of_the_references(family: tuple[Path, References], probing: Probing) -> None:
    """Every degree: a prompt alone, packed ones, and one in chunks; part of the prefix cached, and nearly all of it."""
    model_dir, references = family
    tokens, judge = prompt(max(LENGTHS)), Judge(references)

    async def cache(group: Group, blocks: int, salt: str) -> None:
        await prober.prefill(group, np.concatenate([tokens[: blocks * BLOCK], prompt(5, seed=1)]), salt)

    async with probing(model_dir, collective_byte_cost=0) as prober:
        for degree in (2, 4, 8):
            await prober.adopt(*(8 // degree * (degree,)))
            group = Group(8 - degree, degree)
            for length, blocks in ((100, 1), (300, 9), (511, 30)):
                await cache(group, blocks, f"{degree} {length}")
                result = await prober.prefill(group, tokens[:length], f"{degree} {length}")
                assert result.cached_tokens == blocks * BLOCK
                judge.judge(length, result)
            packed = ((48, 1), (129, 0), (255, 14), (300, 8))  # 129 has nothing to ask, 48 and 255 may run alone
            for length, blocks in packed:
                if blocks:
                    await cache(group, blocks, f"{degree} packed {length}")
            prompts = [(tokens[:length], f"{degree} packed {length}") for length, _ in packed]
            for (length, _), result in zip(packed, await prober.prefill_packed(group, prompts), strict=True):
                judge.judge(length, result)
            item = prober.item(tokens, f"{degree} chunked")
            for until in range(8 * BLOCK, 511, 8 * BLOCK):
                await prober.step(group, replace(item, until=until))
            judge.judge(511, (await prober.step(group, item)).items[0])
            prober.engine.release(item.request)
    judge.end()


async def test_queries_move_to_a_rank_that_has_the_whole_prefix(tiny_qwen3: Path, probing: Probing) -> None:
    """After a merge the prefix lies where one rank left it, and the other has no key to attend to."""
    references, tokens = References(tiny_qwen3), prompt(max(LENGTHS))
    judge = Judge(references)
    async with probing(tiny_qwen3, collective_byte_cost=0) as prober:
        await prober.adopt(*(8 * (1,)))
        await prober.prefill(Group(0, 1), tokens[:300])
        await prober.adopt(*(4 * (2,)))
        result = await prober.prefill(Group(0, 2), tokens)
        assert result.cached_tokens == 288
        judge.judge(511, result)
        again = await prober.prefill(Group(0, 2), tokens)  # on what the moved step has written
        assert again.cached_tokens == 496
        judge.judge(511, again)
    judge.end()
