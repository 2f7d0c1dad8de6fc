"""Tests of chat templates in the confined child, against transformers' `apply_chat_template`.

The templates below are made for these tests, with the constructs of published ones. Examples are a system
turn joined to the first question, tools as JSON, documents, the date, and earlier answers without thoughts.
To compare published templates, too, put them as `*.jinja` into a folder and set PERMILLE_TEMPLATES to it.
"""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from permille.sandbox.process import Sandbox
from tests.packages import CHATML, tiny_tokenizer

Messages = list[dict[str, Any]]

JOINS_THE_SYSTEM_TURN = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}{%- set turns = messages -%}
{%- endif -%}
{{ bos_token }}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant take turns') }}
    {%- endif -%}
    {{ '<' + ('model' if turn['role'] == 'assistant' else turn['role']) + '>' + (first if loop.first else '')
       + turn['content'] | trim + eos_token + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<model>' }}{% endif -%}
"""
NAMES_TOOLS_AND_DOCUMENTS = """
{%- macro listed(title, items) -%}
    {{ title }}:{% for item in items %}
{{ item | tojson(ensure_ascii=False) }}|{{ item | tojson(indent=4) }}|{{ item | tojson(true) }}
|{{ item | tojson(separators=(',', ':'), sort_keys=true) }}{% endfor %}
{%- endmacro -%}
Today is {{ strftime_now('%d %B %Y') }}.
{% if tools is not none and tools %}{{ listed('Tools', tools) }}{% endif %}
{% if documents is defined and documents %}{{ listed('Documents', documents) }}{% endif %}
{% for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}{{ call.function.name }}
        {{- call.function.arguments.items() | list }}
        {%- for key, value in call.function.arguments.items() %}<{{ key }}={{ value | string }}>{% endfor %}
        {%- endfor %}
    {%- else %}
        {{- message.role | upper }} {{ message['content'] | default('', true) }}
    {%- endif %}
{% endfor %}
{%- if not add_generation_prompt is defined %}never{% endif %}{{ nothing }}{{ unk_token }}
"""
CUTS_THOUGHTS = """
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.found %}
        {%- set ns.found = true %}{%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set said = message.content %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if '</think>' in said and loop.index0 < ns.last %}
            {%- set said = said.split('</think>')[-1].lstrip() %}
        {%- endif %}
        {{- '[assistant]' ~ said ~ eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '[' ~ message.role ~ ']' ~ said.strip() | capitalize }}
    {%- endif %}
    {%- if loop.index0 == 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if "/no" in instructions or enable_thinking is defined %}<think></think>{% endif %}
{%- if add_generation_prompt %}[assistant]{% endif %}
"""
OWN = {
    "chatml": CHATML,
    "joins-the-system-turn": JOINS_THE_SYSTEM_TURN,
    "names-tools-and-documents": NAMES_TOOLS_AND_DOCUMENTS,
    "cuts-thoughts": CUTS_THOUGHTS,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the wéather of a <city>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
DOCUMENTS = [{"doc_id": 1, "title": "One", "text": "é & text"}, {"doc_id": 2, "title": "Two", "text": "more"}]


def turns(*said: str, system: str | None = None) -> Messages:
    roles = ("user", "assistant")
    found: Messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    return found if system is None else [{"role": "system", "content": system}, *found]


CALLED: Messages = [
    *turns("Weather?"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "abcdefghi",
                "function": {"name": "weather", "arguments": {"city": "Köln"}},
            }
        ],
    },
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "sunny"},
    *turns("Thanks"),
]
TALKS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "no system turn": (turns("Grüße & <b>\n  two"), {}),
    "a system turn": (turns("Hi", system=" Be brief. "), {}),
    "several turns": (turns("Hi", "<think>x</think> Hello", "Bye", "See you", system="/no_think"), {}),
    "turns out of order": ([*turns("Hi"), *turns("Hi")], {}),
    "tools": (turns("Hi", system="Be brief."), {"tools": TOOLS}),
    "documents": (turns("Hi", system="Be brief."), {"documents": DOCUMENTS}),
    "tools and documents": (turns("Hi", "Ho", "Hi"), {"tools": TOOLS, "documents": DOCUMENTS}),
    "tools that were called": (CALLED, {"tools": TOOLS}),
}


def check(template: str) -> set[str]:
    """Render all conversations in both ways, and compare. Return those that transformers renders."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(300), **names)
    sandbox, rendered = Sandbox(), set()
    for talk, (messages, given) in TALKS.items():
        for prompt in (True, False):
            request = {
                "do": "render",
                "template": template,
                "variables": names,
                "messages": messages,
                "prompt": prompt,
                "prefixes": [],
                "limit": 1 << 20,
                "today": datetime.now().astimezone().date().isoformat(),
                **given,
            }
            answer = sandbox.ask(request, characters=10 * len(template))
            try:
                expected = tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=prompt, **given
                )
            except Exception as exc:  # noqa: BLE001 - templates fail as they like
                assert "error" in answer, (talk, exc)
            else:
                assert answer.get("text") == expected, (talk, answer)
                rendered.add(talk)
    sandbox.close()
    return rendered


@pytest.mark.parametrize("name", OWN)
def test_a_template_renders_as_by_transformers(name: str) -> None:
    refused = {"joins-the-system-turn": {"turns out of order", "tools that were called"}}
    assert check(OWN[name]) == TALKS.keys() - refused.get(name, set())


def published() -> Iterator[Path]:
    folder = os.environ.get("PERMILLE_TEMPLATES")
    yield from sorted(Path(folder).glob("*.jinja")) if folder else ()


def test_published_templates_render_as_by_transformers() -> None:
    paths = list(published())
    if not paths:
        pytest.skip("published templates are not here: set PERMILLE_TEMPLATES to a folder of *.jinja files")
    rendered = {path.name: check(path.read_text()) for path in paths}
    assert any(rendered.values())
