"""Failures of the hub, as errors that say when a job may try again."""

from permille.errors import RetryableError
from permille.retry_after import stated_wait_s

# A rate limit that names no time is tried again after a minute.
_LIMITED_S = 60.0
_LEAST_S = 1.0
# What the library raises for an unexpected answer, such as a page on which a person must sign in.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def hub_failure(exc: BaseException | None, what: str) -> RetryableError:
    """Describe a failed download: the hub did not answer, or its answer lacks the file or cannot be read.

    Args:
        exc: the error of `huggingface_hub` or of a library above it. Its cause may hold the hub's answer.
        what: the repository or data set, for the message.
    """
    found = exc
    while found is not None and getattr(found, "response", None) is None:
        found = found.__cause__ or found.__context__
    response = getattr(found, "response", None)
    if response is None and isinstance(exc, _UNREADABLE):
        return RetryableError(
            f"The hub's answer for {what} cannot be read: {type(exc).__name__}: {exc!s:.200}. Check the "
            "network's proxies, and HF_ENDPOINT if set."
        )
    if response is None:
        reason = str(exc).rstrip(".")
        return RetryableError(
            f"Cannot reach the hub for {what}: {reason}. Check the network, and HF_ENDPOINT if set."
        )
    status: int = response.status_code
    wait_s = stated_wait_s(response.headers)
    if status == 429 or (status == 503 and wait_s is not None):
        wait_s = max(_LEAST_S, _LIMITED_S if wait_s is None else wait_s)
        return RetryableError(
            f"The hub limits the rate of requests ({status}) for {what}. The job continues in "
            f"{wait_s:.0f} s. Set HF_TOKEN for a higher limit.",
            retry_after_s=wait_s,
        )
    return RetryableError(f"The hub answered {status} for {what}.")
