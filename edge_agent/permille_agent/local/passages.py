"""The user's own words before the questions of a chat.

    turns, consulted = with_passages(home, [("user", "What is my cat called?")])
    turns[0][1]             # the passages that fit, and the question
    consulted.passages      # the same passages, to show which ones the answer saw

Rules:

- A trained state gives a person's voice, but few facts. So passages of the text stand before each question.
- They are in the user's message, because not all templates take a system message. Like any message, they are
  text: no special token in them is read as one.
- Only the last question has passages. Those of earlier questions distract a small model. With them, SmolLM2
  answered 4 of 12 later questions of conversations rightly. Without them, it answered 7.
- If nothing fits, the question stays as it is, and the answer comes from the model alone. Only a question
  about the notes gets `NOTHING` as its answer, because a model would invent some.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from permille.errors import OperatorError
from permille_agent.state.home import Home
from permille_agent.text.notes import Passage, find_passages
from permille_agent.text.report import shown

NOTHING: Final = "Your notes say nothing about this."
ANSWER_TOKENS: Final = 256
"""Passages leave this much room for an answer, or less if less is wanted."""
SHOWN_CHARACTERS: Final = 100
_ABOUT_NOTES: Final = re.compile(
    r"\b(?:my|our|mein\w*|unser\w*|mes|nos|mon|mis|mi|miei|mie|mio)\s"
    r"(?:notes?|text|diary|journal|notizen|tagebuch|notas|diario|appunti)\b",
    re.IGNORECASE,
)

Turns = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consulted:
    """Result of the search for the last question of a chat.

    Attributes:
        passages: the passages in the prompt, the best last.
        problem: the reason why no passage could be used, or an empty string.
    """

    passages: tuple[Passage, ...] = ()
    problem: str = ""

    def fields(self) -> Mapping[str, Any]:
        """Return the fields for JSON."""
        shown = [{"source": passage.source, "text": passage.text} for passage in self.passages]
        return {"notes": shown} | ({"notes_problem": self.problem} if self.problem else {})

    def lines(self) -> list[str]:
        """Return lines for a terminal: the beginning of each passage, or that nothing was found."""
        if not self.passages:
            return [self.problem or "nothing found in your notes"]
        texts = [(shown(passage.source), " ".join(passage.text.split())) for passage in self.passages]
        return [
            f"{source}: {text[:SHOWN_CHARACTERS]}{'...' * (len(text) > SHOWN_CHARACTERS)}"
            for source, text in texts
        ]


def with_passages(home: Home, turns: Turns) -> tuple[Turns, Consulted]:
    """Put the passages that fit before the last question of a chat.

    Returns:
        The turns, and what was found. Questions to which `NOTHING` was the answer are left out. If the index
        cannot be used, the turns have no passages.
    """
    # A small model would repeat this fixed answer, so it and its question are left out.
    following = [*turns[1:], ("", "")]
    pairs = zip(turns, following, strict=True)
    turns = [turn for turn, after in pairs if NOTHING not in (turn[1], after[1])] or turns
    asked = [place for place, (role, _) in enumerate(turns) if role == "user"]
    # "How old is she?" finds nothing alone, so the question before it is searched, too.
    for places in (asked[-1:], asked[-2:]):
        try:
            passages = find_passages(home, "\n".join(turns[place][1] for place in places))
        except OperatorError as exc:
            return turns, Consulted(problem=str(exc))
        if passages:
            notes = "\n\n".join(passage.text.strip() for passage in passages)
            found = list(turns)
            found[asked[-1]] = ("user", f"My notes:\n\n{notes}\n\n{turns[asked[-1]][1]}")
            return found, Consulted(passages=passages)
    return turns, Consulted()


def asks_about_notes(turns: Turns) -> bool:
    """Return whether the last turn asks about the notes themselves.

    Example:
        >>> asks_about_notes([("user", "What do my notes say about leeks?")])
        True
    """
    return _ABOUT_NOTES.search(turns[-1][1]) is not None
