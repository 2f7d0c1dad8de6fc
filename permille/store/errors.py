"""Errors of the store, in addition to those of `permille.errors`.

The API maps `NotFoundError` to 404, `ConflictError` to 409 and `QuotaError` to 429. The row of
another tenant is a `NotFoundError`, as if it did not exist.
"""

from typing import TypeVar

from permille.errors import InputError, PermilleError, RetryableError

Row = TypeVar("Row")


class NotFoundError(InputError):
    """The tenant has no such row."""


def require(row: Row | None, message: str) -> Row:
    """Return the row that a query has found. Raise NotFoundError with this message if there is none.

    For example, `require(session.get(Tenant, tenant_id), f"There is no tenant {tenant_id!r}.")`.
    """
    if row is None:
        raise NotFoundError(message)
    return row


class ConflictError(InputError):
    """The request contradicts an existing row. For example, its idempotency key was used with another
    payload.
    """


class RoundClosedError(ConflictError):
    """The round is closing or has ended, or its deadline has passed."""


class ContributionConflictError(ConflictError):
    """The device has already sent another contribution to this round."""


class BudgetSpentError(ConflictError):
    """The device has taken part in as many rounds as its privacy budget allows."""


class QuotaSpentError(ConflictError):
    """The quota of a device is used up. Only a deletion or another setting changes that."""


class ChangedError(RetryableError):
    """Another transaction changed the same rows first. Read them again and repeat the work."""


class BlobStoreError(RetryableError):
    """The bucket did not answer, or gave an invalid answer."""


class QuotaError(RetryableError):
    """A device or a tenant asks for more than its share. It may ask again after `retry_after_s`
    seconds.
    """


class StaleClaimError(PermilleError):
    """The job has ended, or a newer claim of it exists. The holder of the old claim must not publish
    anything.
    """
