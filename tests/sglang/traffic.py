"""Prompts that share prefixes, push each other out of a small pool, and are of every length."""

import random

LENGTH_MAX = 1320


def random_prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


def mixed_prompts(count: int, seed: int) -> list[list[int]]:
    """Two thirds begin like others; lengths from 3 to `LENGTH_MAX` tokens."""
    chance = random.Random(seed)
    shared = [random_prompt(1000, 1000 + index) for index in range(4)]
    prompts = []
    for _ in range(count):
        begin = chance.choice(shared)[: chance.choice((0, 0, 128, 500, 500, 1000))]
        tail = chance.choice((3, 20, 90, 320))
        prompts.append([*begin, *(chance.randrange(256) for _ in range(tail))])
    assert max(map(len, prompts)) <= LENGTH_MAX
    return prompts
