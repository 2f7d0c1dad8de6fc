"""Compare training on different turns of a conversation: the figure `learn` of `make bench-real`.

    documents = dialogues(data, Path("build/bench/real"), LEARNED + SELECTED + JUDGED)
    result = measure(subject, documents, Learn.USER, general)

In a dialogue of PersonaChat, the persona takes the role of the assistant. Each choice of `--learn` trains on
the same dialogues, with the same number of steps. Each is judged by held-out turns of both sides.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from permille.zo.estimators import Batch
from permille_agent.embed import Document, Learn, TokenizedDocument, package_tokenizer, read_documents
from permille_lab.measuring.cells import Result
from permille_lab.people.study import Person, targets
from permille_lab.people.user_texts import Collection, User, cohort, read_users
from permille_lab.real.subjects import Subject, general_of, nats_of

LEARNED, SELECTED, JUDGED = 32, 6, 24
_LEAST_CHARACTERS = 200
_SIDES = (Learn.USER, Learn.ASSISTANT)


def dialogues(data: Path, folder: Path, count: int) -> list[Document]:
    """Return `count` dialogues, one for each persona, in the order of a hash of the persona."""
    users = read_users(data, Collection.PERSONACHAT).users
    people = cohort(users, least_characters=_LEAST_CHARACTERS)[:count]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dialogues.jsonl"
    path.write_text("".join(json.dumps({"messages": _messages(user)}) + "\n" for user in people))
    return read_documents([path])[0]


def measure(
    subject: Subject, documents: Sequence[Document], learn: Learn, general: Sequence[Batch]
) -> Result:
    """Train on the turns of `learn`. Return the losses of both sides before and after."""
    study = replace(subject.study, options=replace(subject.study.options, learn=learn))
    row_tokens = study.options.row_tokens
    found: dict[Learn, list[TokenizedDocument]] = {}
    for side in {learn, *_SIDES}:
        tokenizer = package_tokenizer(study.package, side)
        found[side] = [tokenizer.tokenize(document.content, row_tokens=row_tokens) for document in documents]
    person = Person(
        name=f"dialogues, {learn.value}",
        train=found[learn][:LEARNED],
        select=found[learn][LEARNED : LEARNED + SELECTED],
        test=[],
        held_out_words=frozenset(),
        test_words=frozenset(),
    )
    trained_K, _ = study.train(person, "learn")
    eighths = subject.strength(trained_K).eighths
    states = {"before": study.package.values(), "after": subject.at(trained_K, eighths)}
    judged = {side.value: found[side][LEARNED + SELECTED :] for side in _SIDES}
    return {
        "nats": {
            when: {side: nats_of(study.engine, values_K, judged[side]) for side in judged}
            for when, values_K in states.items()
        },
        "general": {when: general_of(study.engine, values_K, general) for when, values_K in states.items()},
        "strength": eighths,
        "train_tokens": targets(person.train),
        "test_tokens": {side: targets(judged[side]) for side in judged},
    }


def _messages(user: User) -> list[dict[str, str]]:
    return [
        {"role": role, "content": row[part].strip()}
        for row in user.documents
        for role, part in (("user", "prompt"), ("assistant", "completion"))
    ]
