"""One module a kind of job: load, call the library, save. Builds have none: see `permille.store.builds`."""

from workers.context import Task

TASKS: dict[str, Task] = {}
