"""The parent's side of `child.py`: it starts a child, and limits the time of each call and of all calls
together.

A call may take `CALL_S`, and longer if its text is long. All calls together may take `BUDGET_S`, and
longer if there is much text. Without this second limit, a template that needs five seconds per
conversation could run all night. A child that breaks a limit is ended, and the next call starts a new child.
"""

import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from permille.errors import PermilleError

START_S = 60.0  # a busy machine takes long to load Python and a vocabulary
CALL_S = 5.0
BUDGET_S = 60.0
EARNED_A_CALL_S = 0.01  # each call adds this much to the budget, up to `BUDGET_S`
# The speed that timeouts assume. Tokenizers and templates are ten times as fast, even on a small machine.
CHARACTERS_A_SECOND = 50_000
MAX_ANSWER_BYTES = 256 << 20
# No tokenizer that we know makes more tokens from one character.
MAX_TOKENS_A_CHARACTER = 80


# The variables that a child gets. Others may hold a secret: a token of the hub, or a password in a URL.
_KEPT_VARIABLES = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PERMILLE_NATIVE", "SYSTEMROOT"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV"),
    *("TEMP", "TMP", "TMPDIR"),
)
_SET_VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class SandboxError(PermilleError):
    """The child broke a limit, or ended."""


def child_environment() -> dict[str, str]:
    """Return the environment of a child: what Python and its libraries need, and no secrets."""
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _SET_VARIABLES


def run_once(
    module: str, *arguments: str, timeout_s: float, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a module as a child process until it ends. The module confines itself.

        done = run_once("permille.sandbox.heads", "folder", "/models/tiny", timeout_s=60.0)

    Args:
        module: the module. It calls `die_with_parent` and `confine` first.
        arguments: its arguments.
        timeout_s: the child is killed after this many seconds.
        data: its standard input.

    Raises:
        SandboxError: the time is over.
    """
    try:
        return subprocess.run(
            # `-P`: the current folder must not provide modules to the child.
            [sys.executable, "-P", "-m", module, *arguments],
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise SandboxError(f"It took more than {timeout_s:.0f} s.") from exc


class Sandbox:
    """A child process. It starts with the first call, and ends with `close` or when this object is deleted.

    Args:
        load: returns the bytes of `tokenizer.json`. None if no tokenizer is needed.
        tokens: the tokens whose ids `start` returns. They are special, whatever the tokenizer says.
        stops: ids that end a text, so that their tokens are special, too.

    Example:

        sandbox = Sandbox(lambda: Path("tokenizer.json").read_bytes(), tokens=("</s>",))
        answer = sandbox.ask({"do": "decode", "ids": [1, 2], "limit": 100}, characters=100)
        print(answer["text"])
    """

    def __init__(
        self,
        load: Callable[[], bytes] | None = None,
        *,
        tokens: tuple[str, ...] = (),
        stops: tuple[int, ...] = (),
    ) -> None:
        self._load = load
        self._tokens, self._stops = tokens, stops
        self._budget_s = BUDGET_S
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._streams = itertools.count()

    def start(self) -> Mapping[str, Any]:
        """Start the child and load the tokenizer, if there is one.

        Returns:
            The child's answer, which has an `error` if the tokenizer cannot be read. It is empty without a
            tokenizer.

        Raises:
            SandboxError: a limit is broken, or the child ended.
        """
        with self._lock:
            return self._start()

    def ask(self, request: Mapping[str, object], *, characters: int, data: bytes = b"") -> Mapping[str, Any]:
        """Send a request and return its answer, which has an `error` if the child refuses the request.

        Args:
            characters: the number of characters to process. The timeout grows with this number.
            data: bytes that follow the request. The request states their size.

        Raises:
            SandboxError: a limit is broken, or the child ended.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            # Honest work takes time in proportion to its text, so the budget grows with the text.
            work_s = characters / CHARACTERS_A_SECOND
            self._budget_s = min(BUDGET_S, self._budget_s + EARNED_A_CALL_S) + work_s
            return self._exchange(json.dumps(request).encode() + b"\n" + data, CALL_S + work_s)

    def new_stream(self) -> int:
        """Return a number for a new stream of decoded text."""
        return next(self._streams)

    def close(self) -> None:
        """End the child."""
        self._end()
        self._child = None

    def _start(self) -> Mapping[str, Any]:
        self.close()
        child = subprocess.Popen(
            # `-P`: the current folder must not provide modules to the child.
            [sys.executable, "-P", "-m", "permille.sandbox.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to the parent only, which ends the child itself
        )
        self._child = child
        # End the child even if the caller forgets `close`.
        self._end = weakref.finalize(self, _end, child)
        for pipe in (child.stdin, child.stdout):
            # A child that neither reads nor writes must not block the parent beyond its timeout.
            os.set_blocking(_number(pipe), False)
        if self._load is None:
            return {}
        data = self._load()
        request = {"do": "load", "size": len(data), "tokens": self._tokens, "stops": self._stops}
        return self._exchange(json.dumps(request).encode() + b"\n" + data, START_S)

    def _exchange(self, data: bytes, call_s: float) -> Mapping[str, Any]:
        child = self._child
        if child is None:
            raise SandboxError("The child process has stopped.")
        limit_s = min(call_s, max(0.0, self._budget_s))
        began = time.monotonic()
        try:
            answer: Mapping[str, Any] = json.loads(
                _converse(_number(child.stdin), _number(child.stdout), data, limit_s)
            )
        except (TimeoutError, EOFError, ValueError) as exc:
            self.close()
            # The smaller limit is the one that was broken.
            why = "for all texts together" if limit_s < call_s else "for one text"
            raise SandboxError(f"The tokenizer or template broke its limits {why}: {exc}") from exc
        except BaseException:  # such as Ctrl-C: the next call must not read the answer of this one
            self.close()
            raise
        finally:
            self._budget_s -= time.monotonic() - began
        return answer


def _converse(to: int, back: int, data: bytes, limit_s: float) -> bytes:
    """Write `data` and read one line, both without blocking.

    Raises:
        TimeoutError: it takes longer than `limit_s`.
        EOFError: the child ended.
        ValueError: the line is too long.
    """
    ends = time.monotonic() + limit_s
    rest, answer = memoryview(data), bytearray()
    poll = select.poll()
    poll.register(back, select.POLLIN)
    poll.register(to, select.POLLOUT)
    while not answer.endswith(b"\n"):
        left_s = ends - time.monotonic()
        if left_s <= 0 or not (ready := poll.poll(left_s * 1000)):
            raise TimeoutError(f"it took more than {limit_s:.1f} s")
        for number, _ in ready:
            try:
                if number == to:
                    rest = rest[os.write(to, rest[: 1 << 16]) :]
                    if not rest:
                        poll.unregister(to)
                    continue
                piece = os.read(back, 1 << 20)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise EOFError("its process ended") from exc
            if not piece:
                raise EOFError("its process ended")
            answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(answer)


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    child.wait()


def _number(pipe: Any) -> int:
    return int(pipe.fileno())
