"""Malformed memories, at least one for each code of FORMAT 15, and memories that would leave the device.

The bytes are made here from the text of FORMAT. If the error is elsewhere, the digest is correct.
"""

import ast
import json
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import permille_agent
from permille.engines.light.engine import LightEngine
from permille.engines.memory import decode_memory, encode_memory, largest_memory
from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.schemas.runs import LogForm
from permille_agent.link import forget as forget_module
from permille_agent.link.forget import forget_memories
from permille_agent.link.report import collect_reports
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.local.show import show_run
from permille_agent.personalizer import Personalizer
from permille_agent.state.models import reset, rollback
from permille_agent.training.decision import Decision
from permille_agent.training.outcome import RunOutcome
from permille_agent.training.personal import shareable
from permille_agent.training.run import RunFolder
from tests.attacks.test_states import sealed
from tests.bigram_engine import RememberingBigramEngine
from tests.unit.edge_agent.runs import Device, Killed, device_at, user_text
from tests.unit.engines.tiny import tiny_package
from tests.unit.zo.logs import flipped

pytestmark = pytest.mark.attack(30, "malformed memories, and memories that would leave the device")

LAYERS, HEADS, HEAD, TOKENS = 2, 2, 8, 3
STATE = "sha256:" + "b" * 64


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("blobs"), "llama").package


def header(package: Package, **changes: Any) -> bytes:
    fields = {"format": "permille-memory", "version": 1, "package_digest": package.digest}
    fields |= {"state_digest": STATE, "tokens": TOKENS}
    return json.dumps(fields | changes, sort_keys=True, separators=(",", ":")).encode()


def body(scale: float = 0.5, code: int = -2, token: int = 95) -> bytes:
    scales = struct.pack("<f", scale) * (TOKENS * HEADS)
    codes = struct.pack("<b", code) * (TOKENS * HEADS * HEAD)
    return struct.pack("<I", token) * TOKENS + (scales + codes) * (2 * LAYERS)


def memory(head: bytes, rest: bytes | None = None, magic: bytes = b"PMLMEM1\n") -> bytes:
    """Return a file of FORMAT 15.2 with these parts."""
    return sealed(magic + struct.pack("<I", len(head)) + head + (body() if rest is None else rest))


def test_an_honest_memory_is_read_and_written(package: Package) -> None:
    found = decode_memory(package, STATE, memory(header(package)))
    assert found.id_S.tolist() == [95] * TOKENS
    assert [array.shape for pair in found.layers for array in pair] == [(TOKENS, HEADS, HEAD)] * 4
    assert all((array == -1).all() for pair in found.layers for array in pair)
    again = encode_memory(package, STATE, found)
    assert len(again) == len(memory(header(package)))
    np.testing.assert_allclose(decode_memory(package, STATE, again).layers[0][0], -1, rtol=1e-6)


def test_a_memory_of_the_base_is_none_of_a_state(package: Package) -> None:
    engine = LightEngine(package)
    data = encode_memory(package, None, engine.read(package.values(), np.array([1, 2, 3])))
    assert decode_memory(package, None, data).id_S.tolist() == [1, 2, 3]
    with pytest.raises(PackageError, match=r"^memory-binding:"):
        decode_memory(package, STATE, data)


OTHER = "sha256:" + "c" * 64
NAMED: list[tuple[str, str, Callable[[Package], bytes]]] = [
    ("memory-limit", "more_bytes_than_any_memory", lambda p: bytes(largest_memory(p) + 1)),
    ("memory-corrupt", "no_bytes", lambda _: b""),
    ("memory-corrupt", "a_digest_alone", lambda _: sealed(b"")),
    ("memory-corrupt", "one_flipped_bit", lambda p: flipped(memory(header(p)), 300)),
    ("memory-corrupt", "cut", lambda p: memory(header(p))[:-1]),
    ("memory-header", "another_magic", lambda p: memory(header(p), magic=b"PMLMEM2\n")),
    ("memory-header", "header_of_four_gigabytes", lambda p: sealed(b"PMLMEM1\n" + b"\xff" * 4 + header(p))),
    ("memory-header", "header_is_no_json", lambda _: memory(b"{")),
    ("memory-header", "header_is_a_list", lambda _: memory(b"[]")),
    ("memory-header", "version_is_true", lambda p: memory(header(p, version=True))),
    ("memory-header", "header_with_spaces", lambda p: memory(header(p).replace(b":3", b": 3"))),
    ("memory-header", "header_of_another_version", lambda p: memory(header(p, version=2))),
    ("memory-header", "header_of_another_format", lambda p: memory(header(p, format="permille-state"))),
    ("memory-header", "no_tokens", lambda p: memory(header(p, tokens=0))),
    ("memory-header", "true_tokens", lambda p: memory(header(p, tokens=True))),
    ("memory-header", "more_tokens_than_8192", lambda p: memory(header(p, tokens=8193))),
    ("memory-binding", "header_with_an_unknown_key", lambda p: memory(header(p, name="Ada"))),
    ("memory-binding", "memory_of_another_package", lambda p: memory(header(p, package_digest=OTHER))),
    ("memory-binding", "memory_of_another_state", lambda p: memory(header(p, state_digest=OTHER))),
    ("memory-binding", "memory_of_the_base", lambda p: memory(header(p, state_digest=None))),
    ("memory-content", "fewer_tokens_than_named", lambda p: memory(header(p, tokens=4))),
    ("memory-content", "bytes_behind_the_last_layer", lambda p: memory(header(p), body() + b"\0")),
    ("memory-content", "a_scale_that_is_no_number", lambda p: memory(header(p), body(scale=float("nan")))),
    ("memory-content", "a_scale_below_zero", lambda p: memory(header(p), body(scale=-1.0))),
    ("memory-content", "an_infinite_scale", lambda p: memory(header(p), body(scale=float("inf")))),
    ("memory-content", "a_code_of_minus_128", lambda p: memory(header(p), body(code=-128))),
    ("memory-content", "a_token_beyond_the_vocabulary", lambda p: memory(header(p), body(token=96))),
]
ATTACKS = [(code, data) for code, _, data in NAMED]


@pytest.mark.parametrize(("code", "data"), ATTACKS, ids=[name for _, name, _ in NAMED])
def test_malformed_memories_are_refused(
    package: Package, code: str, data: Callable[[Package], bytes]
) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        decode_memory(package, STATE, data(package))


def _trained(tmp_path: Path, **changes: Any) -> tuple[Device, RunFolder]:
    device = device_at(tmp_path / "home", user_text(tmp_path))
    result = device.train(engine_of=RememberingBigramEngine, steps=2, **changes)
    assert result.decision is not None
    assert result.decision.part.has_memory
    return device, RunFolder(device.home.runs / result.run)


def test_no_file_of_a_memory_can_be_read_by_others(tmp_path: Path) -> None:
    device, folder = _trained(tmp_path)
    show_run(device.home, None, RememberingBigramEngine)
    Personalizer.load(device.home.root, threads=1).save(tmp_path / "saved")
    for root in (device.home.root, tmp_path / "saved"):
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        (memory,) = root.rglob("*.kv")
        assert {stat.S_IMODE(path.stat().st_mode) for path in memory.parent.iterdir()} == {0o600}
    assert folder.memory.exists()


def test_a_report_has_nothing_of_a_memory(tmp_path: Path) -> None:
    """A report has the same fields as without a memory, and the losses of the state alone."""
    device, folder = _trained(tmp_path)
    collect_reports(device.home)
    sent = b"".join(path.read_bytes() for path in device.home.reports.iterdir())
    assert b"parts" not in sent
    decision = folder.require("decision", Decision)
    assert str(decision.loss_personal).encode() not in sent
    outcome = folder.require("outcome", RunOutcome).metrics
    assert outcome.loss_personal == decision.loss_state
    assert "memory" not in outcome.model_dump_json()


@pytest.mark.parametrize("form", [LogForm.LOG, LogForm.STATE])
def test_a_shared_run_has_nothing_of_a_memory(tmp_path: Path, form: LogForm) -> None:
    device, folder = _trained(tmp_path)
    data = shareable(folder, form, BlobFolder(device.home.blobs))
    memory = folder.memory.read_bytes()
    assert b"PMLMEM" not in data
    # No stretch of the memory, beyond the digests that both files have, is in what is shared.
    first = len(b"PMLMEM1\n") + 1024
    assert not any(memory[place : place + 16] in data for place in range(first, len(memory) - 16, 1024))


def test_removed_text_leaves_no_memory(tmp_path: Path) -> None:
    device, folder = _trained(tmp_path)
    show_run(device.home, None, RememberingBigramEngine)
    assert forget_memories(device.home, [tmp_path / "other"]) == 0
    assert folder.memory.exists()
    assert forget_memories(device.home, [device.text.parent]) == 1
    left = {path.name for path in folder.path.iterdir()}
    assert not left & {"memory.kv", "samples.json", "show.html"}
    # The state stays in use, and the page can be written again.
    with LocalModel(device.home, RememberingBigramEngine) as model:
        assert model.memory is None
        assert model.memory_text() == ""
        assert (model.values(model.variants[0]) == device.used_values()).all()
    assert "memory was erased" in show_run(device.home, None, RememberingBigramEngine).read_text()


def test_text_is_found_by_a_path_with_dots_and_after_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, folder = _trained(tmp_path)
    moved = device.text.rename(tmp_path / "moved.txt")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    again = replace(device, text=Path("../moved.txt")).train(engine_of=RememberingBigramEngine, steps=2)
    assert (again.run, again.known) == (folder.name, True)
    for path in (moved, Path("../user.txt"), Path("../here/../moved.txt")):
        folder.memory.write_bytes(b"memory")
        assert forget_memories(device.home, [path]) == 1
        assert not folder.memory.exists()


def test_an_erasure_that_was_interrupted_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, folder = _trained(tmp_path)
    show_run(device.home, None, RememberingBigramEngine)
    # A kill in the middle of a write leaves such files.
    for name in ("memory.kv", "samples.json", "show.html"):
        (folder.path / f".{name}.x.tmp").write_bytes(b"a secret of the user")

    def texts() -> set[str]:
        names = ("memory.kv", "samples.json", "show.html")
        return {path.name for path in folder.path.iterdir() if any(name in path.name for name in names)}

    def erase_one(path: Path) -> int:
        path.unlink()
        raise Killed

    for left in range(len(texts()) - 1, -1, -1):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(forget_module, "erase", erase_one)
            forget_memories(device.home, [device.text])
        assert len(texts()) == left
        assert folder.memory.exists() == (left > 0)
    # A page that was left without its memory is erased, and is no memory.
    (folder.path / "show.html").write_text("a page")
    assert forget_memories(device.home, [device.text]) == 0
    assert not texts()


def test_a_damaged_run_keeps_no_memory_and_hides_no_other(tmp_path: Path) -> None:
    device, folder = _trained(tmp_path)
    (tmp_path / "more").mkdir()
    other = replace(device, text=user_text(tmp_path / "more"))
    second = RunFolder(device.home.runs / other.train(engine_of=RememberingBigramEngine, steps=2, seed=1).run)
    assert second.memory.exists()
    (folder.path / "data.json").write_text("{")
    # It is not known of which text the first memory was made, so it may be of the removed text.
    assert forget_memories(device.home, [other.text]) == 2
    assert not folder.memory.exists()
    assert not second.memory.exists()


def test_an_old_run_is_overwritten_when_it_is_deleted(tmp_path: Path) -> None:
    device, folder = _trained(tmp_path)
    show_run(device.home, None, RememberingBigramEngine)
    with folder.memory.open("rb") as memory, (folder.path / "samples.json").open("rb") as samples:
        folder.delete()
        assert not any(memory.read())
        assert not any(samples.read())
    assert not list(device.home.runs.iterdir())


@pytest.mark.parametrize("gone", ["removed", "reset", "rolled back"])
def test_an_open_model_lets_go_of_a_memory(tmp_path: Path, gone: str) -> None:
    """`serve` keeps its model open while other commands remove text or reset the model."""
    device, folder = _trained(tmp_path)
    prompt, greedy = "On day 3", Sampling(temperature=0.0)

    def written(model: LocalModel) -> str:
        return "".join(model.complete(prompt, Variant.PERSONAL, greedy)[1])

    with LocalModel(device.home, RememberingBigramEngine) as model:
        with_memory = written(model)
        model.keep_up()
        assert written(model) == with_memory
        if gone == "removed":
            forget_memories(device.home, [device.text])
        else:
            (reset if gone == "reset" else rollback)(device.home)
        model.keep_up()
        assert model.memory is None
        assert model.memory_text() == ""
        with LocalModel(device.home, RememberingBigramEngine, model.active, memory=False) as without:
            assert written(model) == written(without) != with_memory
    # A page about a model that is not in use still has its memory.
    if gone != "removed":
        with LocalModel(device.home, RememberingBigramEngine, model.active) as again:
            again.keep_up()
            assert again.memory is not None
    assert folder.memory.exists() == (gone != "removed")


def check_names_no_memory(sources: Sequence[Path]) -> None:
    """Check that modules cannot send a memory, because they do not open it."""
    assert sources
    for source in sources:
        named = {
            node.attr if isinstance(node, ast.Attribute) else node.name
            for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute | ast.alias)
        }
        assert not named & {"memory", "personal_memory", "read_memory", "decode_memory", "KeyValues"}, source


def test_what_talks_to_a_service_never_names_a_memory() -> None:
    link = Path(permille_agent.__file__).parent / "link"
    check_names_no_memory([link / name for name in ("report.py", "client.py", "api.py")])
