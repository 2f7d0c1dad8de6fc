"""API, worker and children of `make chaos`: the product's own, with faults at named steps.

    python -m tests.chaos.processes api|worker|warm SOCKET

To cause a fault, put a file into the folder `$CHAOS_TOKENS/<name of the step>`. The first process that
reaches the step deletes the file. Then it kills itself by SIGKILL, or its store fails. The last attempt of a
job is spared, because a job whose process ends three times is dead by design.

Children are forked from a process that has imported everything (`warm`), because a thousand starts of Python
would take longer than the jobs. `launch.py` represents the child to its supervisor, and lives and dies with
it. A worker with CHAOS_COLD starts the product's own children, which have no named steps.
"""

import errno
import io
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from permille.package.blobs import BlobFolder, BlobWriter
from permille.sandbox.confinement import die_with_parent
from permille.store.jobs import claims, queue
from permille.store.jobs.claims import Claim

LAUNCH = Path(__file__).with_name("launch.py")
Step = tuple[Any, str, bool]
"""An object, the name of its function, and True if the kill comes after the call."""
_IN_CHILD: dict[str, Step] = {
    "child-reports-progress": (claims, "report_progress", True),
    "child-has-published": (claims, "complete", True),
    "child-has-split": (claims, "split", True),
    "child-fails": (claims, "fail", False),
    "child-installs-a-blob": (BlobWriter, "commit", False),
    "child-has-a-blob": (BlobWriter, "commit", True),
}
_IN_WORKER: dict[str, Step] = {
    "worker-has-claimed": (claims, "claim", True),
    "worker-has-renewed": (claims, "renew", True),
    "worker-has-noted-messages": (claims, "take_undispatched", True),
    "worker-sweeps-a-lease": (claims, "_sweep_one", False),
}
_IN_API: dict[str, Step] = {
    "api-has-a-job": (queue, "submit", True),
    "api-has-a-blob": (BlobWriter, "commit", True),
}
CHILD_STEPS = (*_IN_CHILD, "child-begins", "child-ends", "child-commits")
WORKER_STEPS = (*_IN_WORKER, "worker-starts-a-child", "worker-has-handed-over", "worker-records-an-exit")
API_STEPS = (*_IN_API, "api-tells-workers", "api-keeps-a-log", "api-keeps-a-contribution")
HARMED = "app/harmed"
"""User-Agent part of clients that the bucket's faults affect. Last attempts and CHAOS_COLD do not send it."""
HARMED_AGENT = {"AWS_SDK_UA_APP_ID": "harmed"}
STORE_FAULTS = ("write-enospc", "write-eio", "commit-eio", "read-eio", "read-cut")

_held: Claim | None = None


def reached(step: str) -> bool:
    """Return True if a fault waits at this step, and remove it."""
    if _held is not None and _held.attempt >= _held.max_attempts:
        return False
    with suppress(FileNotFoundError):
        for token in (Path(os.environ["CHAOS_TOKENS"]) / step).iterdir():
            with suppress(FileNotFoundError):
                token.unlink()
                return True
    return False


def kill_at(step: str) -> None:
    """Kill this process if a fault waits at this step."""
    if reached(step):
        os.kill(os.getpid(), signal.SIGKILL)


def arm(steps: dict[str, Step]) -> None:
    """Let functions kill the process before or after their work."""
    for step, (place, name, after) in steps.items():
        setattr(place, name, _armed(getattr(place, name), step, after))


def _armed(real: Callable[..., Any], step: str, after: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if not after:
            kill_at(step)
        answer = real(*arguments, **options)
        if after:
            kill_at(step)
        return answer

    return call


def spoil_store() -> None:
    """Let writes of blobs fail, and reads fail or return half of a blob."""
    write, commit, opened = BlobWriter.write, BlobWriter.commit, BlobFolder.open

    def failing_write(self: BlobWriter, data: Any) -> int:
        for name, number in (("write-enospc", errno.ENOSPC), ("write-eio", errno.EIO)):
            if reached(name):
                raise OSError(number, os.strerror(number))
        return write(self, data)

    def failing_commit(self: BlobWriter, expected: str | None = None) -> str:
        if reached("commit-eio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return commit(self, expected)

    def failing_open(self: BlobFolder, digest: str) -> BinaryIO:
        if reached("read-eio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file = opened(self, digest)
        if not reached("read-cut"):
            return file
        with file:
            data = file.read()
        return io.BytesIO(data[: len(data) // 2])

    for name, failing in (("write", failing_write), ("commit", failing_commit)):
        setattr(BlobWriter, name, failing)
    BlobFolder.open = failing_open  # type: ignore[method-assign]


def api() -> int:
    """Run the API."""
    from permille_rounds.service import device_routes
    from permille_service import __main__ as api_process
    from permille_service import creation
    from permille_service.runs import routes

    arm({**_IN_API, "api-tells-workers": (creation, "dispatch", False)})
    arm({"api-keeps-a-log": (routes, "_attach", False)})
    arm({"api-keeps-a-contribution": (device_routes, "dispatch", False)})
    spoil_store()
    return api_process.main()


def worker() -> int:
    """Run a worker. CHAOS_SKEW_S sets its clock wrong."""
    skew_s = float(os.environ.get("CHAOS_SKEW_S", "0"))
    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: now() + skew_s, lambda: now_ns() + int(skew_s * 1e9)
    from permille_workers.__main__ import run_worker
    from permille_workers.runtime.settings import WorkerSettings
    from permille_workers.runtime.supervisor import CHILD_COMMAND, Supervisor

    def running(self: Supervisor, claim: Claim) -> None:
        global _held
        _held = claim
        kill_at("worker-starts-a-child")
        run(self, claim)
        _held = None

    run = Supervisor.run
    Supervisor.run = running  # type: ignore[method-assign]
    hand_over = "worker-has-handed-over"
    arm({**_IN_WORKER, hand_over: (Supervisor, "_hand_over", True)})
    arm({"worker-records-an-exit": (Supervisor, "_record_exit", False)})
    warm = (sys.executable, "-I", "-S", str(LAUNCH), os.environ["CHAOS_WARM"])
    cold = bool(os.environ.get("CHAOS_COLD"))
    run_worker(WorkerSettings.model_validate({}), child_command=CHILD_COMMAND if cold else warm)
    return 0


def child(pipe: BinaryIO) -> None:
    """Run one attempt like the product's own child."""
    from permille_workers.runtime import child as child_process
    from permille_workers.tasks import TASKS

    attempt = child_process.attempt

    def attempted(tasks: Any, db: Any, claim: Claim, settings: Any) -> None:
        global _held
        _held = claim
        if claim.attempt < claim.max_attempts:
            os.environ.update(HARMED_AGENT)
        kill_at("child-begins")
        attempt(tasks, db, claim, settings)
        kill_at("child-ends")

    child_process.attempt = attempted
    arm({**_IN_CHILD, "child-commits": (child_process, "publish_result", False)})
    spoil_store()
    child_process.run_child(TASKS, pipe)


class Warm:
    """A server that forks children for launchers. It reports exit codes and kills children without a
    launcher.
    """

    def __init__(self, path: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(16)
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select(0.02):
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    os.kill(key.data, signal.SIGKILL)
                    self._forget(key.data)
            self._reap()

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        with suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
            if len(descriptors) != 2:
                connection.close()
                return
            pid = os.fork()
            if pid == 0:
                self._become_child(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            self._children[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ, pid)

    def _become_child(self, descriptors: list[int]) -> None:
        code = 1
        try:
            self._listening.close()
            for connection in self._children.values():
                connection.close()
            os.dup2(descriptors[0], 0)
            os.dup2(descriptors[1], 2)
            for descriptor in descriptors:
                os.close(descriptor)
            child(os.fdopen(0, "rb", closefd=False))
            code = 0
        except BaseException:  # noqa: BLE001 - as an interpreter ends
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                with suppress(OSError):
                    self._children[pid].sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))
                self._forget(pid, reaped=True)

    def _forget(self, pid: int, *, reaped: bool = False) -> None:
        if not reaped:
            os.waitpid(pid, 0)
        connection = self._children.pop(pid)
        self._selector.unregister(connection)
        connection.close()


def warm(path: str) -> int:
    """Import all that tasks need, and wait for launchers."""
    import importlib

    from permille_workers import tasks

    for module in tasks._MODULES.values():
        importlib.import_module(module)
    importlib.import_module("permille.pipeline.score")
    for name in (
        "permille.sensitivity.fisher",
        "permille.quantization.perplexity",
        "permille.engines.executorch.exporting",
        "executorch.exir",
        "executorch.backends.xnnpack.partition.xnnpack_partitioner",
    ):
        with suppress(ImportError):
            importlib.import_module(name)
    Warm(path).serve()
    return 0


def main() -> int:
    """Run one of the processes. It ends when the process that started it ends."""
    die_with_parent()
    if sys.argv[1] == "warm":
        return warm(sys.argv[2])
    return api() if sys.argv[1] == "api" else worker()


if __name__ == "__main__":
    sys.exit(main())
