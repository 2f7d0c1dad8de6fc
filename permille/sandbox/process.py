"""The parent's side of `child.py`: one child a package, limits of time for a call and for all calls.

A call may take some seconds, and more for a long text. All calls together may take a minute, and more for
much text: so a template that needs five seconds a conversation ends a run after a minute, not after a night.
What breaks a limit ends the child; the next call begins another one.
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

START_S = 60.0  # Python and a vocabulary are loaded first, on a machine that may be busy
CALL_S = 5.0
BUDGET_S = 60.0
EARNED_A_CALL_S = 0.01
# A tenth of what tokenizers and templates do on a small machine.
CHARACTERS_A_SECOND = 50_000
MAX_ANSWER_BYTES = 256 << 20
# No tokenizer makes more of a character.
MAX_TOKENS_A_CHARACTER = 80


class SandboxError(PermilleError):
    """The child broke a limit, or ended."""


class Sandbox:
    """The child of one package; it starts at the first call and ends with `close`, or with this object.

    Args:
        load: the bytes of `tokenizer.json`; None where only templates are rendered.
        tokens: whose ids are wanted.
    """

    def __init__(self, load: Callable[[], bytes] | None = None, *, tokens: tuple[str, ...] = ()) -> None:
        self._load = load
        self._tokens = tokens
        self._budget_s = BUDGET_S
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._streams = itertools.count()

    def start(self) -> Mapping[str, Any]:
        """Begin the child and load the tokenizer; what it says of it, its `error` where it cannot be read.

        Raises:
            SandboxError: a limit is broken.
        """
        with self._lock:
            return self._start()

    def ask(self, request: Mapping[str, object], *, characters: int, data: bytes = b"") -> Mapping[str, Any]:
        """The answer to a request about so many characters; its `error` where the child refuses.

        Args:
            data: bytes that follow the request, whose size it names.

        Raises:
            SandboxError: a limit is broken.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            work_s = characters / CHARACTERS_A_SECOND
            self._budget_s = min(BUDGET_S, self._budget_s + EARNED_A_CALL_S) + work_s
            return self._exchange(json.dumps(request).encode() + b"\n" + data, CALL_S + work_s)

    def new_stream(self) -> int:
        """A number for a stream of decoded text."""
        return next(self._streams)

    def close(self) -> None:
        """End the child."""
        self._end()
        self._child = None

    def _start(self) -> Mapping[str, Any]:
        self.close()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "permille.sandbox.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the command: it ends the child where it has to
        )
        self._child = child
        self._end = weakref.finalize(self, _end, child)
        for pipe in (child.stdin, child.stdout):
            os.set_blocking(_number(pipe), False)
        if self._load is None:
            return {}
        data = self._load()
        request = {"do": "load", "size": len(data), "tokens": self._tokens}
        return self._exchange(json.dumps(request).encode() + b"\n" + data, START_S)

    def _exchange(self, data: bytes, call_s: float) -> Mapping[str, Any]:
        child = self._child
        if child is None:
            raise SandboxError("The child has stopped.")
        limit_s = min(call_s, max(0.0, self._budget_s))
        began = time.monotonic()
        try:
            answer: Mapping[str, Any] = json.loads(
                _converse(_number(child.stdin), _number(child.stdout), data, limit_s)
            )
        except (TimeoutError, EOFError, ValueError) as exc:
            self.close()
            why = "of all texts together" if limit_s < call_s else "of one text"
            raise SandboxError(f"The tokenizer or template broke its limits {why}: {exc}") from exc
        finally:
            self._budget_s -= time.monotonic() - began
        return answer


def _converse(to: int, back: int, data: bytes, limit_s: float) -> bytes:
    """Write `data` and read one line.

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
