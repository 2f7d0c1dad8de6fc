"""The kind of job that closes a round. The service and the workers start it."""

from typing import Final

from permille.schemas.jobs import JobKind
from permille.schemas.work import Kind
from permille_rounds.schemas import RoundRequest

KIND: Final = Kind(kind=JobKind.ROUND, request=RoundRequest, collection="federations")
