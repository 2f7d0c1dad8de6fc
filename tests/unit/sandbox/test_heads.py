"""Tests of the facts that are read when a model is registered: a chat template is tried then."""

from pathlib import Path

import pytest
from gguf import GGUFReader

from permille.errors import InputError
from permille.models.gguf.file import GgufFile
from permille.models.gguf.tokenizer import chat_template
from permille.sandbox.heads import HeadKind, read_facts
from tests.packages import CHATML
from tests.tiny_model import write_model
from tests.unit.engines.gguf_packages import exported_package
from tests.unit.models.gguf_files import rewritten, written

BROKEN = [
    ("{% for m in messages %}{{ broken ", "is wrong in line 1: unexpected end of template"),
    ("{{ messages | bogus }}", "No filter named 'bogus'"),
    ("{{ messages[7].content.x }}", "fails: list object has no element 7"),
    ("{{ raise_exception('never') }}", "refuses these messages: never"),
    ("{% for m in messages %}{{ 'x' * 100000 }}{% endfor %}", "makes more than 65536 characters"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFReader:
    folder = tmp_path_factory.mktemp("llama")
    return GGUFReader(written(exported_package(folder / "blobs", "llama"), folder / "export"))


@pytest.mark.slow
@pytest.mark.parametrize(("template", "words"), BROKEN)
def test_a_template_that_does_not_work_is_refused_with_its_file(
    file: GGUFReader, tmp_path: Path, template: str, words: str
) -> None:
    path = rewritten(file, tmp_path / "odd.gguf", {}, {"tokenizer.chat_template": template})
    folder = write_model(tmp_path / "odd")
    (folder / "chat_template.jinja").write_text(template)
    for kind, place in ((HeadKind.GGUF, path), (HeadKind.FOLDER, folder)):
        with pytest.raises(InputError, match=words) as refused:
            read_facts(kind, place)
        assert str(refused.value).startswith(f"{place.name} has a chat template that does not work")


@pytest.mark.parametrize("template", ["", " \n", CHATML])
def test_an_empty_template_is_none(file: GGUFReader, tmp_path: Path, template: str) -> None:
    path = rewritten(file, tmp_path / "fine.gguf", {}, {"tokenizer.chat_template": template})
    folder = write_model(tmp_path / "fine")
    (folder / "chat_template.jinja").write_text(template)
    assert read_facts(HeadKind.GGUF, path)["size_bytes"] == path.stat().st_size
    assert read_facts(HeadKind.GGUF, path)["family"] == read_facts(HeadKind.FOLDER, folder)["family"]
    assert chat_template(GgufFile(path)) == (template if template.strip() else None)
