"""Python processes that are forked from one that has imported everything.

A start of Python that imports the service or torch takes one to three seconds, a fork some milliseconds. Each
process of tests starts one server, which imports all programs before any thread exists, and another one that
also imports torch if a test runs real jobs. For each request, a server forks twice and ends the process
between. So the new process becomes a child of the process that asked for it: `wait`, signals, sessions and
the parent-death signal work as always. The new process runs `python -m MODULE`. It starts programs of its own
in the same way, from a server of its own.

`Process` starts a real Python instead for all modules that `SERVED` does not name, and if a variable has
another value that Python or a library reads only at its start. `real="yes"` of `running_service` starts the
real commands.
"""

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast

from permille.extensions import extensions

ROOT = Path(__file__).parents[1]
SERVED = (
    "permille_service",
    "permille_workers",
    "permille_agent.__main__",
    "permille_agent.daemon.training_child",
    "permille_agent.link.install",
    "permille_rounds.keeper",
    "permille.sandbox.conversion",
    "permille.sandbox.heads",
    "tests.",
)
"""Beginnings of the names of the modules that are run in forked processes."""
LEAVES = (
    "permille_service.__main__",
    "permille_workers.runtime.child",
    "permille_agent.link.install",
    "permille.sandbox.heads",
    "permille.sandbox.conversion",
)
"""Programs that start none of these."""
PROGRAMS = ("permille_agent", "permille_service", "permille_workers")
KEEPER = "permille_rounds.keeper"
NOT_IMPORTED = (".__main__", ".migrations.env", "._kernels")  # programs, and a library of C
READ_AT_START = ("LANG", "LC_", "LD_", "HF_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS")
"""Beginnings of the names of variables that Python or a library reads only when it starts."""
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
REPEATED = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Exceptions, which a forked process takes over."""
SPARE = b"spare"
"""The name of servers in /proc, by which `children` excludes them."""
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
AT_START = dict(os.environ)
"""The environment of servers when they start."""
_path: list[str] = []
"""The server's import path without its own folder."""
_SERVER = "from tests.preloaded import main; main()"
_NUMBER = struct.Struct("<i")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A process to make. Its three standard files travel beside it."""

    module: str
    arguments: tuple[str, ...]
    safe_path: bool
    environment: Mapping[str, str]
    folder: str
    new_session: bool
    prepare: Callable[[], object] | None


class Process(subprocess.Popen[Any]):
    """A `subprocess.Popen` that asks the server for its process, if the server can make it."""

    _servers: ClassVar[dict[bool, socket.socket]] = {}
    """Connections to the server with torch (True) and without."""
    _started: ClassVar[list["subprocess.Popen[bytes]"]] = []
    _own_server: ClassVar[int] = 0
    """The server of a forked process. It has imported what the process has imported."""
    _lock = threading.Lock()

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *others: Any
    ) -> None:
        cwd, env, files, new_session = others[0], others[1], others[5:11], others[16]
        order = _order(args, cwd, env, prepare=preexec_fn, new_session=new_session)
        if order is None or pass_fds or any(one is not None for one in others[12:15]):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *others)  # type: ignore[misc]
            return
        passed = [
            number if file == -1 else file for number, file in enumerate((files[0], files[3], files[5]))
        ]
        with self._lock:
            self.pid = _ask(self._server(torch=_runs_jobs(order)), order, passed)
        self._child_created = True
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]

    @classmethod
    def _server(cls, *, torch: bool) -> socket.socket:
        """Return the connection to a server. Start the server, if it does not run."""
        if torch not in cls._servers:
            cls._servers[torch], theirs = socket.socketpair()
            _become_reaper()
            with theirs:
                started = subprocess.Popen(
                    [sys.executable, "-c", _SERVER, str(theirs.fileno()), *["torch"] * torch],
                    cwd=ROOT,
                    env={**AT_START, **QUIET},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            cls._started.append(started)
        return cls._servers[torch]


def _forked() -> SimpleNamespace:
    """Return what `subprocess` has, with `Process` in the place of `Popen`."""
    names = {**vars(subprocess), "Popen": Process}
    run = FunctionType(subprocess.run.__code__, names)
    run.__kwdefaults__ = subprocess.run.__kwdefaults__
    return SimpleNamespace(**names | {"run": run})


FORKED = _forked()
"""The module `subprocess` for a module whose programs are to be forked."""


def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command like `subprocess.run` with `text` and `capture_output`."""
    done: subprocess.CompletedProcess[str] = FORKED.run(command, capture_output=True, text=True, **options)
    return done


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, the first one first, without its server."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if Path(f"/proc/{child}/comm").read_bytes() != SPARE + b"\n"]


def _order(args: Any, cwd: Any, env: Any, *, prepare: Any, new_session: bool) -> _Order | None:
    """Return the order for a command, or None if it needs a real start."""
    words, environment = list(map(str, args)), dict(os.environ if env is None else env)
    options = words[1 : words.index("-m")] if "-m" in words else ["-c"]
    if words[0] != sys.executable or options not in ([], ["-P"]):
        return None
    module, *arguments = words[len(options) + 2 :]
    if not _program(module).startswith(SERVED) or _differs_at_start(environment):
        return None
    return _Order(
        module=module,
        arguments=tuple(arguments),
        safe_path=bool(options),
        environment=environment,
        folder=str(cwd or Path.cwd()),
        new_session=new_session,
        prepare=prepare,
    )


def _program(module: str) -> str:
    return f"{module}.__main__" if module in (*PROGRAMS, KEEPER) else module


def _runs_jobs(order: _Order) -> bool:
    """Return True for a program that imports torch, or starts children for real jobs, which do so."""
    if order.module == "permille_service.cli.main":
        return order.arguments[:1] in (("up",), ("personalise",)) and "--no-worker" not in order.arguments
    return order.module in ("permille_workers", "permille.sandbox.conversion")


def _differs_at_start(environment: Mapping[str, str]) -> bool:
    """Return True if a variable that is read only at a start has another value than in the server."""
    server = {**AT_START, **QUIET}
    return any(
        name.startswith(READ_AT_START) and name not in REPEATED and server.get(name) != value
        for name, value in environment.items()
    )


def _ask(server: socket.socket, order: _Order, files: list[int]) -> int:
    data = pickle.dumps(order)
    socket.send_fds(server, [_NUMBER.pack(len(data))], files)
    server.sendall(data)
    answer = server.recv(_NUMBER.size)
    if not answer:
        raise RuntimeError("The server of preloaded processes has ended. See its messages above.")
    pid: int = _NUMBER.unpack(answer)[0]
    return pid


def _serve(channel: socket.socket) -> _Order:
    """Make processes until the other end closes. Return only in a new process."""
    _prctl(_PR_SET_NAME, SPARE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the programs
    while True:
        size, files, _, _ = socket.recv_fds(channel, _NUMBER.size, 3)
        if not size:
            os._exit(0)
        order: _Order = pickle.loads(channel.recv(_NUMBER.unpack(size)[0], socket.MSG_WAITALL))
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            # The process between has ended, so this process is a child of the one that asked.
            _prctl(_PR_SET_NAME, b"python")
            os.write(tell, _NUMBER.pack(os.getpid()))
            channel.detach()
            return _become(order, files)
        os.waitpid(between, 0)
        os.close(tell)
        channel.sendall(os.read(told, _NUMBER.size))
        for number in (told, *files):
            os.close(number)


def _become(order: _Order, files: list[int]) -> _Order:
    """Take over the files, environment and folder of the order, and start a server for its programs."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if order.new_session:
        os.setsid()
    os.chdir(order.folder)
    added = order.environment.get("PYTHONPATH", "").removesuffix(AT_START.get("PYTHONPATH", ""))
    folders = [folder for folder in added.split(os.pathsep) if folder]
    sys.path[:] = [*([] if order.safe_path else [order.folder]), *folders, *_path]
    os.environ.clear()
    os.environ.update(order.environment)
    cast("TextIOWrapper", sys.stdout).reconfigure(
        line_buffering=os.isatty(1), write_through=bool(os.environ.get("PYTHONUNBUFFERED"))
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for folder in folders:
        if (hooks := Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(hooks))
    if order.prepare is not None:
        order.prepare()
    if not _program(order.module).startswith(LEAVES) and order.arguments[:1] != ("child",):
        ours, theirs = socket.socketpair()
        _become_reaper()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for number in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            return _serve(theirs)
        theirs.close()
        Process._servers.update({True: ours, False: ours})
        Process._own_server, Process._lock = pid, threading.Lock()
        subprocess.Popen = Process  # type: ignore[misc]
    return order


def _run(order: _Order) -> NoReturn:
    """Run the program and end as Python would end, but without an orderly end of hundreds of modules."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # the module is imported
    sys.argv[1:] = order.arguments
    code, interrupted = 0, False
    try:
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except BaseException as exc:  # noqa: BLE001
        code, interrupted = 1, isinstance(exc, KeyboardInterrupt)
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    if Process._own_server:
        Process._servers[True].close()
        os.waitpid(Process._own_server, 0)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _become_reaper() -> None:
    """Let orphans below this process become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _import(names: Iterable[str], *, without: str) -> None:
    """Import packages with all of their modules, except those whose names begin with `without`."""
    for name in names:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith(NOT_IMPORTED) and not module.name.startswith(without):
                with suppress(ImportError):  # it needs an extra that is not installed
                    importlib.import_module(module.name)


def main() -> None:
    """Import everything, and serve the process that holds the other end of the socket."""
    _import(PROGRAMS, without="permille_workers.tasks")
    for program in ("service", "workers", "agent"):
        extensions(program, object)
    if "torch" in sys.argv:
        _import(("permille", "permille_workers.tasks"), without="permille.engines.executorch")
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("An import has started a thread. A process with threads must not fork.")
    gc.collect()
    gc.freeze()
    _path[:] = sys.path[1:]
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
