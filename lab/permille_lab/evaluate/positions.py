"""Whether rows fit a model: losses at positions that it was not trained on would say nothing."""

from collections.abc import Iterable, Mapping

from permille.errors import InputError
from permille_lab.evaluate.methods import Method, TrainedSet


def check_positions(
    model: str,
    config: Mapping[str, object],
    methods: Iterable[Method],
    *,
    max_tokens: int,
    corpus_tokens: int,
) -> None:
    """Refuse rows that are longer than the model's positions; a config that names none is not asked.

    Args:
        model: its name, for the message.
        corpus_tokens: counts where a method takes gradients of the corpus.

    Raises:
        InputError: the model has fewer positions.
    """
    positions = config.get("max_position_embeddings")
    if type(positions) is not int:
        return
    numbers = {"max_tokens": max_tokens}
    if any(item.trained is TrainedSet.SENSITIVE_C4 for item in methods):
        numbers["corpus_tokens"] = corpus_tokens
    for name, number in numbers.items():
        if number > positions:
            raise InputError(f"expected {name} of at most the {positions} positions of {model}, got {number}")
