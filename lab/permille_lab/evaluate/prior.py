"""What an answer is worth that reads no prompt: the least loss of a guess that is always the same.

Accuracy has the majority to be compared with; the loss of the right answer has this. A model that was never
told what answers look like loses nats a token by their form alone, and training that teaches it the form, and
nothing of the task, ends no lower than here. It may end higher for that alone: training weighs tokens, this
weighs answers, as the loss does that is reported.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille_lab.evaluate.scoring import Answer, Choices


def prior_losses(items: Sequence[Choices]) -> NDArray[np.float64] | None:
    """Loss a token of each right answer under the best guess that is the same for every prompt.

    The guess gives answer `a` of `T_a` tokens, right in a share `s_a` of the items, the probability in
    proportion to `s_a / T_a`: that is least in the mean of losses a token. The frequencies are the items'
    own, so that no guess whatever is lower on them.

    Returns:
        float64 [len(items)], nats a token; None where the items do not all have the same answers.
    """
    tokens = _tokens_of_answers(items)
    if tokens is None:
        return None
    tokens_A = np.array(tokens)
    label_N = np.array([item.label for item in items], dtype=np.intp)
    counts = Counter(label_N.tolist())
    worth_A = np.array([counts[a] for a in range(len(tokens))]) / tokens_A
    loss_N: NDArray[np.float64] = -np.log(worth_A[label_N] / worth_A.sum()) / tokens_A[label_N]
    return loss_N


def _tokens_of_answers(items: Sequence[Choices]) -> tuple[int, ...] | None:
    """Tokens of each answer; None where they are not the same ones everywhere."""
    found = {tuple(_own(answer) for answer in item.answers) for item in items}
    if len(found) != 1:
        return None
    (answers,) = found
    return tuple(len(ids) for ids in answers) if len(answers) > 1 else None


def _own(answer: Answer) -> tuple[int, ...]:
    return answer.ids[-answer.targets :]
