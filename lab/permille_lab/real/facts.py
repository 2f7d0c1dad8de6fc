"""Recall of facts that stand in a person's text: the figure `facts` of `make bench-real`.

Twenty made-up facts of five kinds (`facts.json`) are spread over a text, and each is asked as a question. An
answer is right if it has one of the right words among its first 24 tokens. Contenders:

    base           the model alone, without the text
    passages       the base with the passages that the agent's search finds
    state          the agent's training on the text with the facts, without its memory
    memory         the same with the memory, if the agent has adopted one
    all            the same with the memory and the passages

    measure(package, diary(data, "pepys"), UNTRAINED, steps=20, threads=1)
"""

import json
import re
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from permille.package.reader import Package
from permille_agent.embed import (
    EngineChoice,
    Home,
    LocalModel,
    RunContext,
    Sampling,
    TrainOptions,
    index_text,
    install_package,
    open_home,
    read_documents,
    run_training,
)
from permille_lab.measuring.cells import Result
from permille_lab.people.user_texts import User, own_words

FACTS = json.loads(Path(__file__).with_name("facts.json").read_text())
MOST_CHARACTERS = 40_000
"""Length of a person's text, without the facts. It is some 10,000 tokens."""
_GREEDY = Sampling(max_new_tokens=24, temperature=0.0, repeat_penalty=1.0)


class Recall(StrEnum):
    """A contender."""

    BASE = "base"
    PASSAGES = "passages"
    STATE = "state"
    MEMORY = "memory"
    ALL = "all"


UNTRAINED = (Recall.BASE, Recall.PASSAGES)
TRAINED = (Recall.STATE, Recall.MEMORY, Recall.ALL)


def diary(data: Path, name: str) -> User:
    """Return the author of `users/diaries/<name>.jsonl`."""
    rows = (data / "users/diaries" / f"{name}.jsonl").read_text().splitlines()
    return User(name=name, documents=tuple({"text": json.loads(row)["text"]} for row in rows))


def measure(
    package: Package, user: User, contenders: Sequence[Recall], *, steps: int, threads: int
) -> Result:
    """Return which questions each contender answers rightly, in the order of `FACTS`.

    Args:
        package: the package.
        user: the person.
        contenders: `UNTRAINED`, or `TRAINED`, which share one training.
        steps: number of steps of the training.
        threads: threads of the engine.
    """
    with tempfile.TemporaryDirectory() as folder:
        home, path = open_home(Path(folder) / "home"), Path(folder) / "text.jsonl"
        rows = ({"text": text} for text in _with_facts([own_words(document) for document in user.documents]))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        install_package(home, package)
        chosen, outcome = EngineChoice(threads=threads), None
        if set(contenders) & {*TRAINED}:
            told, context = TrainOptions(steps=steps), RunContext(engine_of=chosen)
            outcome = run_training(home, [path], told, context).outcome.value
        else:
            index_text(home, read_documents([path])[0], [path])
        answers = {recall.value: _answers(home, chosen, recall) for recall in contenders}
    right = {
        recall: [int(_is_right(answer, fact["right"])) for answer, fact in zip(given, FACTS, strict=True)]
        for recall, given in answers.items()
    }
    return {"outcome": outcome, "right": right}


def _answers(home: Home, chosen: EngineChoice, recall: Recall) -> list[str]:
    memory, notes = (
        recall in group for group in ({Recall.MEMORY, Recall.ALL}, {Recall.PASSAGES, Recall.ALL})
    )
    with LocalModel(home, chosen, memory=memory, notes=notes) as model:
        asked = [[("user", fact["question"])] for fact in FACTS]
        return ["".join(model.reply(turns, model.variants[0], _GREEDY)[1]) for turns in asked]


def _is_right(answer: str, words: Sequence[str]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in words)


def _with_facts(texts: Sequence[str]) -> list[str]:
    """Return the first texts, with the facts at equal distances among them."""
    kept: list[str] = []
    for text in texts:
        if sum(map(len, kept)) < MOST_CHARACTERS:
            kept.append(text)
    texts_between = len(kept) / (len(FACTS) + 1)
    for place in reversed(range(len(FACTS))):
        kept.insert(round((place + 1) * texts_between), FACTS[place]["fact"])
    return kept
