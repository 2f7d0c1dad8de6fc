"""How a row of each task is put into words, and what the candidate answers are.

Sources: table 6 (appendix C.5) of "Zeroth-order fine-tuning of LLMs with extreme sparsity" (SENSITIVE, and
SENSITIVE_LLAMA where it words a task otherwise for Llama 2), and table 7 of the P-RGE paper (P_RGE), both
after MeZO and PromptSource.

Deviations, because the printed tables are not usable as they stand: line breaks stand where MeZO's
templates have them; a question gets one question mark, whether the row has one or not; "so/because" joins
premise and answer into one sentence, its first letter in lower case unless it is the word "I", as MeZO does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Row = Mapping[str, Any]

YES_NO = (" Yes", " No")


class Task(StrEnum):
    """The tasks of both papers that we can read, and documents to be continued."""

    SST2 = "sst2"
    RTE = "rte"
    CB = "cb"
    BOOLQ = "boolq"
    WSC = "wsc"
    WIC = "wic"
    MULTIRC = "multirc"
    COPA = "copa"
    WINOGRANDE = "winogrande"
    SQUAD = "squad"
    TEXT = "text"
    """Language modelling: no paper's task, but what a device does."""


class Wording(StrEnum):
    """Whose prompts. Tasks that a paper words once are the same under both of its names."""

    SENSITIVE = "sensitive"
    SENSITIVE_LLAMA = "sensitive-llama"
    P_RGE = "p-rge"


@dataclass(frozen=True, slots=True)
class Worded:
    """Prompt and candidates of a row; candidates in the order of the task's labels."""

    prompt: str
    candidates: tuple[str, ...]


def worded(task: Task, row: Row, wording: Wording) -> Worded:
    """The prompt and the candidates of a row.

    Args:
        row: the fields of the task as SuperGLUE names them; checked by `rows.py`.

    Raises:
        KeyError: the row lacks a field.
    """
    return _PROMPTS.get((task, wording), _PROMPTS[task, Wording.SENSITIVE])(row)


def _sst2(row: Row) -> Worded:
    return Worded(f"{row['sentence'].strip()} It was", (" terrible", " great"))


def _sst2_llama(row: Row) -> Worded:
    return Worded(f"### Sentence: {row['sentence'].strip()} ### Sentiment:", (" negative", " positive"))


def _rte(row: Row) -> Worded:
    return Worded(
        f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?\n', ("Yes", "No")
    )


def _rte_llama(row: Row) -> Worded:
    return Worded(f'Suppose "{row["premise"]}" Can we infer that "{row["hypothesis"]}"? Yes or No?', YES_NO)


def _cb(row: Row) -> Worded:
    return Worded(
        f'Suppose {row["premise"]} Can we infer that "{row["hypothesis"]}"? Yes, No, or Maybe?\n',
        ("Yes", "No", "Maybe"),
    )


def _boolq(row: Row) -> Worded:
    return Worded(f"{row['passage']} {_question(row['question'])}\n", ("No", "Yes"))


def _boolq_llama(row: Row) -> Worded:
    return Worded(f"{row['passage']} {_question(row['question'])}", (" No", " Yes"))


def _wsc(row: Row) -> Worded:
    target = row["target"]
    return Worded(
        f'{row["text"]}\nIn the previous sentence, does the pronoun "{target["span2_text"]}" refer to '
        f"{target['span1_text']}? Yes or No?\n",
        ("No", "Yes"),
    )


def _wsc_p_rge(row: Row) -> Worded:
    target = row["target"]
    return Worded(
        f'{row["text"]} In the previous sentence, does the pronoun "{target["span2_text"]}" refer to '
        f"{target['span1_text']}?\n",
        ("No", "Yes"),
    )


def _wic(row: Row) -> Worded:
    return Worded(
        f'Does the word "{row["word"]}" have the same meaning in these two sentences? Yes, No?\n'
        f"{row['sentence1']}\n{row['sentence2']}\n",
        ("No", "Yes"),
    )


def _wic_p_rge(row: Row) -> Worded:
    return Worded(
        f'Does the word "{row["word"]}" have the same meaning in these two sentences?\n'
        f"{row['sentence1']} {row['sentence2']}\nYes, No?\n",
        ("No", "Yes"),
    )


def _multirc(row: Row) -> Worded:
    return Worded(
        f"{row['paragraph']}\nQuestion: {row['question']}\n"
        f'I found this answer "{row["answer"]}". Is that correct? Yes or No?\n',
        ("No", "Yes"),
    )


def _copa(row: Row) -> Worded:
    joint = "so" if row["question"] == "effect" else "because"
    choices = (row["choice1"], row["choice2"])
    return Worded(
        f"{row['premise'].strip().rstrip('.')} {joint}",
        tuple(f" {_continued(choice)}" for choice in choices),
    )


def _winogrande(row: Row) -> Worded:
    """The candidates are the option with all that follows it; the prompt is what stands before the blank."""
    context, rest = row["sentence"].split("_", 1)
    return Worded(
        context.rstrip(), tuple(f" {option}{rest.rstrip()}" for option in (row["option1"], row["option2"]))
    )


def _squad(row: Row) -> Worded:
    return Worded(
        f"Title: {row['title']}\nContext: {row['context']}\nQuestion: {row['question'].strip()}\nAnswer:", ()
    )


def _text(row: Row) -> Worded:
    """A document as the agent reads it: all of it is learned, or what follows its prompt."""
    return Worded(row["prompt"], (row["completion"],)) if "completion" in row else Worded("", (row["text"],))


def _continued(sentence: str) -> str:
    first = sentence.split(maxsplit=1)[0]
    return sentence if first == "I" or first.startswith("I'") else sentence[:1].lower() + sentence[1:]


def _question(text: str) -> str:
    return text.strip().rstrip("?") + "?"


_PROMPTS: dict[tuple[Task, Wording], Callable[[Row], Worded]] = {
    (Task.SST2, Wording.SENSITIVE): _sst2,
    (Task.SST2, Wording.SENSITIVE_LLAMA): _sst2_llama,
    (Task.RTE, Wording.SENSITIVE): _rte,
    (Task.RTE, Wording.SENSITIVE_LLAMA): _rte_llama,
    (Task.CB, Wording.SENSITIVE): _cb,
    (Task.BOOLQ, Wording.SENSITIVE): _boolq,
    (Task.BOOLQ, Wording.SENSITIVE_LLAMA): _boolq_llama,
    (Task.WSC, Wording.SENSITIVE): _wsc,
    (Task.WSC, Wording.P_RGE): _wsc_p_rge,
    (Task.WIC, Wording.SENSITIVE): _wic,
    (Task.WIC, Wording.P_RGE): _wic_p_rge,
    (Task.MULTIRC, Wording.SENSITIVE): _multirc,
    (Task.COPA, Wording.SENSITIVE): _copa,
    (Task.WINOGRANDE, Wording.SENSITIVE): _winogrande,
    (Task.SQUAD, Wording.SENSITIVE): _squad,
    (Task.TEXT, Wording.SENSITIVE): _text,
}
