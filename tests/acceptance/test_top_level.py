"""The top level of the library, as a Python user calls it."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import permille
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.package.reader import Package
from permille.schemas.runs import Outcome

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/model"
NOTES = (ROOT / "examples/gardener/notes.txt").read_text(encoding="utf-8").split("\n\n")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with gzip.open(ROOT / "examples/corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture(scope="module")
def package(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Package:
    model = permille.load_model(MODEL)
    mask = permille.sensitivity_mask(model, texts, density=0.01, sequences=8, length=48)
    return permille.build_package(model, mask, tmp_path_factory.mktemp("packages"), texts=texts)


def test_importing_the_library_imports_nothing_heavy() -> None:
    code = (
        "import permille, sys; print(sorted({'torch', 'numpy', 'pydantic', 'transformers'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_top_level_lists_what_it_has() -> None:
    assert dir(permille) == sorted(permille.__all__)
    assert all(getattr(permille, name) is not None for name in permille.__all__)
    with pytest.raises(AttributeError, match="nothing_such"):
        permille.nothing_such  # noqa: B018


def test_a_person_trains_judges_uses_and_exports(package: Package, tmp_path: Path) -> None:
    personal = permille.Personalizer(package, tmp_path / "home", threads=1)
    result = personal.fit(NOTES, steps=20)
    assert result.outcome is Outcome.ADOPTED

    found = personal.evaluate()
    assert found.base is not None and found.personal is not None and found.personal < found.base
    assert found.general is not None and found.general.rise is not None and found.general.rise <= 0.1
    assert personal.generate("Today", max_tokens=6) != personal.generate("Today", max_tokens=6, base=True)

    assert any(path.suffix == ".gguf" for path in personal.export("gguf", tmp_path / "gguf").iterdir())
    again = permille.Personalizer.load(personal.save(tmp_path / "saved"), threads=1)
    assert again.evaluate() == found
    measured = again.evaluate(NOTES[:6])
    assert measured.personal is not None and measured.text.startswith("6 documents")


def test_the_same_fit_again_is_the_same_run(package: Package, tmp_path: Path) -> None:
    personal = permille.Personalizer(package, tmp_path, threads=1)
    first, second = (personal.fit(NOTES, steps=2) for _ in range(2))
    assert (second.run, second.known) == (first.run, True)


def test_too_little_text_is_told_in_words(package: Package) -> None:
    result = permille.Personalizer(package).fit(["One short note."], steps=2)
    assert result.outcome is Outcome.REFUSED_DATA
    assert "tokens" in result.message


def test_a_model_of_transformers_passes_in_and_out(tmp_path: Path, texts: list[str]) -> None:
    from transformers import AutoTokenizer

    model = permille.load_model(MODEL)
    again = permille.load_model(model.to_transformers(), AutoTokenizer.from_pretrained(MODEL))
    both = [
        permille.build_package(
            source, permille.sensitivity_mask(source, texts, sequences=2, length=16), tmp_path / str(number)
        )
        for number, source in enumerate((model, again))
    ]
    assert both[0].manifest.tensors == both[1].manifest.tensors
    assert (both[0].values() == both[1].values()).all()


def test_the_mask_of_a_sparse_model_leaves_its_zeros(tmp_path: Path, texts: list[str]) -> None:
    sparse = shutil.copytree(MODEL, tmp_path / "sparse")
    tensors = load_file(sparse / "model.safetensors")
    for name, _ in scoped_tensors(Checkpoint(sparse).config):
        tensors[name][:, ::2] = 0
    save_file(tensors, sparse / "model.safetensors", metadata={"format": "pt"})
    mask = permille.sensitivity_mask(permille.load_model(sparse), texts, sequences=2, length=16, density=0.1)
    weights = Checkpoint(sparse).weights()
    assert all(weights[name].reshape(-1)[chosen].all() for name, chosen in mask.indices.items())


def test_sequences_are_no_longer_than_the_positions_of_the_model(texts: list[str]) -> None:
    from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_attention_heads": 2}
    config = OPTConfig(
        vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=24, pad_token_id=0, **sizes
    )
    model = permille.load_model(OPTForCausalLM(config), tokenizer)
    assert len(permille.sensitivity_mask(model, texts, sequences=2).indices) == 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: permille.load_model("no/such/model"), "no folder or file"),
        (lambda: permille.load_model(MODEL, tokenizer=object()), "its own tokenizer"),
        (lambda: permille.load_model(3), "not int"),
        (lambda: permille.sensitivity_mask(permille.load_model(MODEL), "one text"), "a list of texts"),
        (lambda: permille.sensitivity_mask(permille.load_model(MODEL), [b"x"]), "not bytes"),  # type: ignore[list-item]
        (
            lambda: permille.sensitivity_mask(permille.load_model(MODEL), ["short"]),
            "Add text to the corpus",
        ),
        (lambda: permille.sensitivity_mask(permille.load_model(MODEL), ["short"], density=2), "got 2"),
        (lambda: permille.sensitivity_mask(str(MODEL), ["a text"]), "Pass a model from"),  # type: ignore[arg-type]
        (lambda: permille.Personalizer.load("/no/such/folder"), "has no package"),
    ],
)
def test_mistakes_are_told(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(("texts", "words"), [("one text", "a list of"), (["short"], "Add text")])
def test_texts_are_refused_before_anything_is_quantized(texts: list[str], words: str, tmp_path: Path) -> None:
    mask = permille.ChosenMask(indices={}, method="random", density=0.1)
    with pytest.raises(InputError, match=words):
        permille.build_package(permille.load_model(MODEL), mask, tmp_path / "packages", texts=texts)
    assert not (tmp_path / "packages").exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [("{% for m in %}", "odd has a chat template"), ("{{ messages[9].x }}", "does not work")],
)
def test_a_chat_template_that_does_not_work_is_refused_when_the_model_is_opened(
    template: str, words: str, tmp_path: Path
) -> None:
    shutil.copytree(MODEL, tmp_path / "odd")
    (tmp_path / "odd" / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match=words):
        permille.load_model(tmp_path / "odd")


def test_mistakes_with_a_package_are_told(package: Package, tmp_path: Path) -> None:
    personal = permille.Personalizer(package, tmp_path / "home")
    assert repr(package) == f"Package({package.digest}, k={package.k}, size_bytes={package.size_bytes})"
    mask = permille.ChosenMask(indices={"w": np.arange(9, dtype=np.uint32)}, method="fisher", density=0.1)
    assert repr(mask) == "ChosenMask(method='fisher', density=0.1, scope='all')"
    with pytest.raises(InputError, match="a list of texts"):
        personal.fit("one text", steps=1)
    with pytest.raises(InputError, match="list of texts is empty"):
        personal.fit([], steps=1)
    with pytest.raises(InputError, match="not int"):
        personal.fit([1], steps=1)  # type: ignore[list-item]
    with pytest.raises(InputError, match="`max_tokens` must be at least 1, got -1"):
        personal.generate("Today", max_tokens=-1)
    with pytest.raises(InputError, match="Choose 'gguf'"):
        personal.export("onnx", tmp_path / "out", base=True)
    with pytest.raises(InputError, match=r"Call `fit`, or export the base"):
        personal.export("gguf", tmp_path / "out")
    (tmp_path / "notes.txt").write_text("Some words.")
    with pytest.raises(InputError, match=r"Pass Path\('.*notes.txt'\) to read it"):
        personal.fit([str(tmp_path / "notes.txt")], steps=1)
    for text in ("~5 people came", "x" * 50):
        assert personal.fit([text], steps=1).outcome is Outcome.REFUSED_DATA
    wrong: dict[str, dict[str, Any]] = {
        "`steps` must be a whole number, got 2.5": {"steps": 2.5},
        "`minutes` must be a number, got '10'": {"minutes": "10"},
        "no option 'epochs'. It has batch_rows": {"epochs": 3},
    }
    for words, options in wrong.items():
        with pytest.raises(InputError, match=words):
            personal.fit(NOTES, **options)
    assert repr(personal) == f"Personalizer('{tmp_path / 'home'}')"
    with pytest.raises(InputError, match="exists"):
        personal.save(tmp_path)
    with pytest.raises(InputError, match="Call `fit` first"):
        personal.evaluate()
    with pytest.raises(InputError, match="no personal model"):
        personal.evaluate(NOTES)
    mask = permille.ChosenMask(indices={}, method="fisher", density=0.1)
    with pytest.raises(InputError, match="not dict"):
        permille.build_package(permille.load_model(MODEL), {}, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"notes.txt is a file"):
        permille.build_package(permille.load_model(MODEL), mask, tmp_path / "notes.txt")
    with pytest.raises(InputError, match="int3"):
        unread = (pytest.fail("texts were read") for _ in "x")
        permille.build_package(permille.load_model(MODEL), mask, tmp_path, texts=unread, scheme="int3")
