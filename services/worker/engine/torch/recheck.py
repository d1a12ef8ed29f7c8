"""`python -m services.worker.engine.torch.recheck MODEL_DIR < answers.jsonl`: would transformers have said the same?

Each line is `{"prompt": [ids], "output": [ids]}` of a greedy answer. One forward pass of transformers over both gives, at
every generated position, what it would have chosen after the same beginning. Two implementations in float32 may differ in the
last bits, so a position counts as a mismatch only where the reference's best two logits are further apart than `GAP`.
Prints one verdict as a line of JSON for each answer, as it is reached.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch

GAP = 1e-3


class Verdict(NamedTuple):
    """Positions, over all answers. `within_gap` are other tokens where the reference itself was undecided."""

    answers: int
    positions: int
    equal: int
    within_gap: int
    mismatches: int


def recheck(model: Any, answers: list[dict[str, list[int]]]) -> Verdict:
    """`model` is a transformers causal language model in float32."""
    verdicts = [check(model, answer) for answer in answers]
    return Verdict(*map(sum, zip(*verdicts, strict=True))) if verdicts else Verdict(0, 0, 0, 0, 0)


def check(model: Any, answer: dict[str, list[int]]) -> Verdict:
    """The verdict on one answer; `output` holds at least one token."""
    prompt, output = answer["prompt"], answer["output"]
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
    best_T2 = logits_TV.topk(2).values
    same_T = logits_TV.argmax(-1) == torch.tensor(output)
    undecided_T = (best_T2[:, 0] - best_T2[:, 1]) <= GAP
    equal, within_gap = int(same_T.sum()), int((~same_T & undecided_T).sum())
    return Verdict(1, len(output), equal, within_gap, len(output) - equal - within_gap)


def main(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    # Threads within one operation wait for each other at every operation: on two busy cores that took seven times the CPU
    # seconds of one thread. Answers side by side wait for nothing.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    answers = [orjson.loads(line) for line in sys.stdin.buffer]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for verdict in threads.map(lambda answer: check(model, answer), answers):
            sys.stdout.buffer.write(orjson.dumps(verdict._asdict(), option=orjson.OPT_APPEND_NEWLINE))
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
