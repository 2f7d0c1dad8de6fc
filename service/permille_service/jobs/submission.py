"""Starting a job by a request: check it, store the job, tell workers, say where it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Response

from permille.schemas.jobs import Job, JobKind
from permille.schemas.problems import ProblemType
from permille.store import jobs
from permille.store.dispatch import dispatch
from permille.store.errors import ConflictError
from permille_service.access.principals import Maker, Operator
from permille_service.context import Served, Service
from permille_service.idempotency import IdempotencyKey
from permille_service.jobs.records import present
from permille_service.problems import ApiError, documented

Body = TypeVar("Body")

JOB_RESPONSES = documented(
    ProblemType.CONFLICT, ProblemType.IDEMPOTENCY_CONFLICT, ProblemType.PREFLIGHT_REFUSED
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request for a job: who asks, and under which key."""

    service: Service
    operator: Operator
    key: str | None
    response: Response

    def start(
        self,
        kind: JobKind,
        payload: Mapping[str, Any],
        check: Callable[[Service, str, Body], None],
        body: Body,
    ) -> Job:
        """Store a job and tell workers; the same key and payload give the same job.

        Args:
            check: takes service, tenant and body before a new job is stored (not for a repeated request), and
                refuses by raising.

        Raises:
            ApiError: `idempotency-conflict`, or what `check` raises.
        """
        tenant_id = self.operator.tenant_id
        if not self._is_repeated():
            check(self.service, tenant_id, body)
        with self.service.database.write() as session:
            try:
                row = jobs.submit(
                    session, tenant_id=tenant_id, kind=kind.value, payload=payload, idempotency_key=self.key
                )
            except ConflictError as exc:
                raise ApiError(ProblemType.IDEMPOTENCY_CONFLICT, str(exc)) from exc
            record = present(session, row)
        dispatch(self.service.dispatcher, record.children or [record.id])
        self.response.headers["Location"] = f"/v1/jobs/{record.id}"
        return record

    def _is_repeated(self) -> bool:
        if self.key is None:
            return False
        with self.service.database.read() as session:
            found = jobs.find_by_key(session, tenant_id=self.operator.tenant_id, idempotency_key=self.key)
        return found is not None


def _submission(
    response: Response, service: Served, operator: Maker, key: IdempotencyKey = None
) -> Submission:
    return Submission(service=service, operator=operator, key=key, response=response)


Submitting = Annotated[Submission, Depends(_submission)]
"""A request for a job by somebody who may start one."""
