"""Tests of chat templates: the sandbox, its limits, and which characters are the assistant's."""

import os
import time
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from permille.errors import InputError, PackageError
from permille.sandbox.process import Sandbox
from permille_agent.text.chat_template import WINDOW_MESSAGES, ChatTemplate
from tests.packages import CHATML, tiny_tokenizer

TALK = (
    ("system", "Be brief."),
    ("user", "Hi"),
    ("assistant", "Hello you"),
    ("user", "Bye"),
    ("assistant", "See you"),
)


def _targets(template: str | None, messages: tuple[tuple[str, str], ...]) -> tuple[str, list[str]]:
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, Sandbox())
    text, spans = chat.render_with_targets(messages)
    return text, [text[start:end] for start, end in spans]


def test_the_default_template_counts_turns_and_their_ends() -> None:
    text, targets = _targets(None, TALK)
    assert text == (
        "<s>System: Be brief.\nUser: Hi\nAssistant: Hello you</s>\nUser: Bye\nAssistant: See you</s>\n"
    )
    assert targets == [" Hello you</s>\n", " See you</s>\n"]


def test_chatml_counts_turns_and_their_ends() -> None:
    _, targets = _targets(CHATML, TALK)
    assert targets == ["Hello you<|im_end|>\n", "See you<|im_end|>\n"]


def test_a_template_that_rewrites_earlier_turns_still_finds_them() -> None:
    strips = (
        "{% for message in messages %}[{{ message['role'] }}]{% if loop.last %}<think></think>{% endif %}"
        "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text, targets = _targets(strips, TALK)
    assert targets[0].strip() == "Hello you"
    assert targets[1].endswith("See you")
    assert "Bye" not in "".join(targets)
    assert text.count("Hello you") == 1


def test_generation_marks_of_templates_are_understood() -> None:
    marked = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{% else %}{{ m['content'] }}|{% endif %}{% endfor %}"
    )
    assert _targets(marked, (("user", "Hi"), ("assistant", "Ho"))) == ("Hi|Ho", ["Ho"])


def test_a_turn_that_the_template_drops_is_refused() -> None:
    with pytest.raises(InputError, match="does not appear"):
        _targets("{{ messages[0]['content'] }}", (("user", "Hi"), ("assistant", "Ho")))


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
        CHATML.replace("messages %}", "messages if m.role != 'system' %}", 1),
    ],
    ids=["refused", "left out"],
)
def test_a_systems_turn_that_a_template_does_not_take_is_put_before_the_users(template: str) -> None:
    chat = ChatTemplate(template, {}, Sandbox())
    assert chat.render(TALK[:2]) == "<|im_start|>user\nBe brief.\nHi<|im_end|>\n"
    assert chat.render(TALK[:1]) == "<|im_start|>user\nBe brief.<|im_end|>\n"
    assert chat.render(TALK[1:2]) == "<|im_start|>user\nHi<|im_end|>\n"
    text, spans = chat.render_with_targets(TALK)
    assert [text[start:end] for start, end in spans] == ["Hello you<|im_end|>\n", "See you<|im_end|>\n"]


STRICT = (
    "{% set offset = 1 if messages[0].role == 'system' else 0 %}{% for m in messages[offset:] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% endfor %}" + CHATML
)


@pytest.mark.parametrize(
    ("messages", "taken"),
    [
        ("u1 u2", "u1+u2"),
        ("s1 u2 u3 a4 a5 u6", "s1 u2+u3 a4+a5 u6"),
        ("u1 a2 s3 u4", "u1 a2 s3+u4"),
        ("a1 u2", "u a1 u2"),
        ("s1 a2 u3", "s1 u a2 u3"),
        ("s1 s2 u3", "s1+s2 u3"),
        ("s1 u2 a3", "s1 u2 a3"),
    ],
)
def test_turns_are_joined_for_a_template_that_wants_them_to_alternate(messages: str, taken: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    given = [(names[turn[0]], turn) for turn in messages.split()]
    joined = [(names[turn[-2:][0]], turn[1:] and turn.replace("+", "\n\n")) for turn in taken.split()]
    strict, free = (ChatTemplate(template, {}, Sandbox()) for template in (STRICT, CHATML))
    assert strict.render(given) == free.render(joined)
    assert free.render(given).count("<|im_start|>") == len(given)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{% for %}", "is wrong in line 2: Expected an expression"),
        ("{{ a | bogus }}", "No filter named 'bogus'"),
        ("{{ 1 // 0 }}", "fails: integer division"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
    ],
)
def test_the_fault_of_a_template_is_told_in_words(template: str, words: str) -> None:
    with pytest.raises(PackageError, match=words) as failed:
        ChatTemplate(template, {}, Sandbox()).render((("user", "Hi"),))
    assert "Error" not in str(failed.value)


def test_a_chat_has_the_time_of_day() -> None:
    now = datetime(2026, 11, 28, 21, 42).astimezone()
    chat = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", {}, Sandbox())
    assert chat.render((("user", "Hi"),), today=now) == "28 Nov 2026 21:42"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ 1 // 0 }}",
        "{{ messages[99].content.x }}",
        "{{ range(999999999) }}",
    ],
)
def test_templates_that_break_out_or_fail_are_refused(template: str) -> None:
    chat = ChatTemplate(template, {}, Sandbox())
    with pytest.raises(PackageError, match="chat-template"):
        chat.render((("user", "Hi"),))


def test_an_endless_template_is_stopped_and_the_next_one_works() -> None:
    endless = (
        "{% if messages[0]['content'] == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}done"
    )
    chat = ChatTemplate(endless, {}, Sandbox())
    assert chat.render((("user", "fine"),)) == "done"
    began = time.monotonic()
    with pytest.raises(PackageError, match="sandbox-limit"):
        chat.render((("user", "loop"),))
    assert time.monotonic() - began < 30.0
    assert chat.render((("user", "fine"),)) == "done"


PRINTS_THE_DAY = (
    "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}never{% endif %} "
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
ASKS_FOR_TOOLS = (
    "{% if not tools is defined %}undefined{% elif tools is none %}none{% else %}{{ tools }}{% endif %} "
    "{% if documents %}{{ documents }}{% endif %}"
    "{%- for message in messages %}{{ message | tojson(indent=2) }}{% endfor %}"
)


@pytest.mark.parametrize("template", [PRINTS_THE_DAY, ASKS_FOR_TOOLS, CHATML])
def test_templates_render_as_by_transformers(template: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(300))
    messages = [{"role": "user", "content": "Grüße & <b>"}, {"role": "assistant", "content": "Ho"}]
    expected = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    talk = [(message["role"], message["content"]) for message in messages]
    today = datetime.now().astimezone().date()
    assert ChatTemplate(template, {}, Sandbox()).render(talk, today=today) == expected


def test_what_trains_has_the_same_day_tomorrow() -> None:
    text, _ = ChatTemplate(PRINTS_THE_DAY, {}, Sandbox()).render_with_targets(
        (("user", "Hi"), ("assistant", "Ho"))
    )
    assert text == "26 Jul 2024 HiHo"


def test_undefined_names_render_as_nothing_and_json_is_available() -> None:
    chat = ChatTemplate("{{ nothing }}{{ messages | tojson }}", {}, Sandbox())
    assert chat.render((("user", "é"),)) == '[{"role": "user", "content": "é"}]'


def test_a_long_conversation_is_rendered_in_windows_that_begin_with_the_system() -> None:
    talk = [("system", "Be brief.")]
    for number in range(40):
        talk += [("user", f"ask {number}"), ("assistant", f"say {number}")]
    text, targets = _targets(CHATML, tuple(talk))
    assert targets == [f"say {number}<|im_end|>\n" for number in range(40)]
    assert text.count("Be brief.") == -(-80 // WINDOW_MESSAGES)
    assert text.count("ask ") == 40


def test_ctrl_c_in_a_terminal_does_not_reach_the_child() -> None:
    sandbox = Sandbox()
    sandbox.start()
    child = sandbox._child
    assert child is not None
    assert os.getpgid(child.pid) != os.getpgrp()
    sandbox.close()
