"""Files that a tenant registers: the API's process stays small and alive, whatever they hold."""

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from permille.errors import InputError
from permille.models.gguf.file import GgufFile
from permille.sandbox.heads import HeadKind, read_facts
from tests.packages import TINY_LLAMA
from tests.running_service import Running, running_service
from tests.tiny_model import write_model
from tests.unit.engines.gguf_packages import exported_package
from tests.unit.models.gguf_files import written

# What a process may need for an answer. The attacks below took 0.3 to 1.8 GB of a process that parsed them.
SMALL_KB = 64 << 10


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_service(tmp_path_factory.mktemp("service"), "--no-worker") as running:
        yield running


def peak_kb(pid: int) -> int:
    """Return the largest memory that a process has held."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def register(client: httpx.Client, kind: str, path: str) -> httpx.Response:
    where = "corpora" if kind == "file" else "models"
    return client.post(f"/v1/{where}", json={"name": path, "source": {"kind": kind, "path": path}})


def named_header(names: int) -> bytes:
    """Return the head of a safetensors file with this many empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    data = json.dumps({f"t{number}": entry for number in range(names)}).encode()
    return len(data).to_bytes(8, "little") + data


def deep(levels: int) -> bytes:
    return b'{"model_type": ' + b"[" * levels + b"]" * levels + b"}"


def changed(**changes: object) -> bytes:
    return json.dumps({**TINY_LLAMA, **changes}).encode()


def gguf_of(*, keys: int = 0, items: int = 0, text: int = 0) -> bytes:
    """Return a file whose numbers claim more than it has, followed by zeros."""
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + keys.to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"a"
    if text:
        return head + key + (8).to_bytes(4, "little") + text.to_bytes(8, "little") + bytes(4096)
    listed = (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + items.to_bytes(8, "little")
    return head + key + listed + bytes(8 * min(items, 4 << 20))


FOLDERS: Mapping[str, tuple[Mapping[str, Callable[[], bytes]], str]] = {
    "huge-header": ({"model.safetensors": lambda: named_header(700_000)}, "header of at most"),
    "long-header": ({"model.safetensors": lambda: named_header(110_000)}, "do not match config.json"),
    "huge-index": (
        {"model.safetensors.index.json": lambda: json.dumps({"weight_map": {"a": "x" * (9 << 20)}}).encode()},
        "is larger than",
    ),
    "huge-config": ({"config.json": lambda: changed(note="x" * (2 << 20))}, "is larger than"),
    "huge-setting": (
        {"config.json": lambda: changed(layer_types=["full_attention"] * 20_000)},
        "more than 65536",
    ),
    "deep-config": ({"config.json": lambda: deep(100_000)}, "not (valid )?JSON"),
    "too-many-weights": (
        {
            "config.json": lambda: json.dumps(
                {**TINY_LLAMA, "vocab_size": 1 << 24, "hidden_size": 1 << 24}
            ).encode()
        },
        "weights, more than",
    ),
    "too-many-layers": (
        {"config.json": lambda: changed(num_hidden_layers=10**9)},
        "num_hidden_layers",
    ),
}
FILES: Mapping[str, tuple[str, str, Callable[[], bytes], str]] = {
    "gguf-items": ("gguf", "a.gguf", lambda: gguf_of(keys=1, items=4 << 20), "gguf"),
    "gguf-claims": ("gguf", "b.gguf", lambda: gguf_of(keys=1, items=1 << 60), "items of a list"),
    "gguf-text": ("gguf", "c.gguf", lambda: gguf_of(keys=1, text=1 << 40), "bytes of a text"),
    "gguf-keys": ("gguf", "d.gguf", lambda: gguf_of(keys=1 << 62), "keys of metadata"),
    "gzip-members": ("file", "a.jsonl.gz", lambda: gzip.compress(b"") * 400_000, "complete gzip"),
    "gzip-bomb": ("file", "b.jsonl.gz", lambda: gzip.compress(b"\n" * (256 << 20), 1), ""),
    "one-line": ("file", "c.jsonl", lambda: b'{"text": "' + b"x" * (256 << 20), ""),
    "deep-row": ("file", "d.jsonl", lambda: b'{"text": ' + b"[" * 500_000 + b"\n", "broken"),
}


@pytest.mark.attack(24, "a model folder that takes memory, time or a row of megabytes")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_takes_no_memory_of_the_api(service: Running, name: str) -> None:
    files, words = FOLDERS[name]
    folder = write_model(service.data_dir / "models" / name)
    if "model.safetensors.index.json" in files:
        (folder / "model.safetensors").unlink()
    for file, content in files.items():
        (folder / file).write_bytes(content())
    before = peak_kb(service.api_pid)
    with service.client() as client:
        answer = register(client, "folder", name)
    assert answer.status_code == 409, answer.text
    assert re.search(words, answer.json()["detail"])
    assert len(answer.content) < 4096
    assert peak_kb(service.api_pid) - before < SMALL_KB


@pytest.mark.attack(24, "a GGUF file or a corpus that takes memory or time")
@pytest.mark.parametrize("name", FILES)
def test_a_file_takes_no_memory_of_the_api(service: Running, name: str) -> None:
    kind, file, content, words = FILES[name]
    (service.data_dir / ("corpora" if kind == "file" else "models") / file).write_bytes(content())
    before = peak_kb(service.api_pid)
    with service.client() as client:
        answer = register(client, kind, file)
    # The head of a huge file may hold nothing that is wrong. A job refuses it later.
    assert answer.status_code == (409 if words else 201), answer.text
    assert re.search(words, answer.json().get("detail", ""))
    assert peak_kb(service.api_pid) - before < SMALL_KB


@pytest.mark.attack(24, "a GGUF file that is cut while it is read")
def test_a_file_that_shrinks_does_not_end_the_api(service: Running, tmp_path: Path) -> None:
    whole = written(exported_package(tmp_path / "blobs", "llama"), tmp_path / "out").read_bytes()
    path, stop = service.data_dir / "models" / "shrinking.gguf", threading.Event()
    path.write_bytes(whole)

    def shrink() -> None:
        with path.open("r+b") as file:
            while not stop.is_set():
                file.truncate(0)
                file.seek(0)
                file.write(whole)
                file.flush()

    pid = service.api_pid
    cutting = threading.Thread(target=shrink)
    cutting.start()
    try:
        with service.client() as client:
            for number in range(5):
                body = {"name": f"g{number}", "source": {"kind": "gguf", "path": path.name}}
                assert client.post("/v1/models", json=body).status_code in (201, 409)
    finally:
        stop.set()
        cutting.join()
    assert service.api_pid == pid


@pytest.mark.attack(24, "a GGUF file that is cut while it is mapped")
def test_the_header_of_a_gguf_file_is_not_mapped(tmp_path: Path) -> None:
    path = written(exported_package(tmp_path / "blobs", "llama"), tmp_path / "out")
    file = GgufFile(path)
    assert str(path) not in Path("/proc/self/maps").read_text()
    name = "blk.0.attn_q.weight"
    held = file.raw(name)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert held.tobytes() == path.read_bytes()[file.tensors[name].begin :][: file.tensors[name].size]


@pytest.mark.attack(24, "unknown keys of a config fill the database, or name code and kernels")
def test_unknown_keys_of_a_config_are_not_kept(tmp_path: Path) -> None:
    keys = {"attn_implementation": "someone/kernels", "_name_or_path": "/etc", "note": "x" * (900 << 10)}
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **keys}))
    assert read_facts(HeadKind.FOLDER, folder)["config"] == TINY_LLAMA


@pytest.mark.attack(24, "many registrations of one tenant at a time")
def test_a_tenant_registers_one_file_at_a_time(service: Running) -> None:
    (service.data_dir / "corpora" / "slow.jsonl.gz").write_bytes(gzip.compress(b"") * 100_000)
    answers: list[int] = []

    def ask() -> None:
        with service.client() as client:
            answers.append(register(client, "file", "slow.jsonl.gz").status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {409, 429}


@pytest.mark.attack(24, "a file whose reading breaks a limit")
def test_a_child_that_breaks_its_limit_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m")
    monkeypatch.setattr("permille.sandbox.heads.TIMEOUT_S", 0.001)
    with pytest.raises(InputError, match=r"m cannot be read: It took more than"):
        read_facts(HeadKind.FOLDER, folder)


def test_an_unreadable_file_is_an_answer(tmp_path: Path) -> None:
    folder: Any = write_model(tmp_path / "m")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(InputError, match="has no file"):
        read_facts(HeadKind.FOLDER, folder)
