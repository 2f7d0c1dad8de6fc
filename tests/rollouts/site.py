"""A rollout in a store, as operators see a real one."""

import random
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device, Rollout, RolloutReport
from permille_rollouts.state_machine import Rules
from tests.fleet_site import RELEASE, VERSIONS


def add_rollout(session: Session, *, tenant_id: str, seed: int = 0) -> str:
    """Add a rollout of the newest version that stopped itself in its second wave. Return its id."""
    rng, at, rollout_id = random.Random(seed), now(session), new_id(Prefix.ROLLOUT)
    ids = session.scalars(select(Device.id).where(Device.tenant_id == tenant_id)).all()
    waves = (5, 25, 100)  # percent
    numbers = {"devices": 41, "of": 160, "lower_bound": 0.147, "limit": 0.1, "look": 4, "reports": 171}
    session.add(
        Rollout(
            id=rollout_id,
            tenant_id=tenant_id,
            created_at=at - timedelta(days=3),
            token_id=new_id(Prefix.OPERATOR),
            release=RELEASE,
            alias="stable",
            version=VERSIONS,
            before=VERSIONS - 1,
            bounds=[100 * share for share in waves],
            choice={"agent_version": None, "engines": [], "memory_bytes": 0, "members": None},
            rules={**asdict(Rules()), "waves": [f"{share}%" for share in waves]},
            window=None,
            on_stop="hold",
            state="paused",
            wave=1,
            wave_devices=len(ids) // 5,
            approved=1,
            awaits_approval=False,
            opened_at=at - timedelta(hours=9),
            looks=4,
            reason="worse",
            numbers=numbers,
            reverting=False,
            revision=3,
            signed_revision=3,
        )
    )
    session.flush()
    rows: list[dict[str, Any]] = []
    for device_id in ids[: len(ids) // 5]:
        wave = 0 if len(rows) < len(ids) * waves[0] // 100 else 1
        code = rng.choices(("ok", "crash", "silent", None), (90, 1, 2, 7))[0]
        worse = rng.random() < 0.27 if code == "ok" else None
        rows.append(
            {
                "rollout_id": rollout_id,
                "device_id": device_id,
                "tenant_id": tenant_id,
                "wave": wave,
                "began_at": at - timedelta(hours=8),
                "installed": code != "crash",
                "code": code,
                "worse": worse,
                "difference": None if worse is None else rng.gauss(0.05 * worse, 0.008),
                "ended_at": None if code is None else at - timedelta(hours=rng.uniform(1, 7)),
            }
        )
    session.execute(insert(RolloutReport), rows)
    return rollout_id
