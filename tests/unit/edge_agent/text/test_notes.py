"""Tests of the index of the user's text: what it finds and erases, and what it does when it is damaged."""

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from permille.errors import OperatorError
from permille_agent.state.home import Home, open_home
from permille_agent.text import notes
from permille_agent.text.notes import erase_index, find_passages, index_text, remove_text
from permille_agent.text.reading import survey

FILLER = "The rain went on and the barrel filled until noon, and nobody came by. " * 5


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


def _write(folder: Path, name: str, *paragraphs: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    texts = [f"{paragraph}\n\n{number}. {FILLER}" for number, paragraph in enumerate(paragraphs)]
    path.write_text("\n\n".join(texts))
    return path


def _index(home: Home, *paths: Path) -> None:
    index_text(home, survey(paths)[0], paths)


def _found(home: Home, question: str) -> str:
    return "\n".join(passage.text for passage in find_passages(home, question))


def _stored(home: Home) -> bytes:
    return b"".join(path.read_bytes() for path in home.root.glob("notes.sqlite*"))


def test_a_question_finds_its_passage_and_the_name_of_the_file(home: Home, tmp_path: Path) -> None:
    path = _write(tmp_path, "garden.txt", "My cat is called Brumik.", "Tomas keeps bees.", "I sold the cart.")
    _index(home, path)

    (passage,) = find_passages(home, "What is the name of my cat?")

    assert passage.source == "garden.txt"
    assert "Brumik" in passage.text
    assert "Tomas" in _found(home, "Who has a bee?")
    assert home.notes.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("fact", "question"),
    [
        ("Meine Katzen schlafen im Schuppen.", "Wo schläft meine Katze?"),
        ("Vive à Évora depuis mai.", "Depuis quand vis-je à Evora?"),
        ("我的猫叫小黑，它睡在箱子里。", "猫睡在哪里？"),
        ("犬の名前はポチです。", "犬の名前は何ですか？"),
        ("แมวของฉันชื่อบรูมิก", "แมวของฉันชื่ออะไร"),
        ("제 고양이는 나비입니다.", "고양이 이름이 뭐예요?"),
        ("मेरी बिल्ली का नाम ब्रुमिक है।", "बिल्ली कहाँ सोती है?"),
        ("Мою кошку зовут Брумик.", "Как зовут кошку?"),
        ("The cafe\u0301 opens at nine.", "When does the caf\u00e9 open?"),
    ],
)
def test_passages_are_found_in_many_scripts(home: Home, tmp_path: Path, fact: str, question: str) -> None:
    _index(home, _write(tmp_path, "notes.txt", "Tomas keeps bees.", fact, "I sold the cart."))

    (passage,) = find_passages(home, question)

    # The text is given as it was read, up to the form of its accents.
    assert passage.text.startswith(fact.replace("e\u0301", "\u00e9"))


@pytest.mark.parametrize(
    "question",
    [
        "What is the largest planet of the solar system?",
        "Hello!",
        "Hi",
        "",
        "Who is it?",
        '"*" OR NEAR( -^ passages:',
        " ".join(f"cat{number}" for number in range(notes.MOST_WORDS + 1)),
    ],
)
def test_a_question_about_something_else_finds_nothing(home: Home, tmp_path: Path, question: str) -> None:
    _index(home, _write(tmp_path, "notes.txt", "My cat is called Brumik.", "I call this his system."))

    assert find_passages(home, question) == ()


def test_a_rare_word_of_few_notes_does_not_hide_the_subject(home: Home, tmp_path: Path) -> None:
    mended, other = "Joris in Ghent mended my clarinet.", "The clarinet case is red."
    _index(home, _write(tmp_path, "notes.txt", "Mara repairs the roof.", mended, other))

    found = _found(home, "Who repaired the clarinet?")

    assert all(each in found for each in ("Mara", mended, other))


def test_numbers_are_whole_words_and_endings_are_no_words(home: Home, tmp_path: Path) -> None:
    _index(home, _write(tmp_path, "notes.txt", "Room4471 is Ana's.", "Room4472 is free.", "The key is Jo's."))

    assert "4472" not in _found(home, "What is room4471?")
    assert "Ana" not in _found(home, "What is Jo's?")


def test_a_heading_stays_with_what_follows_and_long_paragraphs_are_cut(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    messages = "\n".join(f"Jo: message {number} about nothing in particular" for number in range(60))
    insurance = "# Insurance\n\n- the number of the policy is 88-1234-X"
    path.write_text(f"{insurance}\n\n# Chat\n\n{messages}\nAna: the code is 4471\n")
    _index(home, path)

    assert _found(home, "Where is the insurance?") == insurance
    assert "4471" in (cut := _found(home, "What did Ana say about the code?"))
    assert len(cut) < 3 * 600


def test_conversations_and_completions_are_found(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "Where is Brumik?"}, '
        '{"role": "assistant", "content": "On the shelf."}]}\n'
        '{"prompt": "The ladder: ", "completion": "it belongs to Ludmila."}\n'
    )
    _index(home, path)

    assert "On the shelf" in _found(home, "Where is Brumik?")
    assert "Ludmila" in _found(home, "Whose is the ladder?")


def test_a_changed_file_and_a_file_that_is_gone_are_replaced(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    _write(folder, "a.txt", "Brumik is a cat.")
    gone = _write(folder, "b.txt", "Wendelin is a boat.")
    other = _write(tmp_path, "c.txt", "Halbrook is a dentist.")
    _index(home, folder)
    _index(home, other)
    gone.unlink()
    _write(folder, "a.txt", "Zelphan is a medicine.")

    _index(home, folder)

    assert _found(home, "Brumik") == _found(home, "Wendelin") == ""
    assert "Zelphan" in _found(home, "Zelphan")
    assert "Halbrook" in _found(home, "Halbrook")


def test_copies_of_a_file_count_once(home: Home, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _index(home, _write(tmp_path / name, "notes.txt", "My cat is called Brumik.", "The cat likes fish."))

    assert sorted(passage.text[:10] for passage in find_passages(home, "What does my cat do?")) == [
        "My cat is ",
        "The cat li",
    ]


@pytest.mark.attack(29, "removed text is left in the index of the notes")
def test_removed_text_leaves_no_byte_behind(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    _write(folder, "a.txt", "Brumik is a cat.")
    kept = _write(folder, "b.txt", "Wendelin is a boat.")
    _index(home, folder)
    assert b"Brumik" in _stored(home)

    assert remove_text(home, [folder], kept=[kept]) == 1

    # FTS5 stores words in lower case and by their stems, next to the text.
    assert b"rumik" not in _stored(home)
    assert b"Wendelin" in _stored(home)
    assert remove_text(home, [folder]) == 1
    assert b"endelin" not in _stored(home)
    assert remove_text(home, [folder]) == 0


@pytest.mark.attack(29, "removed text of a file whose name is no UTF-8 is left in the index of the notes")
def test_text_of_a_file_with_an_odd_name_is_erased(home: Home, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"notes-\xff.txt")
    path.write_text("My cat is called Brumik, and she sleeps on the seed boxes.")
    _index(home, path)
    _index(home, path)
    assert _found(home, "What is my cat called?").count("Brumik") == 1
    assert remove_text(home, [path]) == 1
    assert b"rumik" not in _stored(home)


def test_nothing_is_removed_where_nothing_was_indexed(home: Home, tmp_path: Path) -> None:
    assert remove_text(home, [tmp_path]) == 0
    assert not home.notes.exists()


@pytest.mark.parametrize("damage", [b"not a database", b"SQLite format 3\0" + bytes(4096)])
def test_a_damaged_index_is_named_and_can_be_built_again(home: Home, tmp_path: Path, damage: bytes) -> None:
    path = _write(tmp_path, "notes.txt", "My cat is called Brumik.")
    home.notes.write_bytes(damage)

    with pytest.raises(OperatorError, match="data repair"):
        find_passages(home, "What is my cat called?")
    with pytest.raises(OperatorError, match="data repair"):
        _index(home, path)
    erase_index(home)
    _index(home, path)

    assert "Brumik" in _found(home, "What is my cat called?")


@pytest.mark.parametrize("is_full", [True, False])
def test_an_index_that_is_whole_need_not_be_built_again(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    _index(home, _write(tmp_path, "notes.txt", "My cat is called Brumik."))
    more = _write(tmp_path, "more.txt", *(f"Brumik sleeps on box {number}." for number in range(99)))
    monkeypatch.setattr(notes, "_WAIT_S", 0.0)
    with closing(sqlite3.connect(home.notes)) as other:
        if is_full:  # SQLite tells the end of its pages as it tells a full disk
            monkeypatch.setattr(notes, "_TABLE", "PRAGMA max_page_count = 1")
        else:
            other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OperatorError, match="Free some space" if is_full else "Another process") as told:
            _index(home, more)
    assert "repair" not in str(told.value)


def test_a_python_without_fts5_says_so(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_TABLE", notes._TABLE.replace("fts5", "fts9"))

    with pytest.raises(OperatorError, match="lacks FTS5"):
        _index(home, _write(tmp_path, "notes.txt", "My cat is called Brumik."))

    assert not home.notes.exists()
    assert remove_text(home, [tmp_path]) == 0


def test_a_server_finds_passages_while_a_training_writes(home: Home, tmp_path: Path) -> None:
    path = _write(tmp_path, "notes.txt", *(f"Brumik sleeps on box {number}." for number in range(200)))
    _index(home, path)
    documents = survey([path])[0]

    def write() -> None:
        for _ in range(5):
            index_text(home, documents, [path])

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        while not writing.done():
            assert len(find_passages(home, "Where does Brumik sleep?")) == notes.MOST_PASSAGES
        writing.result()

    with sqlite3.connect(home.notes) as index:
        assert index.execute("SELECT count(*) FROM passages").fetchone()[0] == 200
