"""Devices and their text.

    by person        a device has the tweets of one author (LaMP-7)
    SST-2, IID       sentences, each with "It was great" or "It was terrible"; only the answer is a target
    SST-2, Dirichlet each device's shares of the two answers are drawn from Dirichlet(0.1, 0.1)

No device trains on its test part. The devices for tuning have other text than the measured ones.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from permille.errors import InputError
from permille.package.reader import Package
from permille_agent.embed import (
    Row,
    TokenizedDocument,
    document_rows,
    package_tokenizer,
    packed_rows,
    read_documents,
)
from permille_lab.people.study import targets
from permille_lab.people.user_texts import Collection, cohort, read_users
from permille_lab.tasks.examples import Task
from permille_lab.tasks.rows import read_file

ROW_TOKENS = 32
TRAIN_TOKENS, TEST_TOKENS = 1_200, 400
"""Number of target tokens of a device with tweets."""
TRAIN_SENTENCES, TEST_SENTENCES = 40, 20
"""Number of sentences of a device with SST-2."""
CONCENTRATION = 0.1
_TURN_DEVICES = 20  # largest number of devices of a turn
_LONGEST_SENTENCE = 48
_LEAST_CHARACTERS = 4_000


class Division(StrEnum):
    """The division of text between devices."""

    SST2_IID = "SST-2, IID"
    SST2_DIRICHLET = "SST-2, Dirichlet 0.1"
    TWEETS_PERSON = "tweets, by person"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A device's text in rows, for training and for the test."""

    name: str
    train: Sequence[Row]
    test: Sequence[Row]


def clients_of(package: Package, data: Path, split: Division, devices: int, *, turn: int = 0) -> list[Client]:
    """Return `devices` devices of a division.

    Args:
        data: folder with `users/` and `tasks/`.
        turn: devices of different turns have different text.

    Raises:
        InputError: there is too little text.
    """
    texts = _Texts(package)
    rng = np.random.default_rng([turn, list(Division).index(split)])
    if split in (Division.SST2_IID, Division.SST2_DIRICHLET):
        return _sentences(texts, data, devices, turn, None if split is Division.SST2_IID else rng)
    people = cohort(read_users(data, Collection.LAMP7).users, least_characters=_LEAST_CHARACTERS)
    documents = [
        texts.tokens(user.documents) for user in people[turn * _TURN_DEVICES : turn * _TURN_DEVICES + devices]
    ]
    if len(documents) < devices:
        raise InputError(f"{devices} devices need as many people with enough text; found {len(documents)}.")
    return [_with_tweets(f"{index}", found) for index, found in enumerate(documents)]


def small_clients(package: Package, data: Path, devices: int) -> list[Client]:
    """Return devices for a large cohort. Each has ten tweets of one author, two of them for the test.

    An author with many tweets has several devices.
    """
    texts, found = _Texts(package), []
    for user in cohort(read_users(data, Collection.LAMP7).users, least_characters=0):
        documents = texts.tokens(user.documents)
        for first in range(0, len(documents) - 9, 10):
            part = documents[first : first + 10]
            name = f"{user.name} {first}"
            found.append(_client(name, part[2:], part[:2]))
            if len(found) == devices:
                return found
    raise InputError(f"There are not enough tweets for {devices} devices, only for {len(found)}.")


class _Texts:
    def __init__(self, package: Package) -> None:
        self._tokenizer = package_tokenizer(package)

    def tokens(self, rows: Sequence[Mapping[str, str]]) -> list[TokenizedDocument]:
        """Return the documents tokenized as by the agent. Documents without a target are left out."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.jsonl"
            path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
            documents, _ = read_documents([path])
        found = (self._tokenizer.tokenize(each.content, row_tokens=ROW_TOKENS) for each in documents)
        return [each for each in found if each.targets]


def _with_tweets(name: str, documents: Sequence[TokenizedDocument]) -> Client:
    rest = iter(documents)
    test = list(_up_to(rest, TEST_TOKENS))
    return _client(name, list(_up_to(rest, TRAIN_TOKENS)), test)


def _up_to(documents: Iterator[TokenizedDocument], wanted: int) -> Iterator[TokenizedDocument]:
    have = 0
    while have < wanted:
        document = next(documents, None)
        if document is None:
            return
        have += document.targets
        yield document


def _client(name: str, train: Sequence[TokenizedDocument], test: Sequence[TokenizedDocument]) -> Client:
    if not targets(train) or not targets(test):
        raise InputError(f"Device {name} has too little text for training and test.")
    return Client(name=name, train=packed_rows(train, ROW_TOKENS), test=document_rows(test, ROW_TOKENS))


def _sentences(
    texts: _Texts, data: Path, devices: int, turn: int, rng: np.random.Generator | None
) -> list[Client]:
    """Return devices with sentences. With `rng`, each device draws its share of positive sentences."""
    size = TRAIN_SENTENCES + TEST_SENTENCES
    examples = [
        example
        for example in read_file(Task.SST2, data / "tasks/SST-2_glue/train.tsv").examples
        if 12 <= len(example.prompt) <= _LONGEST_SENTENCE
    ]
    pools = []
    for label in (0, 1):
        of_label = [example for example in examples if example.label == label]
        first = turn * _TURN_DEVICES * size
        rows = [
            {"prompt": example.prompt, "completion": example.candidates[label]}
            for example in of_label[first : first + devices * size]
        ]
        pools.append(iter(texts.tokens(rows)))
    clients = []
    for index in range(devices):
        share = 0.5 if rng is None else float(rng.dirichlet([CONCENTRATION, CONCENTRATION])[0])
        labels = np.arange(size) < round(share * size)
        # Shuffle, so that train and test part have the same expected shares of the two answers.
        order = np.random.default_rng([turn, index]).permutation(size)
        documents = [next(pools[int(labels[place])]) for place in order]
        clients.append(_client(f"{index}", documents[TEST_SENTENCES:], documents[:TEST_SENTENCES]))
    return clients
