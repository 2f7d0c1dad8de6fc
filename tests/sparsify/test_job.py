"""A sparsification by a worker process that is killed."""

import json
import signal
from pathlib import Path

import pytest
import torch

from permille.corpora.sequences import token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.models.checkpoint import Checkpoint
from permille.models.loading import FileTokenizer
from permille.schemas.inputs import FileCorpus, FolderModel
from permille.schemas.jobs import JobKind
from permille.store import inputs
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from permille.store.tables import JobEvent
from permille_sparsify.plan import PruningMethod
from permille_sparsify.schemas import SparsificationCreate
from permille_sparsify.streaming import PruningText, prune_model
from tests.integration.job_site import job_site, wait_until
from tests.packages import TINY_LLAMA
from tests.tiny_model import write_corpus, write_model

_LAYERS = 10


@pytest.mark.slow
def test_a_kill_at_seven_tenths_costs_one_layer_at_most(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "deep", config=TINY_LLAMA | {"num_hidden_layers": _LAYERS})
    texts = write_corpus(tmp_path / "corpora" / "texts.jsonl", rows=400)
    with job_site(tmp_path) as site:
        site.settings.update(LEASE_S="2", THREADS="1")
        source, file = FolderModel(kind="folder", path="deep"), FileCorpus(kind="file", path=texts.name)
        with site.db.write() as session:
            row = inputs.add_model(session, tenant_id=site.tenant_id, name="deep", source=source)
            corpus = inputs.add_corpus(session, tenant_id=site.tenant_id, name="texts", source=file)
            request = SparsificationCreate(
                model_id=row.id,
                corpus_id=corpus.id,
                name="deep-sparse",
                method=PruningMethod.SPARSEGPT,
                pattern="2:4",
                sequences=16,
                length=32,
                evaluation_sequences=0,
            )
            payload = request.model_dump(mode="json")
            new = NewJob(tenant_id=site.tenant_id, kind=JobKind.SPARSIFICATION, payload=payload)
            job = queue.submit(session, new)
        state = tmp_path / "work" / "jobs" / job.id / "pruning" / "state.json"
        worker = site.start_worker(real=True)
        wait_until(lambda: state.exists() and _finished(state) >= 0.7 * _LAYERS, site.explain)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        finished, seen = _finished(state), site.read(job).event_seq
        assert site.read(job).state == "running"
        site.start_worker(real=True)
        site.wait_for_state(job, "succeeded")
        with site.db.read() as session:
            events = session.query(JobEvent).filter(JobEvent.job_id == job.id, JobEvent.seq > seen)
            told = [str(event.data.get("message")) for event in events]
        layers = [int(text.split()[1].split("/")[0]) for text in told if text.startswith("prune")]
        assert layers and layers[0] > finished >= 0.7 * _LAYERS
        [result] = site.results()
    rows_NT = token_sequences(FileTokenizer(model), file_texts(texts, ReadReport()), 16, 32, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Like the worker: more threads would change the last bits of sums.
    try:
        prune_model(
            Checkpoint(model), tmp_path / "whole", PruningText(calibration_NT=rows_NT), request.plan()
        )
    finally:
        torch.set_num_threads(threads)
    assert Checkpoint(tmp_path / "whole").digest() == result.digest


def _finished(state: Path) -> int:
    return int(json.loads(state.read_bytes())["finished"])
