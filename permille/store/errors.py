"""Errors of the store, beyond those of `permille.errors`.

The API maps `NotFoundError` to 404, `ConflictError` to 409, `QuotaError` to 429. A row of another tenant does
not exist: it is a `NotFoundError`, never a "forbidden".
"""

from permille.errors import InputError, PermilleError, RetryableError


class NotFoundError(InputError):
    """No such row for this tenant."""


class ConflictError(InputError):
    """The request contradicts a row that exists: an idempotency key with another payload, a version that does
    not grow.
    """


class RoundClosedError(ConflictError):
    """The round has ended, or is about to: what comes now is too late."""


class ContributionConflictError(ConflictError):
    """The device has sent other bytes for this round."""


class BudgetSpentError(ConflictError):
    """The device has taken part in as many rounds as it was promised to at most."""


class QuotaSpentError(ConflictError):
    """A device's quota is used up. Only a deletion or another setting changes that."""


class ChangedError(RetryableError):
    """Another transaction changed the same rows first: the same work may succeed on what is there now."""


class BlobStoreError(RetryableError):
    """The bucket did not answer, or not as it should."""


class QuotaError(RetryableError):
    """A device or a tenant asks for more than its share. It may ask again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StaleClaimError(PermilleError):
    """The claim is no longer the job's newest one (or the job has ended): whoever holds it must publish
    nothing.
    """
