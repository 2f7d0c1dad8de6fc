"""Take back times that were written by a clock which has gone back since.

A clock that is ahead by a year makes jobs available, and leases end, in a year. Once it is right again they
would wait as long. The sweeps of rounds and uploads see to these themselves.
"""

from datetime import timedelta
from typing import Final

from sqlalchemy import BigInteger, literal, or_, select, type_coerce, update

from permille.store.database import Database, now
from permille.store.jobs import transitions
from permille.store.tables import Device, Instant, Job, Tenant

SLACK: Final = timedelta(minutes=1)
"""The clocks of several servers of one database differ by less."""


def pull_back(db: Database) -> int:
    """Let unfinished jobs count from now on, where they were changed later than now; return how many.

    Leases keep their length: a worker that is alive renews its own, and another's ends.
    """
    with db.read() as session:
        late = now(session) + SLACK
        unfinished = or_(transitions.IS_QUEUED, transitions.IS_RUNNING)
        job_ids = session.scalars(select(Job.id).where(unfinished, Job.updated_at > late)).all()
        is_late = session.scalar(select(Tenant.id).where(Tenant.served_at > late).limit(1)) is not None
    if not (job_ids or is_late):
        return 0
    with db.write() as session:
        at = now(session)
        earlier = literal(at, Instant()) - type_coerce(Job.updated_at, BigInteger)
        for job_id in job_ids:
            session.execute(
                update(Job)
                .where(Job.id == job_id, unfinished, Job.updated_at > late)
                .values(
                    available_at=type_coerce(Job.available_at, BigInteger) + earlier,
                    lease_expires_at=type_coerce(Job.lease_expires_at, BigInteger) + earlier,
                    dispatched_at=None,
                    updated_at=at,
                )
                .execution_options(synchronize_session=False)
            )
        for table in (Tenant, Device) if is_late else ():  # both are written at the same time
            session.execute(update(table).where(table.served_at > late).values(served_at=at))
    return len(job_ids)
