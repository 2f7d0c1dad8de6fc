"""Any number of devices and runs in a store, as operators see a real fleet.

One release has four versions. The last one makes devices worse: fewer adopt it, and their losses are higher.
"""

import json
import random
import uuid
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from permille.schemas.jobs import JobKind
from permille.store import artifacts, releases
from permille.store.database import now
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device, Run
from tests.unit.edge_agent.samples import metrics

RELEASE = "notes"
VERSIONS = 4
# One entry for each version: the mean gain in nats, and the share of runs that are adopted.
GAINS = (0.30, 0.34, 0.38, 0.18)
ADOPTED = (0.62, 0.66, 0.72, 0.41)
ENGINES = ("light", "light", "light", "light-int8", "torch")


def publish_versions(session: Session, *, tenant_id: str, digest: str) -> None:
    """Publish one package under all versions. The alias `stable` points at the newest."""
    package = artifacts.get(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, key=digest)
    for _ in range(VERSIONS):
        releases.publish(session, name=RELEASE, package=package)
    releases.set_alias(session, tenant_id=tenant_id, name=RELEASE, alias="stable", version=VERSIONS)


def add_fleet(session: Session, *, tenant_id: str, devices: int, runs: int, seed: int = 0) -> None:
    """Add devices and their runs of the last thirty days. Most devices moved from version to version."""
    rng, at = random.Random(seed), now(session)
    ids = [new_id(Prefix.DEVICE) for _ in range(devices)]
    first = {device_id: rng.randint(1, VERSIONS) for device_id in ids}
    session.execute(
        insert(Device),
        [_device(tenant_id, device_id, number, rng, at) for number, device_id in enumerate(ids)],
    )
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    batch = []
    for number in range(runs):
        device_id = ids[number % devices]
        age = (runs - number) / runs
        version = max(first[device_id] - 1, min(VERSIONS, 1 + int((1 - age) * VERSIONS)))
        row = _run(tenant_id, device_id, max(1, version), at - timedelta(days=30 * age), rng)
        if (earlier := rows.get((device_id, row["version"]))) is not None:
            earlier["newest"] = False
        rows[device_id, row["version"]] = row
        batch.append(row)
    session.execute(insert(Run), batch)


def _device(tenant_id: str, device_id: str, number: int, rng: random.Random, at: datetime) -> dict[str, Any]:
    return {
        "id": device_id,
        "tenant_id": tenant_id,
        "created_at": at - timedelta(days=31),
        "public_key": f"{number:043d}",
        "name": f"device {number}",
        "agent_version": rng.choice(("0.1.0", "0.1.0", "0.0.9")),
        "engine": rng.choice(ENGINES),
        "tags": [],
        "release": RELEASE,
        "alias": "stable",
        "version": rng.choices((2, 3, 4), (1, 3, 6))[0],
        "last_seen_at": at - timedelta(hours=rng.expovariate(1 / 30)),
    }


def _run(tenant_id: str, device_id: str, version: int, at: datetime, rng: random.Random) -> dict[str, Any]:
    base = 3.2 + (int(device_id[-3:], 36) % 100) / 100
    gain = rng.gauss(GAINS[version - 1], 0.15)
    adopted = rng.random() < ADOPTED[version - 1]
    outcome = "adopted" if adopted else rng.choice(("kept_base", "kept_base", "refused_data", "failed"))
    personal = base - gain if outcome in ("adopted", "kept_base") else None
    reported = metrics(
        release=RELEASE,
        version=version,
        outcome=outcome,
        loss_base=base,
        loss_personal=personal,
        state_digest=None,
    )
    return {
        "tenant_id": tenant_id,
        "run_id": str(uuid.UUID(int=rng.getrandbits(128))),
        "device_id": device_id,
        "created_at": at,
        "ended_at": at,
        "metrics": json.loads(reported.model_dump_json()),
        "newest": True,
        "release": RELEASE,
        "version": version,
        "outcome": outcome,
        "gain": None if personal is None else gain,
        "loss": personal if adopted else base,
        "peak_rss_bytes": rng.randint(300, 900) << 20,
    }
