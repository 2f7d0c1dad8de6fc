"""Idempotent creation: a request repeated with its `Idempotency-Key` gets the first answer again.

An answer is encrypted and stored for a day, in the transaction that creates the object. For a job, the job's
row serves as the answer and stores the key. Before a job is created, preflight checks that the machine has
what the request needs. Workers are told about the job after the commit.

If the object is removed, its key is refused for the rest of the day. The first answer would name a missing
object, and a late repetition of the request must not create the object again. A client that wants the object
again sends a new key.
"""

import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from permille.schemas.access import Role
from permille.schemas.fields import Closed
from permille.schemas.jobs import Job, JobKind
from permille.schemas.problems import ProblemType
from permille.schemas.releases import Release
from permille.store import artifacts, audit, inputs, tables
from permille.store.database import now
from permille.store.errors import ChangedError, ConflictError
from permille.store.jobs import queue
from permille.store.jobs.dispatch import dispatch
from permille.store.jobs.queue import KEPT_FOR
from permille.store.jobs.transitions import NewJob, request_digest
from permille_service.access.principals import Operator, operator_with
from permille_service.context import Served, Service
from permille_service.jobs.records import present
from permille_service.preflights.planning import check
from permille_service.problems import ApiError, documented

Answer = TypeVar("Answer", bound=BaseModel)

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[A-Za-z0-9_.:-]{1,100}$",
        description="if you repeat a request with the same key and body within a day, nothing new is created "
        "and you get the first answer; if the object was removed, you get `idempotency-conflict`",
        examples=["9f7c8a10-mask-1"],
    ),
]
MADE_RESPONSES = documented(ProblemType.CONFLICT, ProblemType.IDEMPOTENCY_CONFLICT)
JOB_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": Job, "description": "the job exists already: an equal earlier request created it"},
    **documented(ProblemType.CONFLICT, ProblemType.IDEMPOTENCY_CONFLICT, ProblemType.PREFLIGHT_REFUSED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """A POST that creates an object, with its operation, operator and idempotency key."""

    service: Service
    operation: str
    operator: Operator
    key: str | None
    response: Response

    def once(
        self,
        answer_type: type[Answer],
        body: BaseModel,
        make: Callable[[Session], Answer],
        *,
        private: bool = False,
        removable: type[tables.Named] | None = None,
    ) -> Answer:
        """Run `make` in a write transaction, or return the answer that is stored under the key.

        Args:
            private: the answer holds a secret, so only the same token gets it again.
            removable: the table of the object, if the object can be removed or revoked.

        Raises:
            ApiError: `idempotency-conflict`: the key was used for another request, or its object was removed.
            Exception: any error of `make`. In this case nothing is stored.
        """
        # The digest of a private answer covers the operator's token. Another operator who sends the same key
        # gets a conflict.
        operation = f"{self.operation} {self.operator.token_id}" if private else self.operation
        digest = hashlib.sha256(f"{operation}\0{body.model_dump_json()}".encode()).hexdigest()
        tenant_id, key, seal = self.operator.tenant_id, self.key, self.service.seal
        # The encryption covers tenant and key, so a row that is copied to another key cannot be decrypted.
        context = f"{tenant_id}\0{key}"

        def work(session: Session) -> Answer:
            kept = None if key is None else self._find_kept(session, digest)
            if kept is not None:
                earlier = answer_type.model_validate_json(seal.open(kept.sealed, context))
                if removable is not None:
                    self._check_is_there(session, removable, earlier)
                return earlier
            try:
                made = make(session)
            except ConflictError as exc:
                # Another process may have just finished this same request, and taken the name.
                if key is None or self._find_kept(session, digest) is None:
                    raise
                raise ChangedError("An earlier copy of this request has taken the name.") from exc
            answer = self._audit(session, made, body)
            if key is not None:
                self._keep(session, digest, seal.close(answer.model_dump_json().encode(), context))
            return answer

        # If two requests with the same key run at the same time, the transaction of the second one fails. It
        # then runs again, and finds the answer of the first one.
        return self.service.database.transact(work)

    def add(
        self,
        answer_type: type[Answer],
        body: BaseModel,
        make: Callable[[Session], Answer],
        *,
        removable: type[tables.Named] | None = None,
    ) -> Answer:
        """Run `make` as `once` does, and return the path of the new object in `Location`.

        Example:
            return creating.add(Corpus, body, lambda session: present(inputs.add_corpus(session, ...)))
        """
        answer = self.once(answer_type, body, make, removable=removable)
        self.response.headers["Location"] = f"{self.operator.path}/{_path_below(answer)}"
        return answer

    def _audit(self, session: Session, answer: Answer, body: BaseModel) -> Answer:
        """Add an entry about the new object to the audit log, and return the answer."""
        change = self.operator.change(made=_path_below(answer), body=body)
        audit.append(session, tenant_id=self.operator.tenant_id, change=change)
        return answer

    def start(self, kind: JobKind, request: Closed, *, again: bool) -> Job:
        """Store a job and tell workers. The same key and request return the same job.

        Unless `again` is set, an earlier job is returned if it had an equal request and has succeeded, its
        result still exists, and its corpora have not changed. Parts of a build are reused in the same way.

        Raises:
            ApiError: `idempotency-conflict`, or the reason why the request is refused.
        """
        tenant_id = self.operator.tenant_id
        new = NewJob(
            tenant_id=tenant_id,
            kind=kind,
            payload=request.model_dump(mode="json"),
            idempotency_key=self.key,
        )
        digest = request_digest(new.kind, new.payload)
        # Look for an earlier job first, because preflight costs more.
        with self.service.database.read() as session:
            repeated = self._find_repeated(session, new, digest) is not None
            found = None if repeated or again else self._find_equal(session, digest)
            earlier = None if found is None else present(session, found)
        if earlier is not None:
            self.response.status_code = 200
            self.response.headers["Location"] = f"/v1/jobs/{earlier.id}"
            return earlier
        if not repeated:
            check(self.service, tenant_id, request)

        def work(session: Session) -> Job:
            # The same request may have stored its job in the meantime.
            row = self._find_repeated(session, new, digest)
            if row is not None:
                return present(session, row)
            limit = self.service.settings.queued_jobs_per_tenant
            queue.check_room(session, tenant_id=tenant_id, limit=limit)
            row = queue.submit(session, new, None if again else self._find_part)
            record = self._audit(session, present(session, row), request)
            if self.key is not None:  # the key must still be refused if the job is removed within the day
                self._keep(session, digest, b"")
            return record

        record = self.service.database.transact(work)
        # Tell workers after the commit. Before it, a worker would not find the job.
        dispatch(self.service.dispatcher, record.children or [record.id])
        self.response.headers["Location"] = f"/v1/jobs/{record.id}"
        return record

    def _find_equal(self, session: Session, digest: str) -> tables.Job | None:
        """Return a job that has succeeded with an equal request.

        Return None if its result is gone, or if a file of its corpora has changed since.
        """
        row = queue.find_equal(session, tenant_id=self.operator.tenant_id, request_digest=digest)
        if row is None or not artifacts.has_result(session, row):
            return None
        return row if inputs.corpora_are_older(session, self.service.settings, row) else None

    def _find_part(self, session: Session, part: tables.Job) -> tables.Job | None:
        return self._find_equal(session, part.request_digest)

    def _find_repeated(self, session: Session, new: NewJob, digest: str) -> tables.Job | None:
        """Return the job that was created with the key, or None.

        Raises:
            ApiError: the key was used for another request, or its job was removed.
        """
        # Read the answer before the job. In the other order, a commit between the two reads would look like
        # a removed job.
        kept = None if self.key is None else self._find_kept(session, digest)
        try:
            row = queue.find_submitted(session, new)
        except ConflictError as exc:
            raise ApiError(ProblemType.IDEMPOTENCY_CONFLICT, str(exc)) from exc
        if row is None and kept is not None:
            raise self._gone("job")
        return row

    def _find_kept(self, session: Session, digest: str) -> tables.IdempotentAnswer | None:
        """Return the stored answer of the key, or None.

        Raises:
            ApiError: `idempotency-conflict`: the key was used for another request.
        """
        answer = session.scalar(
            select(tables.IdempotentAnswer).where(
                tables.IdempotentAnswer.tenant_id == self.operator.tenant_id,
                tables.IdempotentAnswer.key == self.key,
                tables.IdempotentAnswer.created_at > now(session) - KEPT_FOR,
            )
        )
        if answer is not None and answer.request_digest != digest:
            expected = f"The idempotency key {self.key!r} was used for another request. Use a fresh key."
            raise ApiError(ProblemType.IDEMPOTENCY_CONFLICT, expected)
        return answer

    def _check_is_there(self, session: Session, table: type[tables.Named], answer: BaseModel) -> None:
        """Check that the object of an answer still exists. Raises ApiError if it was removed or revoked."""
        row = session.get(table, getattr(answer, "id", ""))
        if row is None or getattr(row, "revoked_at", None) is not None:
            raise self._gone(table.noun)

    def _gone(self, noun: str) -> ApiError:
        was = f"The {noun} of the idempotency key {self.key!r} was removed or revoked. Use a fresh key."
        return ApiError(ProblemType.IDEMPOTENCY_CONFLICT, was)

    def _keep(self, session: Session, digest: str, sealed: bytes) -> None:
        """Store the answer of the key, and delete answers that are older than a day."""
        at = now(session)
        session.execute(
            delete(tables.IdempotentAnswer).where(tables.IdempotentAnswer.created_at <= at - KEPT_FOR)
        )
        session.add(
            tables.IdempotentAnswer(
                tenant_id=self.operator.tenant_id,
                key=self.key,
                request_digest=digest,
                sealed=sealed,
                created_at=at,
            )
        )
        session.flush()


def _path_below(answer: BaseModel) -> str:
    """Return the part of an object's path that follows the path of its list."""
    if isinstance(answer, Release):
        return f"{answer.name}/versions/{answer.version}"
    name = getattr(answer, "id", None) or getattr(answer, "name", None)
    return "" if name is None else str(name)


def _creation_by(role: Role) -> Callable[..., Coroutine[Any, Any, Creation]]:
    """Return a dependency that admits operators with at least this role and makes a `Creation`."""

    async def creation(
        request: Request,
        response: Response,
        service: Served,
        operator: Annotated[Operator, Depends(operator_with(role))],
        key: IdempotencyKey = None,
    ) -> Creation:
        return Creation(
            service=service,
            operation=request.scope["route"].name,
            operator=operator,
            key=key,
            response=response,
        )

    return creation


Creating = Annotated[Creation, Depends(_creation_by(Role.OPERATOR))]
AdminCreating = Annotated[Creation, Depends(_creation_by(Role.ADMIN))]
