"""Tests of old published models: pickled weights, and tokenizers of several files."""

import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.conversion import modern_folder
from permille.models.loading import FileTokenizer, load_model
from tests.tiny_model import write_published

TEXT = "a small model of years ago"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("opt"))


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "opt"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return found


def test_a_published_model_becomes_one_with_safetensors_and_a_fast_tokenizer(
    published: Path, tmp_path: Path
) -> None:
    before = sorted(path.name for path in published.iterdir())
    made = modern_folder(published, tmp_path)
    assert sorted(path.name for path in published.iterdir()) == before
    assert Checkpoint(made).family.value == "opt"
    stored = weights_of(published)
    loaded = load_model(made).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in stored.items())
    slow = AutoTokenizer.from_pretrained(published)
    assert FileTokenizer(made).encode(TEXT) == slow(TEXT)["input_ids"]
    assert modern_folder(published, tmp_path) == made, "it is made once"
    assert modern_folder(made, tmp_path) == made


@pytest.mark.slow
def test_shards_and_the_format_before_zip_files_are_read(folder: Path, tmp_path: Path) -> None:
    whole = Checkpoint(modern_folder(folder, tmp_path / "whole"))
    stored = weights_of(folder)
    names = sorted(stored)
    (folder / "pytorch_model.bin").unlink()
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        torch.save(
            {name: stored[name].clone() for name in part},
            folder / f"pytorch_model-{number:05d}-of-00002.bin",
            _use_new_zipfile_serialization=False,
        )
    parts = Checkpoint(modern_folder(folder, tmp_path / "parts"))
    assert parts.names == whole.names
    assert all((parts.float32(name) == whole.float32(name)).all() for name in whole.names)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/permille-code-ran",)


def _with_code(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model.weight": _Code()}))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _list(path: Path) -> None:
    torch.save([torch.zeros(2)], path)


def _number(path: Path) -> None:
    torch.save({"model.weight": 5}, path)


def _sparse(path: Path) -> None:
    torch.save({"model.weight": torch.eye(2).to_sparse()}, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_with_code, "pytorch_model.bin is damaged, or holds more than tensors"),
        (_cut, "pytorch_model.bin is damaged, or holds more than tensors"),
        (_empty, "pytorch_model.bin is damaged, or holds more than tensors"),
        (_list, "pytorch_model.bin holds a list, not tensors by name"),
        (_number, "pytorch_model.bin holds 'model.weight', which is no dense tensor"),
        (_sparse, "pytorch_model.bin holds 'model.weight', which is no dense tensor"),
    ],
)
def test_a_bad_pickle_is_refused_with_its_name_and_leaves_nothing(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=words) as refused:
        modern_folder(folder, tmp_path / "root")
    assert "weights_only" not in str(refused.value), "torch advises to open it without protection"
    assert list((tmp_path / "root").rglob("*.*")) == []
    assert not Path("/tmp/permille-code-ran").exists()


def test_tensors_that_the_config_does_not_ask_for_are_refused(folder: Path, tmp_path: Path) -> None:
    stored = weights_of(folder)
    stored["model.decoder.layers.9.fc1.weight"] = torch.zeros(2, 2)
    torch.save(stored, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"layers\.9"):
        modern_folder(folder, tmp_path / "root")


def test_files_that_make_no_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").write_text("[]")
    with pytest.raises(InputError, match=r"no tokenizer\.json, and none can be made from the other files"):
        modern_folder(folder, tmp_path / "root")


def test_what_reads_tokenizer_model_is_named_where_it_is_missing(folder: Path, tmp_path: Path) -> None:
    (folder / "merges.txt").unlink()
    (folder / "vocab.json").rename(folder / "tokenizer.model")
    with pytest.raises(InputError, match="pip install sentencepiece"):
        modern_folder(folder, tmp_path / "root")


def test_a_folder_of_today_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    assert modern_folder(tmp_path, tmp_path / "root") == tmp_path


def _stride_of_zero(path: Path) -> None:
    torch.save({"model.weight": torch.zeros(1).expand(1 << 14, 1 << 14)}, path)


def _one_under_many_names(path: Path) -> None:
    held = torch.zeros(1 << 10)
    torch.save({f"model.weight{number}": held for number in range(1000)}, path)


def _compressed(path: Path) -> None:
    torch.save({"model.weight": torch.zeros(1 << 26)}, path)
    with zipfile.ZipFile(path) as plain:
        files = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            packed.writestr(name, data)


def _long_text(path: Path) -> None:
    # BINUNICODE with a length of 2 GiB, of which the file has one byte
    path.write_bytes(b"\x80\x02X" + (0x7FFF_FFFF).to_bytes(4, "little") + b"x.")


@pytest.mark.slow
@pytest.mark.attack(27, "a small pickle that claims gigabytes")
@pytest.mark.parametrize(
    ("spoil", "is_zip"),
    [
        (_stride_of_zero, True),
        (_stride_of_zero, False),
        (_one_under_many_names, True),
        (_one_under_many_names, False),
        (_compressed, True),
        (_long_text, False),
    ],
)
def test_a_pickle_that_claims_more_than_it_has_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], is_zip: bool
) -> None:
    monkeypatch.setattr(torch, "save", partial(torch.save, _use_new_zipfile_serialization=is_zip))
    spoil(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is damaged|ended with"):
        modern_folder(folder, tmp_path / "root")
    assert list((tmp_path / "root").rglob("*.*")) == []


@pytest.mark.attack(27, "a conversion outlives its job")
def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    child = "import time; from permille.sandbox.confinement import die_with_parent; die_with_parent();"
    child += "print('ready', flush=True); time.sleep(600)"
    parent = "import os, subprocess, sys;"
    parent += f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE);"
    parent += "child.stdout.readline(); print(child.pid, flush=True); os._exit(9)"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(1000):
        status = Path(f"/proc/{pid}/stat")
        # Nobody waits for an orphan in some containers. It stays as a zombie, which has ended.
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("The child still runs.")
