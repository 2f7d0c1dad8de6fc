"""`list` and `show` of every group of commands ask for that group's own collection."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from permille_service.cli import collections, fleet, inputs, main, work

MODULES = (collections, fleet, inputs, work)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that commands get; nothing is sent."""
    paths: list[str] = []

    def get(path: str, **_: Any) -> dict[str, Any]:
        paths.append(path)
        return {}

    def pages(path: str, **_: Any) -> list[Any]:
        paths.append(path)
        return []

    @contextmanager
    def connect(context: typer.Context, *, as_json: bool) -> Iterator[Any]:
        yield SimpleNamespace(
            client=SimpleNamespace(get=get, pages=pages), output=SimpleNamespace(show=lambda *_: None)
        )

    for module in MODULES:
        monkeypatch.setattr(module, "connect", connect)
    return paths


def groups_with(command: str) -> list[str]:
    groups: dict[str, Any] = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    return [name for name, group in groups.items() if command in getattr(group, "commands", {})]


@pytest.mark.parametrize("group", groups_with("list"))
def test_list_asks_for_the_collection(asked: list[str], group: str) -> None:
    assert main.main([group, "list"]) == 0
    assert asked == [f"/v1/{group}"]


@pytest.mark.parametrize("group", groups_with("show"))
def test_show_asks_for_one_of_the_collection(asked: list[str], group: str) -> None:
    assert main.main([group, "show", "some-id"]) == 0
    assert asked == [f"/v1/{group}/some-id"]
