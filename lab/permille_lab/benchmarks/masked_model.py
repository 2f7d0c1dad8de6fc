"""A real model with a mask in torch, for experiments on directions: losses and exact gradients of its masked
weights, and the texts of public users.

Sources are of three kinds: C4, Shakespeare's speakers, writers of tweets (LaMP-7). An evaluated user's own
rows are never in a source.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from permille.models.loading import FileTokenizer, load_model
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.gradients import masked_gradients
from permille.sensitivity.masks import MaskMethod, select_mask
from permille_lab.benchmarks.model_packages import Sources

ROW_TOKENS = 64
MASK_SEQUENCES, MASK_LENGTH = 64, 128
_MASK_DOCUMENTS = 150
DOMAINS = ("shakespeare", "tweets")


class MaskedModel:
    """float32, one thread's worth of work a call; masked weights [k] in flat order."""

    def __init__(self, sources: Sources, name: str, density: float) -> None:
        """Load the model and choose the mask by Fisher scores on C4."""
        folder = sources.models / name
        self.model = load_model(folder)
        self.tokenizer = FileTokenizer(folder)
        sequences_NT = self.rows(c4_texts(sources)[:_MASK_DOCUMENTS], MASK_SEQUENCES, MASK_LENGTH)
        scores = fisher_scores(self.model, sequences_NT)
        self.mask = select_mask(scores, MaskMethod.FISHER, density)
        self.scores_K = np.concatenate([scores[n].reshape(-1)[i] for n, i in self.mask.items()])
        self._parameters = {n: self.model.get_parameter(n) for n in self.mask}
        self._indices = {n: torch.from_numpy(i.astype(np.int64)) for n, i in self.mask.items()}
        for parameter_name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parameter_name in self._parameters)
        self.base_K = self._gather(list(self._parameters.values()))

    @property
    def k(self) -> int:
        """Masked weights."""
        return int(self.base_K.numel())

    def rows(self, texts: list[str], most: int, length: int = ROW_TOKENS) -> NDArray[np.int64]:
        """The first rows of `length` tokens of the joined texts, at most so many."""
        found: list[list[int]] = []
        ids: list[int] = []
        for text in texts:
            ids += self.tokenizer.encode(text)
            while len(ids) >= length and len(found) < most:
                found.append(ids[:length])
                ids = ids[length:]
            if len(found) == most:
                break
        return np.array(found, np.int64)

    def gradient(self, values_K: Tensor, rows_NT: NDArray[np.int64]) -> Tensor:
        """Of the mean loss of the rows, by the masked weights."""
        self._set(values_K)
        loss = self._loss(rows_NT)
        return self._gather(list(torch.autograd.grad(loss, list(self._parameters.values()))))

    def loss(self, values_K: Tensor, rows_NT: NDArray[np.int64]) -> float:
        """Mean loss in nats a token."""
        self._set(values_K)
        with torch.no_grad():
            parts = [self._loss(rows_NT[at : at + 16]).item() for at in range(0, len(rows_NT), 16)]
        sizes = [len(rows_NT[at : at + 16]) for at in range(0, len(rows_NT), 16)]
        return float(np.average(parts, weights=sizes))

    def row_gradients(self, values_K: Tensor, rows_NT: NDArray[np.int64]) -> NDArray[np.float32]:
        """One gradient a row, as the cloud's basis job takes them."""
        self._set(values_K)
        return masked_gradients(self.model, rows_NT, self.mask)

    def _loss(self, rows_NT: NDArray[np.int64]) -> Tensor:
        ids_BT = torch.from_numpy(rows_NT)
        logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())

    def _set(self, values_K: Tensor) -> None:
        sizes = [indices.numel() for indices in self._indices.values()]
        with torch.no_grad():
            for name, part in zip(self._parameters, torch.split(values_K, sizes), strict=True):
                self._parameters[name].view(-1)[self._indices[name]] = part

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        indices = self._indices.values()
        return torch.cat([t.detach().reshape(-1)[i] for t, i in zip(tensors, indices, strict=True)]).clone()


def c4_texts(sources: Sources) -> list[str]:
    """C4 documents; the first are those that chose the mask."""
    return [row["text"] for row in _lines(sources.corpus)]


def learning_texts(sources: Sources, users: tuple[str, ...]) -> dict[str, list[str]]:
    """Texts to learn from by source, none by any of `users`, none that chose the mask."""
    found = {"c4": c4_texts(sources)[_MASK_DOCUMENTS:]}
    for domain in DOMAINS:
        people = user_texts(sources, domain)
        found[domain] = [text for user, texts in people.items() if user not in users for text in texts[::2]]
    return found


def user_texts(sources: Sources, domain: str) -> dict[str, list[str]]:
    """Texts by user, the one who wrote most first."""
    if domain == "shakespeare":
        rows = _lines(sources.data / "users/shakespeare/tinyshakespeare_by_speaker.jsonl")
        people = {row["user"]: row["text"] for row in rows}
    else:
        rows = _lines(sources.data / "users/lamp7_dev/lamp7_dev.jsonl")
        people = {row["user"]: row["profile"] for row in rows}
    return dict(sorted(people.items(), key=lambda item: -sum(map(len, item[1]))))


def domain_of(sources: Sources, user: str) -> str:
    """The domain that a user belongs to."""
    return next(domain for domain in DOMAINS if user in user_texts(sources, domain))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file; lines that were torn by a foreign line break are counted on standard
    error."""
    with path.open(encoding="utf-8") as file:
        lines = list(file)
    whole = [line for line in lines if line.startswith("{") and line.endswith("}\n")]
    if len(whole) < len(lines):
        print(f"{path.name}: {len(lines) - len(whole)} torn lines of {len(lines)} left out", file=sys.stderr)
    return [json.loads(line) for line in whole]
