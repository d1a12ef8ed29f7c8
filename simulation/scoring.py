"""A forecast's answer in virtual time, where it takes none."""

from services.controller.forecast import Question
from services.controller.replaying import scores_ppm


class InlineScorer:
    """A `Scorer` in the process that asks: a child process would answer when it likes."""

    async def scores_ppm(self, question: Question) -> tuple[int, ...]:
        return scores_ppm(question)
