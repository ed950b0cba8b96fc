"""What is done with held-out rows during training: their loss, and scores of answers to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from lazyjax.batch import Batch
from lazyjax.training.answering import ExactMatchMetrics, Stage
from lazyjax.training.metrics import EvaluationMetrics, Log
from lazyjax.training.run_context import RunContext

#: (stage, step, stopped) -> the score; see `lazyjax.training.answering.ExactMatchEvaluation.run`.
Answers = Callable[[Stage, int, Callable[[], bool]], ExactMatchMetrics | None]
#: Tensors that a message names one by one.
_TENSORS_NAMED = 10


def no_answers(stage: Stage, step: int, stopped: Callable[[], bool]) -> ExactMatchMetrics | None:
    """Where no rows are to be answered."""
    del stage, step, stopped
    return None


class NonFiniteModelError(ArithmeticError):
    """The first loss of a run is not finite; no model is written."""


class Examination:
    """Evaluates and scores, and records both.

    Args:
        evaluation: gives the held-out batches, the same ones at every call.
        answers: scores held-out rows at a stage.
        find_nonfinite: names the parameters that hold values that are not finite.
    """

    def __init__(
        self,
        context: RunContext,
        evaluation: Callable[[], Iterable[Batch]],
        answers: Answers,
        find_nonfinite: Callable[[], Sequence[object]],
    ) -> None:
        self._context, self._evaluation, self._answers = context, evaluation, answers
        self._find_nonfinite = find_nonfinite

    def look(self, step: int, log: Log) -> None:
        """Evaluates and scores where that is due and, in a run that was resumed, not recorded already."""
        if step and not self._context.schedule.evaluation_is_due(step):
            return
        history = self._context.history
        if all(evaluation.step != step for evaluation in history.evaluations):
            self.evaluate(step, log)
        if all(score.step != step for score in history.scores):
            self._answer("during" if step else "before", step, log)

    def evaluate(self, step: int, log: Log) -> None:
        """Evaluates, unless someone waits for the run to stop: a part of the rows means nothing."""
        context, start = self._context, time.perf_counter()
        loss_sum, weight, target_tokens = 0.0, 0.0, 0
        for batch in self._evaluation():
            context.stop.look()
            if context.stop:
                return
            batch_loss, batch_weight = context.executor.evaluate(batch)
            loss_sum += batch_loss
            weight += batch_weight
            target_tokens += batch.target_tokens
        if not target_tokens or context.stop:
            return
        seconds = time.perf_counter() - start
        metrics = EvaluationMetrics(step, loss_sum / weight, target_tokens, seconds)
        context.history.evaluations.append(metrics)
        log.evaluation(metrics)
        context.display.evaluation(metrics)
        self.check_first(metrics.loss, "the loss of the first evaluation")
        context.summary.keep()

    def last_answers(self, log: Log) -> Exception | None:
        """Scores the trained model; that may take hours, so it is saved by now and a signal ends them."""
        self._context.stop.writing(None)
        try:
            self._answer("after", self._context.history.last_step, log)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            return error
        self._context.stop.writing("the records are being written")
        return None

    def _answer(self, stage: Stage, step: int, log: Log) -> None:
        """Scores answers to held-out rows, unless someone waits for the run to stop."""
        metrics = self._answers(stage, step, lambda: bool(self._context.stop))
        if metrics is not None:
            self._context.history.scores.append(metrics)
            log.exact_match(metrics)
            self._context.display.exact_match(metrics)
            self._context.summary.keep()

    def check_first(self, loss: float, name: str) -> None:
        """A run that begins with a loss that is not finite can only end with a model that is worth nothing.

        Later ones are the executor's business: it skips such steps, and the parameters stay as they were.
        """
        if math.isfinite(loss) or self._context.history.has_finite_loss():
            return
        tensors = [str(tensor) for tensor in self._find_nonfinite()]
        why = "All parameters are finite, so something overflows on the way (model.compute_dtype float32?)"
        if tensors:
            more = f", and {len(tensors) - _TENSORS_NAMED} more" if len(tensors) > _TENSORS_NAMED else ""
            why = f"Not finite are values of {', '.join(tensors[:_TENSORS_NAMED])}{more}"
        raise NonFiniteModelError(f"{name} is {loss}: nothing can be learned. {why}")
