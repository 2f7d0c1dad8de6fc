"""A service with data for its web pages: jobs in all states, a mask, a package, releases, a fleet.

python -m tests.console.page_site docs/images        # write the pictures of the guide, in a real Chromium
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page

from permille.package.blobs import BlobFolder
from permille.schemas.inputs import FileCorpus, SparsifiedModel
from permille.schemas.jobs import JobKind
from permille.sensitivity.coverage import mask_report
from permille.store import access, inputs
from permille.store.artifacts import REPORT, Blob, TaskResult
from permille.store.database import Database
from permille.store.jobs import claims, queue
from permille.store.jobs.claims import Claim
from permille.store.jobs.transitions import NewJob
from permille_sparsify.kind import KIND
from tests.artifacts import add_artifact, add_package, some_model
from tests.chromium import chromium
from tests.fleet_site import add_fleet, publish_versions
from tests.packages import tiny_package
from tests.rollouts.site import add_rollout
from tests.running_service import Running, running_service

HOSTILE = "</td><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
WORDS = "the file stories.jsonl has 12,204 tokens, expected 51,200: ask for fewer or shorter sequences"
LEASE_S = 3600.0
BOTH = "light dark"
PICTURES = {
    "job": "dark",
    "release": "light",
    "fleet": "dark",
    "rollout": "light",
    "jobs": BOTH,
    "runs": BOTH,
    "mask": BOTH,
    "build": BOTH,
    "publish": BOTH,
    "compare": BOTH,
    "audit": BOTH,
}
"""Views of the guide and the themes of their pictures. Views in both themes are also taken at 390 pixels."""
WIDE, NARROW = {"width": 1280, "height": 720}, {"width": 390, "height": 720}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stocked:
    """Handles of the data: the claim of the running job, and ids."""

    database: Database
    held: Claim
    sparsification_id: str
    mask_id: str
    package_digest: str
    rollout_id: str
    failed_id: str

    def progress(self, fraction: float, message: str) -> None:
        with self.database.write() as session:
            claims.report_progress(session, self.held, fraction=fraction, message=message)


def stock(data_dir: Path, database: Database, *, devices: int, runs: int, words: str) -> Stocked:
    """Put all of it into a service without a worker. `words` is the text that a worker reports."""
    blobs = BlobFolder(data_dir / "blobs")
    package = tiny_package(blobs.root)
    with database.write() as session:
        tenant = access.first_tenant(session)
        assert tenant is not None
        model_id = some_model(session, tenant.id)
        corpus = inputs.add_corpus(
            session,
            tenant_id=tenant.id,
            name="stories",
            source=FileCorpus(kind="file", path="stories.jsonl"),
            size_bytes=81_264_000,
        )
        sparse = add_artifact(
            session,
            tenant_id=tenant.id,
            kind=JobKind.SPARSIFICATION,
            request={"model_id": model_id, "corpus_id": corpus.id, "name": "tiny-half"},
            made=_half(blobs, model_id),
        )
        half = SparsifiedModel(kind="sparsified", sparsification_id=sparse.id)
        sparse.made_model_id = inputs.add_model(
            session, tenant_id=tenant.id, name="tiny-half", source=half
        ).id
        mask = add_artifact(
            session,
            tenant_id=tenant.id,
            kind=JobKind.MASK,
            request={
                "method": "fisher",
                "model_id": model_id,
                "corpus_id": corpus.id,
                "density": 0.001,
            },
            made=_mask(blobs, model_id),
        )
        add_package(session, tenant_id=tenant.id, manifest=package.manifest)
        publish_versions(session, tenant_id=tenant.id, digest=package.digest)
        add_fleet(session, tenant_id=tenant.id, devices=devices, runs=runs)
        rollout_id = add_rollout(session, tenant_id=tenant.id)
        failed = queue.submit(
            session, NewJob(tenant_id=tenant.id, kind=JobKind.MASK, payload=dict(mask.request))
        )
        claim = claims.claim(session, worker=words, lease_s=LEASE_S, job_id=failed.id)
        assert claim is not None
        claims.report_progress(session, claim, fraction=0.2, message=words)
        claims.fail(
            session, claim, error={"type": "InputError", "message": f"no corpus: {words}"}, retryable=False
        )
        build = {"model_id": model_id, "mask": {"method": "fisher", "corpus_id": corpus.id}}
        row = queue.submit(session, NewJob(tenant_id=tenant.id, kind=JobKind.BUILD, payload=build))
        part = queue.parts_of(session, row)[0]
        held = claims.claim(session, worker="worker-1:4711", lease_s=LEASE_S, job_id=part.id)
        assert held is not None
    stocked = Stocked(
        database=database,
        held=held,
        sparsification_id=sparse.id,
        mask_id=mask.id,
        package_digest=package.digest,
        rollout_id=rollout_id,
        failed_id=failed.id,
    )
    stocked.progress(0.42, "scoring sequence 42 of 100")
    return stocked


def _half(blobs: BlobFolder, model_id: str) -> TaskResult:
    """Return a model with half of its weights set to zero. The names in its report are hostile."""
    rows = [{"name": f"{HOSTILE} {i}", "zeros": 0.5, "relative_error": 0.1 * i} for i in range(3)]
    perplexity = {"before": 14.2, "pruned": 31.9, "after": 17.1, "held_out": False}
    report = {
        "zeros": 0.5,
        "perplexity": perplexity,
        "layers": rows,
        "tensors": rows,
    }
    return TaskResult(
        model_id=model_id, digest=blobs.put_bytes(b"half"), provenance={}, blobs=(_evidence(blobs, report),)
    )


def _evidence(blobs: BlobFolder, report: Mapping[str, object]) -> Blob:
    content = json.dumps(report).encode()
    return Blob(
        role=REPORT, media_type="application/json", digest=blobs.put_bytes(content), size_bytes=len(content)
    )


def _mask(blobs: BlobFolder, model_id: str) -> TaskResult:
    """Return a mask with log-normal scores. Scores of real models fall off alike."""
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.{part}_proj.weight" for i in range(3) for part in ("self_attn.q", "mlp.down")]
    scores = {
        name: np.exp(rng.normal(0, 2.6, size=(256, 256))).astype(np.float32) * (1 + i)
        for i, name in enumerate(names)
    }
    best = {name: np.argsort(values.ravel())[-66:].astype(np.uint32) for name, values in scores.items()}
    report = _evidence(blobs, mask_report(scores, best))
    layer = Blob(role="mask", media_type="x", digest=blobs.put_bytes(b"mask"), size_bytes=4)
    return TaskResult(model_id=model_id, digest=layer.digest, k=396, provenance={}, blobs=(layer, report))


@contextmanager
def site(
    folder: Path, *, url: str | None = None, devices: int = 300, runs: int = 2000, words: str = HOSTILE
) -> Iterator[tuple[Running, Stocked]]:
    """Run a service with all of the data. Its rows are in the database at `url`, by default in SQLite."""
    url = url or f"sqlite:///{folder}/data/permille.db"
    with running_service(folder, "--no-worker", PERMILLE_DATABASE_URL=url) as running:
        stocked = stock(running.data_dir, Database(url), devices=devices, runs=runs, words=words)
        yield running, stocked
        stocked.database.close()


def views(stocked: Stocked) -> dict[str, str]:
    """Return the paths of all views by name."""
    return {
        "jobs": "/ui/jobs",
        "job": f"/ui/jobs/{stocked.held.job_id}",
        "models": "/ui/models",
        "sparsification": f"/ui/{KIND.collection}/{stocked.sparsification_id}",
        "masks": "/ui/masks",
        "mask": f"/ui/masks/{stocked.mask_id}",
        "packages": "/ui/packages",
        "package": f"/ui/packages/{stocked.package_digest}",
        "releases": "/ui/releases",
        "release": "/ui/releases/notes",
        "rollouts": "/ui/rollouts",
        "rollout": f"/ui/rollouts/{stocked.rollout_id}",
        "fleet": "/ui/fleet",
        "runs": "/ui/runs",
        "federations": "/ui/federations",
        "audit": "/ui/audit",
        "build": "/ui/new/build",
        "publish": "/ui/new/release",
        "roll out": "/ui/new/rollout",
        "invite": "/ui/new/invitation",
        "resume": f"/ui/rollouts/{stocked.rollout_id}/resume",
        "compare": f"/ui/compare/jobs?a={stocked.failed_id}&b={stocked.held.job_id}",
    }


def sign_in(context: BrowserContext, running: Running, *, token: str | None = None) -> Page:
    """Return a page on which an operator is signed in."""
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{running.url}/ui")
    page.fill("#token", token or running.token)
    page.click("main button")
    page.wait_for_url("**/ui/jobs")
    return page


def main() -> None:
    """Write the pictures: wide ones, and narrow ones as a telephone shows them."""
    target = Path(sys.argv[1])
    with (
        tempfile.TemporaryDirectory() as folder,
        site(Path(folder), devices=3000, runs=12_000, words=WORDS) as (running, stocked),
        chromium() as browser,
    ):
        _change_something(running)
        for scheme in ("light", "dark"):
            wide, narrow = (_signed_in(browser, running, scheme, shape) for shape in (WIDE, NARROW))
            for name, schemes in PICTURES.items():
                if scheme in schemes:
                    _show(wide, running, views(stocked)[name], name)
                    _shoot(wide, target / f"page-{name}{'' if schemes == scheme else f'-{scheme}'}.png", name)
                if scheme == "light" and schemes == BOTH:
                    _show(narrow, running, views(stocked)[name], name)
                    _shoot(narrow, target / f"page-{name}-390.png", name)


def _change_something(running: Running) -> None:
    """Make changes that leave entries in the audit log."""
    with running.client() as client:
        client.post("/v1/tokens", json={"name": "ci", "role": "operator"})
        client.post("/v1/groups", json={"name": "canaries", "rule": {"tags": ["canary"]}})
        client.put("/v1/retention", json={"result_days": 90, "keep_newest": 5})
        client.post("/v1/invitations", json={"release": "notes"})


def _signed_in(browser: Browser, running: Running, scheme: Any, shape: Any) -> Page:
    return sign_in(browser.new_context(color_scheme=scheme, viewport=shape), running)


def _show(page: Page, running: Running, path: str, name: str) -> None:
    """Go to a view. For "publish", go on to the page that asks for confirmation."""
    page.goto(running.url + path)
    if name == "publish":
        page.fill("#name", "notes")
        page.select_option("#package_digest", index=1)
        page.fill("#alias", "stable")
        page.click("main button")
    page.mouse.move(0, 0)


def _shoot(page: Page, path: Path, name: str) -> None:
    """Save a picture with 128 colours, which are enough for the page."""
    shot = Image.open(BytesIO(page.screenshot(full_page=name in ("fleet", "mask"))))
    shot.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
