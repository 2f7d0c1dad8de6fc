"""Tests of conversations that read only what is new: the tokens that they read, and those that they write."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.light.decoding import TextPass
from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError
from permille_agent.local import conversations as conversations_module
from permille_agent.local.conversations import Conversations
from tests.unit.engines.tiny import CONFIGS, POSITIONS, tiny_package, variants

FIRST = [1, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]
GREEDY = TokenSampling(max_new_tokens=6)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of tokens that each pass has read before its first new token."""
    found: list[int] = []
    next_logits = TextPass.next_logits

    def counted(run: TextPass, id_M: NDArray[np.int64]) -> NDArray[np.float32]:
        if run.length == 0 or len(id_M) > 1:
            found.append(len(id_M))
        return next_logits(run, id_M)

    monkeypatch.setattr(TextPass, "next_logits", counted)
    return found


def _ids(*parts: list[int]) -> NDArray[np.int64]:
    return np.array([token for part in parts for token in part], np.int64)


@pytest.mark.parametrize("family", CONFIGS)
def test_later_turns_read_only_what_is_new_and_write_the_same(
    family: str, tmp_path: Path, read: list[int]
) -> None:
    package = tiny_package(tmp_path, family).package
    values_K = variants(package, 1)[0]
    engine = LightEngine(package)
    conversations = Conversations(engine)

    def answer(*parts: list[int]) -> list[int]:
        return list(conversations.generate("base", values_K, _ids(*parts), GREEDY))

    first = answer(FIRST)
    second = answer(FIRST, first, [5, 9, 2])
    third = answer(FIRST, first, [5, 9, 2], second, [3, 3])
    edited = answer(FIRST, first, [5, 6, 7, 8])

    # The last token of an answer was written, but not read. Its conversation goes on from there.
    assert read == [len(FIRST), 1 + 3, 1 + 2, 3]
    for written, text in (
        (first, _ids(FIRST)),
        (second, _ids(FIRST, first, [5, 9, 2])),
        (third, _ids(FIRST, first, [5, 9, 2], second, [3, 3])),
        (edited, _ids(FIRST, first, [5, 6, 7, 8])),
    ):
        assert written == list(engine.generate(values_K, text, GREEDY))


def test_the_same_text_again_reads_its_last_token(tmp_path: Path, read: list[int]) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_VK = variants(package, 2)
    conversations = Conversations(LightEngine(package))

    texts = [list(conversations.generate("base", values_VK[0], _ids(FIRST), GREEDY)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert read == [len(FIRST)]
    # Another model has keys and values of its own.
    list(conversations.generate("personal", values_VK[1], _ids(FIRST), GREEDY))
    assert read == [len(FIRST)] * 2


def test_a_reader_who_stops_early_keeps_what_was_read(tmp_path: Path, read: list[int]) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0]
    conversations = Conversations(LightEngine(package))

    pieces = conversations.generate("base", values_K, _ids(FIRST), GREEDY)
    (token,) = islice(pieces, 1)
    pieces.close()  # type: ignore[attr-defined]
    list(conversations.generate("base", values_K, _ids(FIRST, [token, 9, 9]), GREEDY))

    assert read == [len(FIRST), 3]


def test_memory_is_bounded_and_the_oldest_text_goes_first(tmp_path: Path, read: list[int]) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0]
    engine = LightEngine(package)
    token_bytes = engine.read(values_K, _ids(FIRST)).nbytes // len(FIRST)
    conversations = Conversations(engine, most_bytes=2 * 20 * token_bytes)
    texts = [[number] * 15 for number in (11, 12, 13)]

    for text in (*texts[:2], texts[0], texts[2]):
        list(conversations.generate("base", values_K, _ids(text), GREEDY))
    del read[:]
    for text in (texts[0], texts[1]):
        list(conversations.generate("base", values_K, _ids(text, [1, 2]), GREEDY))

    assert read == [2, 17]
    assert sum(text.own.nbytes for text in conversations._texts) <= 2 * 20 * token_bytes


@pytest.mark.parametrize(
    ("free_bytes", "most"), [(None, 256 << 20), (1 << 20, 1 << 18), (1 << 40, 256 << 20)]
)
def test_a_device_with_little_memory_keeps_little(
    free_bytes: int | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations_module, "available_memory", lambda: free_bytes)

    assert Conversations(LightEngine(tiny_package(tmp_path, "llama").package))._most_bytes == most


def test_a_text_beyond_the_limit_keeps_its_beginning(tmp_path: Path, read: list[int]) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0]
    engine = LightEngine(package)
    token_bytes = engine.read(values_K, _ids(FIRST)).nbytes // len(FIRST)
    conversations = Conversations(engine, most_bytes=8 * token_bytes)
    del read[:]

    first = list(conversations.generate("base", values_K, _ids(FIRST), GREEDY))
    second = list(conversations.generate("base", values_K, _ids(FIRST, first), GREEDY))

    assert read == [len(FIRST), len(FIRST) + len(first) - 8]
    assert second == list(engine.generate(values_K, _ids(FIRST, first), GREEDY))


def test_texts_after_a_memory_need_room_for_their_own_tokens_only(tmp_path: Path, read: list[int]) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0]
    engine = LightEngine(package)
    memory = engine.read(values_K, _ids([2] * 30))
    token_bytes = memory.nbytes // len(memory)
    conversations = Conversations(engine, {"personal": memory}, most_bytes=48 * token_bytes)
    texts = [_ids([2] * 30, [number] * 10) for number in (11, 12)]

    del read[:]
    answers = [list(conversations.generate("personal", values_K, ids, GREEDY)) for ids in texts]
    later = [_ids(ids.tolist(), answer, [5, 9]) for ids, answer in zip(texts, answers, strict=True)]
    found = [list(conversations.generate("personal", values_K, ids, GREEDY)) for ids in later]

    assert read == [10, 10, 1 + 2, 1 + 2]
    assert found == [list(engine.generate(values_K, ids, GREEDY)) for ids in later]
    edited = _ids([2] * 20, [7] * 5)
    del read[:]
    assert list(conversations.generate("personal", values_K, edited, GREEDY)) == list(
        engine.generate(values_K, edited, GREEDY)
    )
    assert read[0] == 5


def test_a_text_that_is_too_long_is_refused_with_its_whole_length(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0]
    conversations = Conversations(LightEngine(package))
    list(conversations.generate("base", values_K, _ids(FIRST), GREEDY))

    with pytest.raises(InputError, match=f"The prompt has {POSITIONS + 11} tokens"):
        conversations.generate("base", values_K, _ids(FIRST, [3] * POSITIONS), GREEDY)
    last = _ids(FIRST, [3] * (POSITIONS - len(FIRST) - 1))
    assert len(list(conversations.generate("base", values_K, last, GREEDY))) == 1


def test_values_that_break_the_model_leave_their_own_error(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0] * np.float32(np.nan)
    conversations = Conversations(LightEngine(package))

    with pytest.raises(InputError, match="not finite"):
        list(conversations.generate("base", values_K, _ids(FIRST), GREEDY))


def test_an_interrupt_while_the_prompt_is_read_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tiny_package(tmp_path, "llama").package
    conversations = Conversations(LightEngine(package))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TextPass, "next_logits", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(conversations.generate("base", variants(package, 1)[0], _ids(FIRST), GREEDY))


def test_several_conversations_at_once_are_right(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0]
    engine = LightEngine(package)
    conversations = Conversations(engine)
    texts = [_ids(FIRST, [number], FIRST[:number]) for number in range(1, 9)] * 3
    alone = [list(engine.generate(values_K, text, GREEDY)) for text in texts]

    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda text: list(conversations.generate("base", values_K, text, GREEDY)), texts)
        )

    assert found == alone


def test_an_engine_without_stored_beginnings_reads_everything(tmp_path: Path) -> None:
    package = tiny_package(tmp_path, "llama").package
    values_K = variants(package, 1)[0]
    engine = TorchEngine(package)
    conversations = Conversations(engine)

    for _ in range(2):
        written = list(conversations.generate("base", values_K, _ids(FIRST), GREEDY))
    assert written == list(engine.generate(values_K, _ids(FIRST), GREEDY))
    assert not conversations._texts


def test_a_model_with_a_memory_reads_only_what_follows_it(tmp_path: Path, read: list[int]) -> None:
    package = tiny_package(tmp_path, "gemma2").package
    values_K = variants(package, 1)[0]
    engine = LightEngine(package)
    memory = engine.read(values_K, _ids(FIRST))
    # A limit of 0 keeps no conversation, but the memory stays.
    conversations = Conversations(engine, {"personal": memory}, most_bytes=0)
    read.clear()
    for _ in range(2):
        written = list(conversations.generate("personal", values_K, _ids(FIRST, [5, 9, 2]), GREEDY))
        assert written == list(engine.generate(values_K, _ids(FIRST, [5, 9, 2]), GREEDY))
    list(conversations.generate("base", values_K, _ids(FIRST), GREEDY))
    list(conversations.generate("personal", values_K, _ids(FIRST), GREEDY))
    # The engine itself reads whole texts, and so does a model without a memory. If nothing follows a memory,
    # one token is read again, which is not counted here.
    assert read == [3, 14, 3, 14, 11]
