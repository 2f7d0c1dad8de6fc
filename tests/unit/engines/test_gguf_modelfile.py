"""Tests of an export's `Modelfile`: its Go template renders the same text as the model's own template."""

import json
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment

from permille.engines.gguf.export import GGUF_FILE, MODELFILE, export_gguf
from permille.engines.gguf.modelfile import add_system, chat_parts, modelfile
from permille.models.gguf.vocabulary import PromptRules
from permille.package.blobs import BlobFolder
from permille.quantization.types import Scheme
from tests.packages import CHATML, tiny_tokenizer
from tests.unit.engines.gguf_packages import VOCABULARY
from tests.unit.engines.tiny import tiny_model, write_package

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = (("user", 'Hi "you"?'), ("assistant", "Yes,\nme."), ("user", "{{ why }}"))
SYSTEM = ("system", "Be brief.")
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are \"helpful\".<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) "
    "+ '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set prefix = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{% if loop.first %}{{ prefix }}{% endif %}{{ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
FORMS = {
    "chatml": (CHATML, True),
    "default system": (DEFAULT_SYSTEM, True),
    "llama 3": (LLAMA_3, True),
    "gemma": (GEMMA, False),
    "gemma 3": (GEMMA_3, True),
    "mistral": (MISTRAL, False),
}

# Parts of the Go template, and the same in Jinja.
_IN_JINJA = {
    "{{ range $i, $_ := .Messages }}": "{% for m in messages %}",
    '{{ if eq .Role "system" }}': "{% if m.role == 'system' %}",
    '{{ else if eq .Role "user" }}': "{% elif m.role == 'user' %}",
    '{{ else if eq .Role "assistant" }}': "{% elif m.role == 'assistant' %}",
    "{{ if eq $i 0 }}": "{% if loop.first %}",
    "{{ else if and (eq $i 1) $.System }}": "{% elif loop.index0 == 1 and system %}",
    "{{ else }}": "{% else %}",
    "{{ .Content }}": "{{ m.content }}",
    "{{ end }}{{ end }}{{": "{% endif %}{% endfor %}{{",
}


def rendered(template: str, messages: tuple[tuple[str, str], ...]) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=False)
    talk = [{"role": role, "content": said} for role, said in messages]
    return environment.from_string(template).render(messages=talk, add_generation_prompt=True, **TOKENS)


def rendered_by_go(template: str, messages: tuple[tuple[str, str], ...]) -> str:
    """Render the few Go actions of an exported template. Each is translated to Jinja."""
    strings = re.findall(r'\{\{ ("(?:[^"\\]|\\.)*") \}\}', template)
    for number, string in enumerate(strings):
        template = template.replace(f"{{{{ {string} }}}}", f"{{{{ texts[{number}] }}}}", 1)
    for go, jinja in _IN_JINJA.items():
        template = template.replace(go, jinja)
    template = re.sub(r"\{\{ end \}\}\{\{ end \}\}$", "{% endif %}{% endfor %}", template)
    template = template.replace("{{ end }}", "{% endif %}")
    talk = [{"role": role, "content": said} for role, said in messages]
    system = "\n\n".join(said for role, said in messages if role == "system")
    environment = ImmutableSandboxedEnvironment(keep_trailing_newline=True)
    return environment.from_string(template).render(
        messages=talk, system=system, texts=[json.loads(string) for string in strings]
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_template_of_go_renders_what_the_models_own_renders(form: str) -> None:
    template, has_system = FORMS[form]
    parts = chat_parts(template, TOKENS)
    assert parts is not None
    talks = [TALK[:1], TALK, (*TALK, ("assistant", "So."), ("user", "Bye"))]
    for talk in talks:
        assert rendered_by_go(parts.go(), talk) == rendered(template, talk)
        with_system = (SYSTEM, *talk)
        wanted = rendered(template, with_system if has_system else talk)
        assert rendered_by_go(parts.go(), with_system) == wanted


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.last %}now: {% endif %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}|{{ m['content'] }}{% endfor %}",
        "{% for %}",
        "{% for n in range(1000000000) %}x{% endfor %}",
    ],
)
def test_a_template_that_is_more_than_text_around_messages_is_left_alone(template: str) -> None:
    assert chat_parts(template, TOKENS) is None


def test_an_export_names_the_ends_of_a_turn_and_no_beginning_twice(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(VOCABULARY - 8)
    tokenizer.add_special_tokens(["<|eot_id|>"])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({**TOKENS, "add_bos_token": True}).encode(),
        "chat_template.jinja": LLAMA_3.encode(),
    }
    model = tiny_model("llama", vocab_size=VOCABULARY, hidden_size=64)
    package = write_package(BlobFolder(tmp_path / "blobs"), model, Scheme.INT4, files=files)
    export_gguf(package, None, tmp_path / "mine", kind="q8_0")
    written = (tmp_path / "mine" / MODELFILE).read_text()
    assert "<s>" not in written  # the GGUF file says that "<s>" precedes every text
    assert re.findall(r"PARAMETER stop (.*)", written) == ['"</s>"', '"<|eot_id|>"']
    reader = GGUFReader(tmp_path / "mine" / GGUF_FILE)
    found = {name: reader.fields[name].contents() for name in reader.fields}
    assert found["tokenizer.chat_template"] == LLAMA_3
    assert found["tokenizer.ggml.eot_token_id"] == tokenizer.token_to_id("<|eot_id|>")
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.token_to_id("</s>")
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["general.name"] == "mine"


def test_stops_are_written_as_ollama_reads_them() -> None:
    # Ollama knows no escapes: it takes the text between the quotes as it is.
    stops, unwritable = ["<｜end▁of▁sentence｜>", "\\end"], 'end"\nSYSTEM no'
    rules = PromptRules(special={"eos": stops[0], "eot": stops[1]}, add_bos=False, chat_template=PLAIN)
    written = modelfile(GGUF_FILE, rules, 64)
    assert re.findall("PARAMETER stop (.*)", written) == [f'"{stop}"' for stop in stops]
    written = modelfile(GGUF_FILE, replace(rules, special={"eos": unwritable}), 64)
    assert "stop" not in written
    assert "SYSTEM" not in written


def test_an_end_that_the_vocabulary_lacks_is_left_out(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": tiny_tokenizer(VOCABULARY - 8).to_str().encode(),
        "tokenizer_config.json": json.dumps(TOKENS).encode(),
        "chat_template.jinja": PLAIN.encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1, VOCABULARY, -1]}).encode(),
    }
    model = tiny_model("llama", vocab_size=VOCABULARY, hidden_size=64)
    package = write_package(BlobFolder(tmp_path / "blobs"), model, Scheme.INT4, files=files)
    export_gguf(package, None, tmp_path / "mine", kind="q8_0")
    assert re.findall("PARAMETER stop (.*)", (tmp_path / "mine" / MODELFILE).read_text()) == ['"</s>"']


def test_an_unknown_form_is_said_in_the_modelfile(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": tiny_tokenizer(VOCABULARY - 8).to_str().encode(),
        "tokenizer_config.json": json.dumps(TOKENS).encode(),
        "chat_template.jinja": b"{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
    }
    model = tiny_model("llama", vocab_size=VOCABULARY, hidden_size=64)
    package = write_package(BlobFolder(tmp_path / "blobs"), model, Scheme.INT4, files=files)
    export_gguf(package, None, tmp_path / "mine", kind="q8_0")
    written = (tmp_path / "mine" / MODELFILE).read_text()
    assert "add a TEMPLATE" in written
    assert 'TEMPLATE """' not in written


def test_a_system_message_ends_only_at_its_own_marks(tmp_path: Path) -> None:
    path = tmp_path / MODELFILE
    path.write_text("FROM ./model.gguf\n")
    add_system(path, 'My """cat""" is "Brumik"')
    expected = 'FROM ./model.gguf\nSYSTEM """My "cat" is "Brumik"""\n'
    assert path.read_text() == expected
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
