"""A step's items as the ranks are told of them, and the first tokens that they answer with. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.engine.continuation import NO_PAST
from services.worker.engine.past import past_of
from services.worker.engine.protocol import EngineError, Token
from services.worker.engine.step_items import Reserved
from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.messages import Part, Prefilled, Reply
from services.worker.engine.torch.movement import moves_queries
from services.worker.engine.torch.settings import TorchSettings

NOT_FINITE = "the model's logits for it are no finite numbers"


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one engine."""

    settings: TorchSettings
    layout: KvLayout
    q_heads: int

    def of(self, degree: int, reserved: Reserved) -> Part:
        """The item at a worker of this degree."""
        item, reservation, cost = reserved.item, reserved.reservation, self.settings.collective_byte_cost
        blocks = -(-reserved.end_tokens // self.settings.block_tokens)
        tokens = tuple(item.tokens[reserved.cached_tokens : reserved.end_tokens].tolist())
        return Part(
            tokens=tokens,
            slots=reservation.slots[:blocks],
            reused_blocks=reservation.reused_blocks,
            held_blocks=reservation.held_blocks,
            sampling=item.sampling if reserved.ends_prompt else None,
            past=past_of(item.tokens, item.generated_tokens, item.sampling) if reserved.ends_prompt else NO_PAST,
            moves_queries=moves_queries(self.layout, self.q_heads, degree, reserved.cached_tokens, len(tokens), cost),
        )


def first_tokens(replies: Sequence[Reply], items: Sequence[Reserved]) -> dict[int, Token]:
    """The first token of each item that ends its prompt, by its place in the step. EngineError names a request whose model made
    no numbers of its prompt."""
    chosen = [pair for reply in replies if isinstance(reply, Prefilled) for pair in reply.tokens]
    ending = [number for number, reserved in enumerate(items) if reserved.ends_prompt]
    assert sorted(number for number, _ in chosen) == ending, "one rank chooses each first token"
    found: dict[int, Token] = {}
    for number, token in chosen:
        if token is None:
            raise EngineError(f"request {items[number].item.request}: {NOT_FINITE}")
        found[number] = token
    return found
