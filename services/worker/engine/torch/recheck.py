"""`python -m services.worker.engine.torch.recheck MODEL_DIR < answers.jsonl`: would transformers have said the same?

Each line is `{"prompt": [ids], "output": [ids]}` of a greedy answer. One forward pass of transformers over both gives, at
every generated position, what it would have chosen after the same beginning. Two implementations in float32 may differ in the
last bits, so a position counts as a mismatch only where the reference's best two logits are further apart than `GAP`.
Prints one JSON object.
"""

import sys
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
    positions = equal = within_gap = 0
    for answer in answers:
        prompt, output = answer["prompt"], answer["output"]
        with torch.inference_mode():
            logits_TV = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        best_T2 = logits_TV.topk(2).values
        same_T = logits_TV.argmax(-1) == torch.tensor(output)
        undecided_T = (best_T2[:, 0] - best_T2[:, 1]) <= GAP
        positions += len(output)
        equal += int(same_T.sum())
        within_gap += int((~same_T & undecided_T).sum())
    return Verdict(len(answers), positions, equal, within_gap, positions - equal - within_gap)


def main(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    answers = [orjson.loads(line) for line in sys.stdin.buffer]
    sys.stdout.buffer.write(orjson.dumps(recheck(model, answers)._asdict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
