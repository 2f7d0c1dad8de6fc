"""Questions of general knowledge, and the rule by which a personal model has lost an answer.

The loss on general text is a mean. A model can keep it low and still repeat itself, or forget a fact. So a
device also asks a few questions before it adopts a model:

    fault = fault_of(QUESTIONS[0], base="It is Paris.", personal="My wife reads and writes.")
    # "lose the answer to"

Only questions that the base answers rightly count. Where the base repeats itself, a personal model may do so,
too. Exact words decide. No model judges.
"""

import re
from dataclasses import dataclass

_LEAST_LETTERS = 12
"""Shorter passages are not counted as repeated. Lists and exclamations repeat a word or two."""
_SENTENCE_END = re.compile(r"[.!?…。！？\n]+")
_LOOP = re.compile(rf"(.{{{_LEAST_LETTERS},200}}?)\1")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and words of which a right answer has at least one.

    Attributes:
        prompt: a question, or the beginning of a text.
        words: lower-case words. Some are in other languages, because a personal model may answer
            in the language of its user.
    """

    prompt: str
    words: frozenset[str]

    def is_known(self, answer: str) -> bool:
        """Return whether an answer has one of the words.

        Example:
            >>> QUESTIONS[0].is_known("PARIS, of course!")
            True
        """
        return not self.words.isdisjoint(re.findall(r"\w+", answer.casefold()))


_PARIS = frozenset({"paris", "parís", "parigi", "parijs"})
_COLD = frozenset({"cold", "cool", "kalt", "froid", "frío", "freddo", "frio", "koud"})
_SEA = frozenset({"sea", "ocean", "oceans", "wave", "waves", "water", "waters", "meer", "mer", "mar", "mare"})

# A small model knows these firmly. Numbers, such as the temperature of boiling water, change with little
# training, and so say little about the rest of a model (ADR 38).
QUESTIONS = (
    Question("What is the capital of France?", _PARIS),
    Question("What is the opposite of hot?", _COLD),
    Question("Which animal says meow?", frozenset({"cat", "cats", "katze", "gato", "gatto", "kat"})),
    Question("Write one sentence about the sea.", _SEA),
)
"""Questions for a chat model."""

BEGINNINGS = (
    Question("The capital of France is", _PARIS),
    Question("The opposite of hot is", _COLD),
    Question("The days of the week are Monday,", frozenset({"tuesday", "dienstag", "mardi", "martes"})),
    Question("In their hive, bees make", frozenset({"honey", "honig", "miel", "miele", "mel", "honing"})),
)
"""Beginnings of texts, for a model without a chat template to continue."""


def fault_of(question: Question, *, base: str, personal: str) -> str:
    """Describe why a personal model's answer is worse than the base's. Return "" if it is not.

    The description is for a message that ends with the prompt.

    Example:
        >>> fault_of(QUESTIONS[2], base="It is a cat.", personal="My wife says that.")
        'lose the answer to'
    """
    if not question.is_known(base):
        return ""
    if not question.is_known(personal):
        return "lose the answer to"
    return "repeat itself after" if repeats(personal) and not repeats(base) else ""


def repeats(text: str) -> bool:
    """Return whether a text has a sentence twice, or a passage twice in a row.

    Case, spaces and punctuation do not count.

    Example:
        >>> repeats("We read in a jar and we read in a jar and we")
        True
    """
    sentences = [_letters(part) for part in _SENTENCE_END.split(text)]
    whole = [letters for letters in sentences if len(letters) >= _LEAST_LETTERS]
    return len(set(whole)) < len(whole) or _LOOP.search(_letters(text)) is not None


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))
