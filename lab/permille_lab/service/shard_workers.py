"""Compare the time of a mask on four workers with that on one.

    python -m permille_lab.service.shard_workers

Real workers with one thread each run on SQLite. The model is a random Llama of about seven million weights.
The mask is computed in one job, then in shards by one worker, then in shards by four. All masks must be the
same. The result depends on the free cores: with two cores, four workers are at most twice as fast. The start
of a process for each shard also takes time.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from permille.choices import MaskMethod
from permille.package.config_files import clean_config
from permille.schemas.inputs import FileCorpus, FolderModel
from permille.schemas.jobs import ENDED
from permille.schemas.masks import FisherMaskCreate
from permille.store import inputs
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from tests.integration.job_site import Site, job_site
from tests.packages import sentences, tiny_tokenizer

RUNS = ((1, 1e99), (1, 0.0), (4, 0.0))
"""Number of workers, and the operations above which a mask is split."""


def _stock(site: Site) -> tuple[str, str]:
    folder = site.root / "models" / "random"
    folder.mkdir(parents=True)
    (site.root / "corpora").mkdir()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(clean_config(json.loads((folder / "config.json").read_text())))
    )
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    (site.root / "corpora" / "text.txt").write_text("\n\n".join(sentences(6000)))
    with site.db.write() as session:
        model = inputs.add_model(
            session,
            tenant_id=site.tenant_id,
            name="random",
            source=FolderModel(kind="folder", path="random"),
        )
        texts = FileCorpus(kind="file", path="text.txt")
        corpus = inputs.add_corpus(session, tenant_id=site.tenant_id, name="text", source=texts)
        return model.id, corpus.id


def _measure(root: Path, workers: int, split_flops: float, sequences: int, length: int) -> tuple[float, str]:
    """Return the seconds from the request to the mask, and the mask's digest."""
    root.mkdir()
    with job_site(root) as site:
        site.settings.update(FISHER_SPLIT_FLOPS=str(split_flops), THREADS="1", POLL_S="0.2", SWEEP_S="1")
        model_id, corpus_id = _stock(site)
        for _ in range(workers):
            site.start_worker(real=True)
        site.wait_for_state(
            site.submit(kind="package"), "failed"
        )  # an invalid job: wait until the workers run
        request = FisherMaskCreate(
            method=MaskMethod.FISHER,
            model_id=model_id,
            corpus_id=corpus_id,
            sequences=sequences,
            length=length,
        )
        payload = request.model_dump(mode="json")
        begun = time.monotonic()
        with site.db.write() as session:
            job = queue.submit(session, NewJob(tenant_id=site.tenant_id, kind="mask", payload=payload))
        while (found := site.read(job)).state not in ENDED:
            time.sleep(0.2)
        if found.state != "succeeded":
            raise SystemExit(f"The mask job ended in state {found.state}: {found.error}")
        return time.monotonic() - begun, site.results()[0].digest


def main() -> None:
    """Measure and print all runs. The last line has the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="permille-shards-") as name:
        for index, (workers, split_flops) in enumerate(RUNS):
            folder = Path(name) / str(index)
            seconds, digest = _measure(folder, workers, split_flops, options.sequences, options.length)
            found[index] = (seconds, digest)
            way = "by shards" if split_flops == 0 else "whole"
            print(f"{workers} worker(s), {way}: {seconds:.1f} s, {digest}", flush=True)
    if len({digest for _, digest in found.values()}) != 1:
        raise SystemExit("The masks differ.")
    whole, one, four = (found[index][0] for index in range(len(RUNS)))
    print(f"shards: four workers against one {one / four:.2f}x, against one job {whole / four:.2f}x, equal")


if __name__ == "__main__":
    main()
