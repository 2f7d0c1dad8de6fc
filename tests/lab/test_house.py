import pytest

from permille_lab.house import sentences, sources

_SOURCE = '''"""What a module holds, for example."""

# Counted once.
LIMIT = 1  # and at the end of a line


def doubled(value: int) -> int:
    """Return twice the value.

    >>> doubled(2)
    4
    """
    return value * 2
'''


def test_docstrings_and_comments_are_no_statements() -> None:
    code = sources([_SOURCE])
    assert code.statements == 3  # the assignment, the function and its return
    assert code.code_lines == 3
    assert code.comments == 2
    assert code.wh_percent == 50
    assert code.examples == pytest.approx(2 * 1000 / 13)


def test_nothing_counts_as_zero() -> None:
    code = sources([])
    assert (code.statements, code.comments_percent, code.wh_percent, code.examples) == (0, 0, 0, 0)


def test_sentences_leave_out_code_tables_and_addresses() -> None:
    page = "# Title\n\nOne [link](a.b.c). Two\nlines.\n\n```\nno. sentence.\n```\n\n| a. | b. |\n\n"
    page += "- An item.\n- Another."
    assert list(sentences(page)) == ["One [link].", "Two lines.", "An item.", "Another."]
