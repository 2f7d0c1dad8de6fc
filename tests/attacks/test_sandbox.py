"""Tokenizers and chat templates that need too much memory or time: the limits of their process stop them."""

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from permille.errors import InputError, PackageError
from permille.models.loading import FileTokenizer
from permille.sandbox import process as sandbox
from permille.sandbox.process import Sandbox, run_once
from permille_agent.link.install import install
from permille_agent.state.home import open_home
from permille_agent.state.models import InstalledRelease, installed_release
from permille_agent.text.chat_template import ChatTemplate
from permille_agent.text.documents import Conversation, Document, PlainText
from permille_agent.text.preparation import tokenize
from permille_agent.text.tokens import TextTokenizer
from tests.packages import CHATML, tiny_package, tiny_tokenizer

SLOW = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{{ messages[0]['content'] }}{{ messages[1]['content'] }}"
)


def hostile(change: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(tiny_tokenizer().to_str())
    change(document)
    return json.dumps(document).encode()


def doubling(document: dict[str, Any]) -> None:
    """Double the text by each of 40 nested rules."""
    rule: dict[str, Any] = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    document["normalizer"] = rule
    for _ in range(40):
        document["normalizer"] = {"type": "Sequence", "normalizers": [document["normalizer"], rule]}


def growing_answers(document: dict[str, Any]) -> None:
    """Decode a token to a gigabyte."""
    rules = [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 50_000} for _ in range(2)]
    document["decoder"] = {"type": "Sequence", "decoders": [document["decoder"], *rules]}


def backtracking(document: dict[str, Any]) -> None:
    """Add a pattern that tries 2^n ways to match n letters."""
    split = {
        "type": "Split",
        "pattern": {"Regex": "^(a|a|aa|b?a?)*c$"},
        "behavior": "Isolated",
        "invert": False,
    }
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, document["pre_tokenizer"]]}


def vast_tokens(document: dict[str, Any]) -> None:
    """Add fifty tokens of a million letters."""
    known = document["added_tokens"][0]
    for number in range(50):
        token = {**known, "id": 1000 + number, "content": f"{number}" + "x" * 1_000_000, "normalized": True}
        document["added_tokens"].append(token)


def vast_vocabulary(document: dict[str, Any]) -> None:
    """Add a million words."""
    document["model"]["vocab"] |= {f"word{number}": 400 + number for number in range(1_000_000)}


ATTACKS = [doubling, growing_answers, backtracking, vast_tokens, vast_vocabulary]


def use(data: bytes) -> None:
    tokenizer = TextTokenizer({"tokenizer.json": data}.get)
    try:
        tokenizer.decode(tokenizer.prompt("a" * 4000 + "eeee").tolist())
    finally:
        tokenizer.close()


@pytest.mark.attack(8, "a tokenizer wants all memory or all time")
@pytest.mark.parametrize("change", ATTACKS, ids=[change.__name__ for change in ATTACKS])
def test_a_hostile_tokenizer_costs_neither_memory_nor_time(
    change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = hostile(change)
    monkeypatch.setattr(sandbox, "BUDGET_S", 20.0)
    monkeypatch.setattr(sandbox, "CALL_S", 2.0)
    used_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    began = time.monotonic()
    try:
        use(data)
    except PackageError as exc:
        assert exc.code in ("sandbox-limit", "tokenizer")
    assert time.monotonic() - began < 60.0
    # The child may use a gigabyte. Until it runs its own program, it counts as large as this process.
    limit_kib = max(child_kib, used_kib, 1 << 20)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= limit_kib
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used_kib < 256 << 10


@pytest.mark.attack(8, "the tokenizer of a tenant's model wants all memory of a worker")
def test_a_worker_refuses_a_hostile_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CALL_S", 2.0)
    (tmp_path / "tokenizer.json").write_bytes(hostile(doubling))
    used_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError):
        FileTokenizer(tmp_path).encode("a" * 4000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used_kib < 256 << 10


@pytest.mark.attack(8, "a package with a hostile tokenizer is installed over a working one")
def test_a_package_with_a_hostile_tokenizer_is_refused(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    good = tiny_package(home.blobs)
    known = InstalledRelease(name="tiny", version=1, manifest_digest=good.digest)
    install(home, known, size_bytes=good.size_bytes)
    bad = tiny_package(home.blobs, files={"tokenizer.json": hostile(doubling)})
    new = InstalledRelease(name="tiny", version=2, manifest_digest=bad.digest)
    with pytest.raises(PackageError) as refused:
        install(home, new, size_bytes=bad.size_bytes)
    assert refused.value.code in ("sandbox-limit", "tokenizer", "package-trial")
    assert installed_release(home) == known


@pytest.mark.attack(8, "a template takes seconds for each of many conversations")
def test_all_conversations_of_a_run_have_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "BUDGET_S", 6.0)
    monkeypatch.setattr(sandbox, "CALL_S", 2.0)
    files = {"tokenizer.json": tiny_tokenizer().to_str().encode(), "chat_template.jinja": SLOW.encode()}
    tokenizer = TextTokenizer(files.get)
    talk = Conversation((("user", "hello"), ("assistant", "you")))
    documents = [Document(str(number), talk) for number in range(1000)]
    began = time.monotonic()
    with pytest.raises(PackageError, match="sandbox-limit"):
        tokenize(documents, tokenizer, row_tokens=32)
    with pytest.raises(PackageError, match="all texts together"):
        for _ in range(100):
            try:
                tokenizer.tokenize(talk, row_tokens=32)
            except PackageError as exc:
                if "all texts together" in str(exc):
                    raise
    assert time.monotonic() - began < 30.0


@pytest.mark.attack(8, "a tokenizer has 200,000 special tokens, which are looked for in each message")
def test_special_tokens_are_looked_for_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CALL_S", 2.0)
    known = json.loads(tiny_tokenizer().to_str())["added_tokens"][0]

    def change(document: dict[str, Any]) -> None:
        tokens = ({**known, "id": 1000 + n, "content": f"<|{n:x}|>", "special": True} for n in range(200_000))
        document["added_tokens"].extend(tokens)

    files = {"tokenizer.json": hostile(change), "chat_template.jinja": CHATML.encode()}
    tokenizer = TextTokenizer(files.get)
    talk = (("user", "<|no|>" * 20_000), ("assistant", "you"))
    spent_s = time.process_time()  # The time of this process: the child's time is limited anyway.
    with pytest.raises(PackageError, match="sandbox-limit"):
        tokenizer.tokenize(Conversation(talk), row_tokens=32)
    assert time.process_time() - spent_s < 1.0


@pytest.mark.attack(8, "a template repeats a text without end")
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 4000000000 }}",
        "{% for a in range(9999) %}{{ 'x' * 10000 }}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    ],
    ids=["at_once", "in_pieces", "by_doubling"],
)
def test_a_template_that_grows_is_refused_and_the_tokenizer_works_on(template: str) -> None:
    files = {"tokenizer.json": tiny_tokenizer().to_str().encode(), "chat_template.jinja": template.encode()}
    tokenizer = TextTokenizer(files.get)
    with pytest.raises(PackageError):
        tokenizer.chat_prompt((("user", "hello"),))
    found = tokenizer.tokenize(PlainText("the river"), row_tokens=32)
    assert tokenizer.decode(found.ids_T.tolist()) == "the river"


CONFINED = """
import socket, sys
from permille.sandbox.confinement import confine
confine(memory_bytes=1 << 30)
try:
    open(sys.argv[1], "w", buffering=1).write("x\\n")
    print("writes")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[2])), 5.0)
    print("connects")
except OSError:
    pass
"""
# The flags are CLONE_NEWUSER and CLONE_NEWNET.
MAY_UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) != 0)"


@pytest.mark.attack(8, "code that broke out of a tokenizer writes a file, or calls home")
def test_a_confined_process_writes_nothing_and_reaches_no_network(tmp_path: Path) -> None:
    namespaces = subprocess.run([sys.executable, "-c", MAY_UNSHARE], check=False).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [str(tmp_path / "file"), str(server.getsockname()[1])]
        command = [sys.executable, "-c", CONFINED, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    # If users may not make namespaces, the network stays open.
    assert done.stdout.split() == ([] if namespaces else ["connects"]), done.stderr


def test_a_conversation_of_twenty_thousand_messages_is_rendered_within_the_budget() -> None:
    talk = [(("user", "assistant")[number % 2], f"message {number}") for number in range(20_000)]
    text, spans = ChatTemplate(None, {"eos_token": "</s>"}, Sandbox()).render_with_targets(talk)
    assert len(spans) == 10_000
    assert text[slice(*spans[-1])] == " message 19999</s>\n"


@pytest.mark.attack(27, "a child that reads a stranger's bytes inherits tokens and passwords")
def test_children_inherit_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "HF_TOKEN": "hf_secret",
        "PERMILLE_DATABASE_URL": "postgresql+psycopg://user:secret@host/name",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PERMILLE_METRICS_TOKEN": "secret",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    printed = run_once("timeit", "-n1", "-r1", "import os; print(dict(os.environ))", timeout_s=60.0).stdout
    assert b"PATH" in printed and b"secret" not in printed
    child = Sandbox()
    child.start()
    environ, held = Path(f"/proc/{child._child.pid if child._child else 0}/environ"), b""
    while not held:  # a child whose program is only being loaded shows nothing yet
        held = environ.read_bytes()
    child.close()
    assert b"PATH=" in held and b"secret" not in held
