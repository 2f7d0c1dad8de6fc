"""One module a kind of job: load, call the library, save. Builds have none: see `permille.store.builds`."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from permille.store.tables import JobKind
from permille_workers.context import Task


class Tasks(Mapping[str, Task]):
    """Tasks by kind, imported on access: a replay does not wait for what a mask needs."""

    _kinds = (
        JobKind.MASK,
        JobKind.QUANTIZATION,
        JobKind.PACKAGE,
        JobKind.REPLAY,
    )

    def __getitem__(self, kind: str) -> Task:
        if kind not in self._kinds:
            raise KeyError(kind)
        task: Task = import_module(f"permille_workers.tasks.{kind}").run
        return task

    def __iter__(self) -> Iterator[str]:
        return iter(kind.value for kind in self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


TASKS: Mapping[str, Task] = Tasks()
