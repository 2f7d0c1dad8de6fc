"""Making things once: a request that is sent again with its `Idempotency-Key` gets the first answer again.

The answer is kept in the transaction that makes the thing, sealed, for a day. Jobs keep their key in their
own row.
"""

import hashlib
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from permille.schemas.problems import ProblemType
from permille.store import idempotency
from permille.store.errors import ConflictError
from permille_service.context import Service
from permille_service.problems import ApiError

Answer = TypeVar("Answer", bound=BaseModel)

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[A-Za-z0-9_.:-]{1,100}$",
        description="sent again with the same key and body, the request makes nothing twice",
        examples=["9f7c8a10-mask-1"],
    ),
]


def once(
    service: Service,
    *,
    tenant_id: str,
    key: str | None,
    operation: str,
    body: BaseModel,
    answer_type: type[Answer],
    make: Callable[[Session], Answer],
) -> Answer:
    """Run `make` in a write transaction, or return the answer that was kept under `key`.

    Raises:
        ApiError: `idempotency-conflict`: the key was used with another request.
        Whatever `make` raises; nothing is kept then.
    """
    try:
        return _once(service, tenant_id, key, operation, body, answer_type, make)
    except IntegrityError:  # the same key at the same moment: its answer is there now
        return _once(service, tenant_id, key, operation, body, answer_type, make)


def _once(
    service: Service,
    tenant_id: str,
    key: str | None,
    operation: str,
    body: BaseModel,
    answer_type: type[Answer],
    make: Callable[[Session], Answer],
) -> Answer:
    digest = hashlib.sha256(f"{operation}\0{body.model_dump_json()}".encode()).hexdigest()
    context = f"{tenant_id}\0{key}"
    with service.database.write() as session:
        if key is None:
            return make(session)
        try:
            kept = idempotency.find(session, tenant_id=tenant_id, key=key, request_digest=digest)
        except ConflictError as exc:
            raise ApiError(ProblemType.IDEMPOTENCY_CONFLICT, str(exc)) from exc
        if kept is not None:
            return answer_type.model_validate_json(service.seal.open(kept.sealed, context))
        answer = make(session)
        sealed = service.seal.close(answer.model_dump_json().encode(), context)
        idempotency.keep(
            session, tenant_id=tenant_id, key=key, request_digest=digest, status=201, sealed=sealed
        )
        return answer
