"""A model that reads BOS before every text: reference, rows, decision, prompts and export begin with it.

The model is the example model, whose tokenizer asks the program for BOS here. It was trained so.
"""

import gzip
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import permille
from permille.engines.gguf.export import GGUF_FILE
from permille.models.loading import FileTokenizer, load_model
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille_agent.embed import batch_of, package_tokenizer, prepare, read_documents
from permille_lab.exports.llama_cpp import LlamaCpp

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTES = EXAMPLES / "gardener/notes.txt"
BOS = 0
TEXTS = [text[:200] for text in NOTES.read_text(encoding="utf-8").split("\n\n")[3:5]]
PROMPTS = ("Today I", "The garden is", "In the morning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(EXAMPLES / "model", place)
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    return place


@pytest.fixture(scope="module")
def package(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    with gzip.open(EXAMPLES / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    model = permille.load_model(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no other beginning of the rows is better
        mask = permille.sensitivity_mask(model, texts, density=0.01, sequences=8, length=48)
    return permille.build_package(model, mask, tmp_path_factory.mktemp("packages"), texts=texts)


def test_the_reference_begins_with_bos(package: Package) -> None:
    reference = package.reference_rows()
    assert reference is not None
    assert (reference.ids_NT[:, 0] == BOS).all()
    assert not (reference.ids_NT[:, 1:] == BOS).any()


def test_every_row_of_a_person_begins_with_bos(package: Package) -> None:
    documents, _ = read_documents([NOTES])
    prepared = prepare(documents, package_tokenizer(package), row_tokens=64)
    for rows in (prepared.train, prepared.select, prepared.test):
        batch = batch_of(rows)
        assert (batch.input_ids_BT[:, 0] == BOS).all()
        assert not (batch.input_ids_BT[:, 1:] == BOS)[batch.attention_BT[:, 1:]].any()


def test_a_personal_model_is_judged_and_exported_as_programs_run_it(
    package: Package, folder: Path, tmp_path: Path
) -> None:
    personal = permille.Personalizer(package, tmp_path / "home", threads=1)
    result = personal.fit(NOTES.read_text(encoding="utf-8").split("\n\n"), steps=20)
    assert result.outcome is Outcome.ADOPTED
    assert result.decision is not None and "begins with BOS" in result.decision.rows

    tokenizer = package_tokenizer(package)
    with LlamaCpp(personal.export("gguf", tmp_path / "gguf") / GGUF_FILE, context=256) as peer:
        rows = [peer.tokens(text) for text in TEXTS]
        assert [ids[0] for ids in rows] == [BOS, BOS]
        assert rows == [FileTokenizer(folder).encode(text) for text in TEXTS]
        for prompt in PROMPTS:
            assert tokenizer.prompt(prompt).tolist() == peer.tokens(prompt)

    # A short document is one row, so its loss is that of BOS and its tokens.
    judged = personal.evaluate(TEXTS)
    for base, loss in ((True, judged.base), (False, judged.personal)):
        model = load_model(personal.export("transformers", tmp_path / f"dense-{base}", base=base))
        with torch.no_grad():
            logits = [model(input_ids=torch.tensor([ids])).logits[0, :-1] for ids in rows]
        targets = torch.tensor([token for ids in rows for token in ids[1:]])
        wanted = float(torch.nn.functional.cross_entropy(torch.cat(logits).float(), targets))
        assert loss == pytest.approx(wanted, abs=2e-3)
