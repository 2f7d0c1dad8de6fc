"""What an answer is worth that reads no prompt: the loss of the answers' frequencies alone.

Accuracy has the majority to be compared with; the loss of the right answer has this. A model that was never
told what answers look like loses nats a token by their form alone, and training that teaches it the form, and
nothing of the task, ends here.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.evaluate.scoring import Answer, Choices


def prior_losses(train: Sequence[Choices], test: Sequence[Choices]) -> NDArray[np.float64] | None:
    """Loss a token of each right answer under the best guess that is the same for every prompt.

    The guess gives answer `a` of `T_a` tokens, right in a share `s_a` of `train`, the probability in
    proportion to `s_a / T_a`: that is least in the mean of losses a token. An answer that no training example
    has is counted once, so that no loss is infinite.

    Returns:
        float64 [len(test)], nats a token; None where the examples do not all have the same answers.
    """
    tokens = _answers([*train, *test])
    if tokens is None or not train:
        return None
    counts = Counter(item.label for item in train)
    worth_A = np.array([max(counts[a], 1) / count for a, count in enumerate(tokens)])
    loss_A: NDArray[np.float64] = -np.log(worth_A / worth_A.sum()) / np.array(tokens)
    return loss_A[np.array([item.label for item in test], dtype=np.intp)]


def _answers(items: Sequence[Choices]) -> tuple[int, ...] | None:
    """Tokens of each answer; None where they are not the same ones everywhere."""
    found = {tuple(_own(answer) for answer in item.answers) for item in items}
    if len(found) != 1:
        return None
    (answers,) = found
    return tuple(len(ids) for ids in answers) if len(answers) > 1 else None


def _own(answer: Answer) -> tuple[int, ...]:
    return answer.ids[-answer.targets :]
