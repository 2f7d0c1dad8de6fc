"""Recall of facts that stand in a person's text: the figure `facts` of `make bench-real`.

Twenty made-up facts of five kinds (`facts.json`) are spread over a text, and each is asked as a question. An
answer is right if it has one of the right words among its first 24 tokens. Contenders:

    base           the model alone, without the text
    state          the agent's training on the text with the facts
    passages       the model with the passages that the agent's search finds
    both           the state with the passages

    measure(package, diary(data, "pepys"), Recall.PASSAGES, steps=20, threads=1)
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from permille.package.reader import Package
from permille_agent.embed import (
    EngineChoice,
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
    STATE = "state"
    PASSAGES = "passages"
    BOTH = "both"


def diary(data: Path, name: str) -> User:
    """Return the author of `users/diaries/<name>.jsonl`."""
    rows = (data / "users/diaries" / f"{name}.jsonl").read_text().splitlines()
    return User(name=name, documents=tuple({"text": json.loads(row)["text"]} for row in rows))


def measure(package: Package, user: User, recall: Recall, *, steps: int, threads: int) -> Result:
    """Return the questions that a contender answers rightly, and the number of right answers of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        home, path = open_home(Path(folder) / "home"), Path(folder) / "text.jsonl"
        rows = ({"text": text} for text in _with_facts([own_words(document) for document in user.documents]))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        install_package(home, package)
        chosen = EngineChoice(threads=threads)
        outcome = None
        if recall in (Recall.STATE, Recall.BOTH):
            options = TrainOptions(steps=steps)
            outcome = run_training(home, [path], options, RunContext(engine_of=chosen)).outcome.value
        else:
            index_text(home, read_documents([path])[0], [path])
        with LocalModel(home, chosen, notes=recall in (Recall.PASSAGES, Recall.BOTH)) as model:
            answers = [_answer(model, fact["question"]) for fact in FACTS]
    right = [_is_right(answer, fact["right"]) for answer, fact in zip(answers, FACTS, strict=True)]
    kinds = Counter(fact["kind"] for fact, is_right in zip(FACTS, right, strict=True) if is_right)
    return {"right": list(map(int, right)), "kinds": dict(kinds), "outcome": outcome, "answers": answers}


def _answer(model: LocalModel, question: str) -> str:
    return "".join(model.reply([("user", question)], model.variants[0], _GREEDY)[1])


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
