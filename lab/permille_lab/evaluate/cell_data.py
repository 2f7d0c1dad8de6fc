"""The tokenized examples of a cell, and its batches. Both depend on splits, model and seed only."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.loading import FileTokenizer
from permille.token_bytes import token_bytes
from permille.zo.estimators import Batch
from permille_lab.tasks.examples import BadRow, Example
from permille_lab.tasks.rows import MAX_BAD_SHARE
from permille_lab.tasks.scoring import Choices, document_text, encode_example, training_batch
from permille_lab.tasks.splits import Splits


class Encoder:
    """Tokenizer of one model.

    Attributes:
        begin: token that the model puts before each text, None if there is none.
    """

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # tokenizers raises plain Exception
            raise InputError(f"expected a tokenizer that can be read in {path}, got {exc!s:.200}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "</s>" in a text is plain text
        self.begin: int | None = next(iter(FileTokenizer(folder).bos), None)

    def __call__(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, text: str) -> NDArray[np.int64]:
        """Return the number of the text's bytes that each token stands for, int64 [T]."""
        ends = [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets]
        return token_bytes(text, np.array(ends, dtype=np.int64))


class CellData:
    """Train, validation and test examples of a cell that fit into `max_tokens`.

    Args:
        shots: number of solved examples before each prompt.
        max_tokens: largest number of tokens of prompt and answer together.
        unfit: called with each example that does not fit.
    """

    def __init__(
        self,
        splits: Splits,
        encoder: Encoder,
        *,
        seed: int,
        shots: int,
        batch_size: int,
        max_tokens: int,
        unfit: Callable[[BadRow], object],
    ) -> None:
        self._splits = splits
        self._encoder = encoder
        self.seed = seed
        self._shots = shots
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._unfit = unfit

    @cached_property
    def train(self) -> list[Choices]:
        """Examples for training."""
        return [choices for _, choices in self._fitting(self._splits.train)]

    @cached_property
    def validation(self) -> list[Choices]:
        """Examples that select the best state."""
        return [choices for _, choices in self._fitting(self._splits.validation)]

    @cached_property
    def test(self) -> list[Choices]:
        """Examples of the reported scores."""
        return [choices for _, choices in self._test]

    @cached_property
    def tested(self) -> list[Example]:
        """The examples of `test`, before tokenization."""
        return [example for example, _ in self._test]

    @cached_property
    def test_bytes(self) -> int:
        """Number of UTF-8 bytes that the scored tokens of `test` stand for. Only for documents.

        `max_tokens` may cut between the tokens of one character. All its bytes count for its first token.
        """
        total = 0
        for example, item in self._test:
            assert item.span is not None  # every document has a span
            bytes_T = self._encoder.token_bytes("".join(document_text(example, self._max_tokens)))
            total += int(bytes_T[slice(*item.span)].sum())
        return total

    @cached_property
    def _test(self) -> list[tuple[Example, Choices]]:
        return self._fitting(self._splits.test)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step. Its examples are drawn with the seed, without replacement."""
        rng = np.random.default_rng([self.seed, step])
        size = min(self._batch_size, len(self.train))
        return training_batch(
            [self.train[index] for index in rng.choice(len(self.train), size, replace=False)]
        )

    def batches_from(self, first: int) -> Callable[[int], Batch]:
        """Return the batches of a segment that begins at step `first`."""
        return lambda step: self.batch(first + step)

    def _fitting(self, examples: Sequence[Example]) -> list[tuple[Example, Choices]]:
        """Return the examples that fit, tokenized. An example with too long an answer is a bad row.

        Raises:
            InputError: too many examples of this part do not fit, so `max_tokens` is too small. The limit
                is `MAX_BAD_SHARE` of all examples of the splits.
        """
        found: list[tuple[Example, Choices]] = []
        reason = ""
        for example in examples:
            try:
                choices = encode_example(
                    example,
                    self._encoder,
                    begin=self._encoder.begin,
                    max_tokens=self._max_tokens,
                    demonstrations=self._demonstrations,
                )
            except InputError as exc:
                reason = str(exc)
                self._unfit(BadRow(name=example.name, reason=reason))
                continue
            found.append((example, choices))
        bad = len(examples) - len(found)
        splits = self._splits
        if bad > MAX_BAD_SHARE * (len(splits.train) + len(splits.validation) + len(splits.test)):
            raise InputError(
                f"expected examples that fit {self._max_tokens} tokens, got {bad} of {len(examples)} that do "
                f"not; the last one: {reason}"
            )
        return found

    @cached_property
    def _demonstrations(self) -> tuple[str, ...]:
        """Solved training examples for in-context learning, drawn with the seed."""
        if not self._shots:
            return ()
        train = self._splits.train
        rng = np.random.default_rng([self.seed, 1])
        chosen = rng.choice(len(train), min(self._shots, len(train)), replace=False)
        solved = [train[index] for index in chosen]
        return tuple(f"{item.prompt}{item.candidates[item.label]}\n\n" for item in solved)
