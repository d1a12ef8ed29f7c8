"""A forecast's answer in virtual time, where it takes none."""

from services.controller.forecast import Question, Scores
from services.controller.replaying import scores


class InlineScorer:
    """A `Scorer` in the process that asks: a child process would answer when it likes."""

    async def scores(self, question: Question) -> Scores:
        return scores(question)
