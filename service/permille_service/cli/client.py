"""The HTTP client of the commands. It returns JSON, and raises `CommandError` for problems."""

import json
import re
import ssl
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from permille.exits import CommandError, Exit
from permille.plain_text import reason
from permille.schemas.fields import DIGEST_PATTERN, ID_PATTERN, NAME_PATTERN, PATH_PATTERN, TEXT_PATTERN
from permille.schemas.inputs import COMMIT_PATTERN, REPOSITORY_PATTERN
from permille.schemas.jobs import ENDED
from permille_service.cli.proving import ProvenTransport
from permille_service.forms import flag_of

_PATTERN = re.compile(r"should match pattern '(.*)'")
_FORMS = {
    NAME_PATTERN: "1 to 63 small letters, digits, '.', '_' and '-', beginning with a letter or digit",
    ID_PATTERN: "an id, such as model_01jd3kq8z7m4n5p6r7s8t9v0wx",
    DIGEST_PATTERN: "a digest: sha256: and 64 hexadecimal digits",
    PATH_PATTERN: "a path below the model root or the corpus root of the service, such as a/b (not "
    "/home/me/a/b), with only letters, digits, and _ . @ + -. `permille up` prints these folders, and "
    "--model-root and --corpus-root set them",
    REPOSITORY_PATTERN: "a repository as owner/name",
    COMMIT_PATTERN: "a commit of 40 hexadecimal digits, from the hub's page of commits, not the name of a "
    "branch",
    TEXT_PATTERN: "text without control and format characters",
}
# Fields whose options have other names than the fields. A test compares this table with the commands.
FLAGS = {
    "evaluation_corpus_id": "--evaluate-on",
    "calibration_corpus_id": "--calibrate-on",
    "adapter.kind": "--adapter",
    "adapter.scope": "--adapter-scope",
    "adapter.seed": "--adapter-seed",
    "streamed.dataset": "--streamed",
    "body.rules": "--wave",
}

# The service's messages about a request as a whole, and the same messages in terms of the command's options.
_WHOLE = {
    "Give either a mask or an adapter": "Give either a mask or an adapter: --adapter, or for a mask --corpus "
    "(of `packages create`: --mask)",
}

TIMEOUT_S = 30.0
CONNECT_S = 5.0
READ_FILE_S = 200.0
"""Time for the registration of a file. The service reads its head for at most three minutes."""
LOOK_S = 2.0
PATIENCE_S = 60.0
"""Time for which a stream of events is resumed although the service does not answer."""


class Client:
    """A connection to one service as one operator.

    Args:
        url: the URL of the service.
        token: the operator's token.
        ca_file: a file of certificates to trust. None: those of the system.
        proven: whether the server must prove that it is the service of the token. With TLS, its certificate
            is the proof.
    """

    def __init__(self, url: str, token: str, *, ca_file: Path | None = None, proven: bool = False) -> None:
        self._http = httpx.Client(
            base_url=_url(url),
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S),
            verify=True if ca_file is None else _trusting(ca_file),
            trust_env=False,
            transport=ProvenTransport(token) if proven and not url.lower().startswith("https:") else None,
        )

    @property
    def url(self) -> str:
        """The base URL of the service."""
        return str(self._http.base_url).rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: str | int | None) -> Any:
        """Send a GET and return its JSON. Raises CommandError."""
        given = {name: value for name, value in params.items() if value is not None}
        response = self._send("GET", path, params=given)
        answer = _json(response)
        if not isinstance(answer, dict | list):
            raise _stranger(response)
        return answer

    def read(self, path: str, *, begin: int = 0, end: int | None = None) -> bytes:
        """Read the bytes `begin:end` of a file. Raises CommandError."""
        last = "" if end is None else end - 1
        asked = {"Range": f"bytes={begin}-{last}"}
        response = self._send("GET", path, headers=asked)
        if response.status_code == 307:  # the file lies in a bucket, which must not get the token
            try:
                url = response.headers["Location"]
                response = httpx.get(url, headers=asked, timeout=TIMEOUT_S, trust_env=False)
            except httpx.TransportError as exc:
                raise CommandError(
                    f"The service's bucket does not answer: {reason(exc)}.", Exit.RETRY
                ) from exc
        if response.status_code not in (200, 206):
            raise CommandError(f"{path} cannot be read: status {response.status_code}.", Exit.RETRY)
        content = response.content[begin:end] if response.status_code == 200 else response.content
        if end is not None and len(content) != end - begin:
            raise CommandError(
                f"The service sent {len(content)} of {end - begin} bytes of {path}.", Exit.RETRY
            )
        return content

    def post(
        self, path: str, body: Any = None, *, key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Send a POST and return its JSON. Without a `key`, use a fresh idempotency key.

        If the connection breaks, the request is sent once more. The key keeps the repetition from creating a
        second object.

        Raises:
            CommandError: the service refuses the request or does not answer.
        """
        headers = {"Idempotency-Key": key or f"cli-{uuid.uuid4()}"}
        options = {"json": body, "headers": headers, "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S)}
        try:
            response = self._send("POST", path, **options)
        except CommandError as exc:
            if exc.code is not Exit.RETRY or exc.problem is not None:
                raise
            response = self._send("POST", path, **options)
        return _json(response)

    def put(self, path: str, body: Any) -> Any:
        """Send a PUT and return its JSON. Raises CommandError."""
        return _json(self._send("PUT", path, json=body))

    def put_bytes(self, path: str, data: bytes) -> Any:
        """Send signed JSON by PUT, and return the answer. The bytes are not changed. Raises CommandError."""
        headers = {"Content-Type": "application/json"}
        return _json(self._send("PUT", path, content=data, headers=headers))

    def delete(self, path: str) -> None:
        """Send a DELETE. Raises CommandError."""
        response = self._send("DELETE", path)
        if response.content:  # such as a proxy's page to sign in
            raise _stranger(response)

    def pages(self, path: str, *, limit: int | None = None, **params: str | int | None) -> list[Any]:
        """Read all pages of a list, and return its items, at most `limit` of them."""
        items: list[Any] = []
        cursor: str | None = None
        while True:
            left = 200 if limit is None else min(200, limit - len(items))
            page = self.get(path, limit=left, cursor=cursor, **params)
            items += page["items"]
            cursor = page["next_cursor"]
            if cursor is None or (limit is not None and len(items) >= limit):
                return items

    def events(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Yield a job's events until the job ends. If the stream ends earlier, resume it.

        Raises:
            CommandError: the service refuses the request, or has not answered for about a minute.
        """
        last, heard_at = 0, time.monotonic()
        while True:
            headers = {"Last-Event-ID": str(last)}
            path = f"/v1/jobs/{job_id}/events/stream"
            try:
                with self._http.stream("GET", path, headers=headers, timeout=60.0) as response:
                    if response.status_code == 204:
                        return
                    crowded = response.status_code in (429, 503)
                    if response.is_error and not crowded:
                        response.read()
                        raise _error(response)
                    kind = response.headers.get("content-type", "")
                    if not (crowded or kind.startswith("text/event-stream")):
                        raise _stranger(response)
                    for line in response.iter_lines():
                        heard_at = time.monotonic()
                        if line.startswith("data:"):
                            event = json.loads(line.removeprefix("data:"))
                            last = event["seq"]
                            yield event
                if crowded:  # the service has no free stream, so poll the events instead
                    ended = self.get(f"/v1/jobs/{job_id}")["state"] in ENDED
                    for event in self.get(f"/v1/jobs/{job_id}/events", after=last):
                        last = event["seq"]
                        yield event
                    if ended:
                        return
                    time.sleep(LOOK_S)
            except httpx.TransportError as exc:
                if time.monotonic() - heard_at > PATIENCE_S:
                    raise _unreachable(self._http, exc) from exc
                time.sleep(LOOK_S)  # `permille up` may be starting the API again

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as exc:
            raise _unreachable(self._http, exc) from exc
        except httpx.DecodingError as exc:
            raise CommandError(f"The answer of {self._http.base_url} is damaged: {exc}.", Exit.RETRY) from exc
        except ValueError as exc:  # JSON has no NaN and no infinity
            raise CommandError(f"A number is infinite or not a number: {exc}", Exit.USAGE) from exc
        if response.is_error:
            raise _error(response)
        if method != "GET" and not response.is_success:  # a redirect, after which nothing has changed
            raise _stranger(response)
        return response


def _url(text: str) -> httpx.URL:
    """Parse the address of a service. Messages show the address, so it must hold no password."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise CommandError(f"{text!r:.200} is no address of a service: {exc}.", Exit.USAGE) from exc
    if url.userinfo:
        raise CommandError("Give the address without a user. A token goes into --token.", Exit.USAGE)
    return url


def _trusting(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as exc:  # there is no such file, or it is no PEM file
        raise CommandError(f"--ca-file {ca_file} cannot be used: {exc.strerror}.", Exit.USAGE) from exc


def _json(response: httpx.Response) -> Any:
    try:
        if response.is_success:
            return response.json() if response.content else None
    except (ValueError, RecursionError) as exc:
        raise _stranger(response) from exc
    raise _stranger(response)


def _stranger(response: httpx.Response) -> CommandError:
    """Return the error for an answer that does not come from a permille service."""
    place = response.headers.get("location")
    found = f"a redirect to {place!r:.200}" if place else response.headers.get("content-type") or "nothing"
    return CommandError(
        f"{response.url.copy_with(query=None)} answers with {found:.300}, so it is not a permille service. "
        "Check --url or PERMILLE_URL, and proxies on the way.",
        Exit.USAGE,
    )


def exit_of_status(status: int) -> Exit:
    """Return the exit code for an HTTP error status.

    Example:
        >>> exit_of_status(404)
        <Exit.NOT_FOUND: 4>
    """
    if status in (401, 403):
        return Exit.ACCESS
    if status in (404, 410):
        return Exit.NOT_FOUND
    if status in (429, 502, 503, 504):
        return Exit.RETRY
    return Exit.FAILED if status >= 500 else Exit.REFUSED


def _error(response: httpx.Response) -> CommandError:
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    problem = problem if isinstance(problem, dict) else {}
    title, detail = problem.get("title", response.reason_phrase), problem.get("detail", response.status_code)
    wrong = problem.get("errors")
    if response.status_code == 422 and wrong:
        message = in_words(wrong)
    elif response.status_code in (404, 409) and problem.get("detail"):
        message = str(detail)  # these details are complete sentences and need no title
    elif response.status_code == 404 and not problem:
        message = (
            f"There is nothing at {response.url}. Give the service's address without a path, such as "
            "http://127.0.0.1:8321."
        )
    else:
        message = f"{title}: {detail}"
    return CommandError(
        message, exit_of_status(response.status_code), problem or {"status": response.status_code}
    )


def in_words(errors: list[dict[str, str]]) -> str:
    """Describe the invalid fields of a request. Call the fields by the names of the command's options."""
    return "; ".join(_field_in_words(error["location"], error["message"]) for error in errors[:3])


def _field_in_words(location: str, message: str) -> str:
    parent, _, field = location.rpartition(".")
    part = parent.rpartition(".")[2]
    named = FLAGS.get(f"{part}.{field}") or FLAGS.get(field)
    flag = named or flag_of(part if field == "path" else field)  # `source.folder.path`: --folder
    message = message.removeprefix("Value error, ")
    if not parent:  # the error concerns the request as a whole
        return _WHOLE.get(message, message)
    if message == "Field required":
        return f"{flag} is missing"
    if message.startswith("Extra inputs"):
        return f"{flag} does not go with the other options"
    if found := _PATTERN.search(message):
        return f"{flag} must be {_FORMS.get(found[1], 'of another form')}"
    return f"{flag}: {message[:1].lower()}{message[1:]}"


def _unreachable(http: httpx.Client, exc: httpx.TransportError) -> CommandError:
    if isinstance(exc, httpx.UnsupportedProtocol):
        return CommandError(f"The address {http.base_url} must begin with http:// or https://.", Exit.USAGE)
    if "WRONG_VERSION_NUMBER" in str(exc):
        return CommandError(f"{http.base_url} does not use TLS. Begin the address with http://.", Exit.USAGE)
    return CommandError(
        f"No service answers at {http.base_url}: {reason(exc)}. Start it with `permille up`, or name another "
        "one with --url.",
        Exit.RETRY,
    )
