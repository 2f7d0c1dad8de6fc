"""Fixtures for tasks in this process: a tiny random model, a corpus and a store."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from permille.package.blobs import BlobFolder
from permille.package.config_files import clean_config
from permille.schemas.inputs import FileCorpus, FolderModel
from permille.schemas.jobs import JobKind
from permille.store import access, inputs, rows
from permille.store.database import Database
from permille.store.jobs import claims, queue
from permille.store.jobs.transitions import NewJob
from permille.store.migrations.schema import migrate
from permille.store.tables import Artifact, Corpus, Job, Model
from permille_workers.runtime.child import attempt
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.tasks import TASKS
from tests.packages import TINY_LLAMA, sentences, tiny_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Store, settings and inputs of the tasks under test."""

    root: Path
    db: Database
    blobs: BlobFolder
    settings: WorkerSettings
    tenant_id: str
    model: Model
    corpus: Corpus

    def submit(self, kind: str, payload: dict[str, Any]) -> Job:
        """Queue a job with a single attempt."""
        with self.db.write() as session:
            return queue.submit(
                session, NewJob(tenant_id=self.tenant_id, kind=kind, payload=payload, max_attempts=1)
            )

    def run_next(self, job_id: str | None = None) -> bool:
        """Run one attempt of the next job, or of the job `job_id`. Return False if none is queued."""
        with self.db.write() as session:
            claim = claims.claim(session, worker="bench", lease_s=600, job_id=job_id)
        if claim is not None:
            attempt(TASKS, self.db, claim, self.settings)
        return claim is not None

    def run_queued(self) -> None:
        """Run all queued jobs, one attempt after the other, as child processes would."""
        while self.run_next():
            pass

    def finish(self, kind: str, payload: dict[str, Any]) -> Job:
        """Queue a job, and run it to its end."""
        job = self.submit(kind, payload)
        self.run_queued()
        return self.read(job)

    def read(self, job: Job) -> Job:
        """Return the job's current row."""
        with self.db.read() as session:
            return rows.get(session, Job, tenant_id=self.tenant_id, row_id=job.id)

    def report(self, digest: str) -> dict[str, Any]:
        """Return a stored report."""
        content: dict[str, Any] = json.loads(self.blobs.read(digest, limit=1 << 24))
        return content


def save_model(folder: Path, *, seed: int = 0) -> None:
    """Write a random tiny Llama and its tokenizer, as transformers does."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{key: value for key, value in TINY_LLAMA.items() if key != "architectures"})
    LlamaForCausalLM(config).save_pretrained(folder)
    stored = clean_config(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def stocked(root: Path) -> Bench:
    """Return a new bench, with a tenant, the model and the corpus in its database."""
    for folder in ("models/tiny", "corpora", "work"):
        (root / folder).mkdir(parents=True)
    save_model(root / "models" / "tiny")
    lines = [json.dumps({"text": text}) for text in sentences(400, seed=1)]
    (root / "corpora" / "rows.jsonl").write_text("\n".join(["not json", *lines]))
    url = f"sqlite:///{root}/permille.db"
    migrate(url)
    db = Database(url)
    with db.write() as session:
        tenant_id = access.create_tenant(session, name="acme").id
        model = inputs.add_model(
            session, tenant_id=tenant_id, name="tiny", source=FolderModel(kind="folder", path="tiny")
        )
        corpus = inputs.add_corpus(
            session, tenant_id=tenant_id, name="rows", source=FileCorpus(kind="file", path="rows.jsonl")
        )
    settings = settings_at(root)
    return Bench(
        root=root,
        db=db,
        blobs=BlobFolder(settings.blob_root),
        settings=settings,
        tenant_id=tenant_id,
        model=model,
        corpus=corpus,
    )


def settings_at(root: Path) -> WorkerSettings:
    """Return the settings of a worker of this bench."""
    return WorkerSettings.model_validate(
        {
            "database_url": f"sqlite:///{root}/permille.db",
            "blob_root": root / "blobs",
            "model_root": root / "models",
            "corpus_root": root / "corpora",
            "tenant_root": root / "tenants",
            "work_root": root / "work",
        }
    )


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    """Return a function that makes benches below one folder. Each has its own ids."""
    opened: list[Database] = []

    def make(name: str) -> Bench:
        made = stocked(tmp_path / name)
        opened.append(made.db)
        return made

    yield make
    for db in opened:
        db.close()


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return a bench to copy."""
    made = stocked(tmp_path_factory.mktemp("bench") / "bench")
    made.db.close()
    return made


@pytest.fixture
def bench(template: Bench, tmp_path: Path) -> Iterator[Bench]:
    """Yield a bench."""
    root = tmp_path / "bench"
    shutil.copytree(template.root, root)
    settings = settings_at(root)
    db = Database(settings.database_url.get_secret_value())
    yield replace(template, root=root, db=db, blobs=BlobFolder(settings.blob_root), settings=settings)
    db.close()


@pytest.fixture
def package(bench: Bench) -> Artifact:
    """Return a package with a random mask."""
    from tests.unit.workers.jobs import made_by, package_of

    request = {"model_id": bench.model.id, "method": "random", "density": 0.01}
    return package_of(bench, made_by(bench, JobKind.MASK, request))
