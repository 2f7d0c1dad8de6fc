"""Tests of commands without a service: requests, interpretation of arguments, and output."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from permille.exits import CommandError, Exit
from permille.schemas.fields import NAME_PATTERN, PATH_PATTERN
from permille.schemas.inputs import COMMIT_PATTERN
from permille.schemas.jobs import JobKind
from permille.schemas.kinds import WORK
from permille.schemas.packages import BuildCreate
from permille_service.cli import client as client_module
from permille_service.cli import commands, main, work
from permille_service.cli.client import FLAGS, Client, in_words
from permille_service.cli.commands import parameters_of
from permille_service.cli.output import Follower, Output, watch
from permille_service.cli.references import resolve
from permille_service.cli.session import Session
from permille_service.cli.tables import fields_of, table_of
from permille_service.forms import flag_of, form_of

TEXT = "[a-z0-9]{1,63} [bold]not bold[/bold] [/]"
NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
ULIDS = ("01jd3kq8z7m4n5p6r7s8t9v0wx", "01jd3kq8z7m5n5p6r7s8t9v0wx", "01jd3kq8zzm4n5p6r7s8t9v0wx")
MODELS = [{"id": f"model_{ulid}", "name": name} for ulid, name in zip(ULIDS, "abc", strict=True)]


class Collections(Client):
    """A client with fixed collections. It records the requested paths."""

    url = "https://models.example.org"

    def __init__(self, **rows: list[dict[str, Any]]) -> None:
        self.rows, self.asked, self.output = rows, list[str](), output()

    def pages(self, path: str, *, limit: int | None = None, **_: str | int | None) -> list[Any]:
        self.asked.append(path)
        return self.rows.get(path.rpartition("/")[2], [])

    def post(self, path: str, body: Any = None, *, key: str | None = None, timeout_s: float = 30.0) -> Any:
        return {"invitation": "code"}

    def get(self, path: str, **_: str | int | None) -> Any:
        self.asked.append(path)
        return {}


def output() -> Output:
    return Output(
        as_json=False, console=Console(file=io.StringIO(), width=80), errors=Console(file=io.StringIO())
    )


def printed(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Collections:
    """Connect commands to a client that sends nothing."""
    made = Collections()

    @contextmanager
    def connect(context: typer.Context, *, as_json: bool) -> Iterator[Session]:
        yield Session(client=made, output=made.output, ca_file=None)

    monkeypatch.setattr(commands, "connect", connect)
    return made


def groups_with(name: str) -> list[str]:
    groups: dict[str, Any] = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    return [group for group, found in groups.items() if name in getattr(found, "commands", {})]


@pytest.mark.parametrize("group", groups_with("list"))
def test_list_asks_for_the_collection(client: Collections, group: str) -> None:
    assert main.main([group, "list"]) == 0
    assert client.asked == [f"/v1/{group}"]


# There is only one trust and one retention rule. A release is shown with the version before it.
@pytest.mark.parametrize("group", sorted({*groups_with("show")} - {"trust", "retention", "releases"}))
def test_show_asks_for_one_of_the_collection(client: Collections, group: str) -> None:
    whole = MODELS[0]["id"]
    assert main.main([group, "show", whole]) == 0
    assert client.asked == [f"/v1/{group}/{whole}"]


def test_a_record_is_known_by_its_id_its_name_or_its_beginning() -> None:
    client = Collections(models=MODELS, packages=[{"digest": "sha256:" + "ab" * 32}])
    for text, found in (("b", 1), (MODELS[1]["id"], 1), ("model_01jd3kq8zz", 2), (MODELS[0]["id"][:18], 0)):
        assert resolve(client, "models", text) == MODELS[found]["id"]
    assert (
        resolve(client, "packages", "abab")
        == resolve(client, "packages", "sha256:ab")
        == "sha256:" + "ab" * 32
    )
    made = {"id": f"sparse_{ULIDS[0]}", "request": {"name": "half"}}
    assert resolve(Collections(sparsifications=[made]), "sparsifications", "half") == made["id"]
    both = f"can mean {MODELS[0]['id']}, {MODELS[1]['id']}\\. Give"
    with pytest.raises(CommandError, match=both) as ambiguous:
        resolve(client, "models", "model_01jd3kq8z7")
    assert ambiguous.value.code is Exit.USAGE
    assert resolve(client, "packages", "sha256:a") == "sha256:" + "ab" * 32
    for text in ("", "sha256:"):
        with pytest.raises(
            CommandError, match=r"names no model\. Give its name, its id, or the first characters of the id"
        ):
            resolve(client, "models", text)
    with pytest.raises(CommandError, match=r"There is no corpus 'x'\. See `permille corpora list`") as absent:
        resolve(client, "corpora", "x")
    assert absent.value.code is Exit.NOT_FOUND


def given(kind: JobKind, **options: object) -> tuple[Session, dict[str, object]]:
    """Return a session, and options of a command as typer passes them."""
    absent = dict.fromkeys(option.parameter for option in form_of(WORK[kind].request).options)
    assert options.keys() <= absent.keys()
    client = Collections(models=MODELS, corpora=[{"id": f"corpus_{ULIDS[0]}", "name": "stories"}])
    return Session(client=client, output=output(), ca_file=None), {**absent, **options}


def body(kind: JobKind, **options: object) -> Mapping[str, Any]:
    session, values = given(kind, **options)
    return form_of(WORK[kind].request).body(values, session.id_of)


def test_a_form_makes_the_request_with_ids_for_names_and_no_defaults_of_its_own() -> None:
    made = body(JobKind.BUILD, model_id="b", mask_corpus_id="stories", mask_density=0.01)
    assert made["model_id"] == MODELS[1]["id"]
    assert made["mask"] == {"corpus_id": f"corpus_{ULIDS[0]}", "density": 0.01, "method": "fisher"}
    assert made["quantization"] == {"scheme": "nf4", "embeddings": "q8_0"}
    made = body(JobKind.BUILD, model_id="b", adapter_kind="lora-fa", adapter_rank=16)
    assert made == {
        "model_id": MODELS[1]["id"],
        "adapter": {"kind": "lora-fa", "rank": 16},
        "quantization": {"scheme": "nf4", "embeddings": "q8_0"},
    }
    both = body(JobKind.BUILD, model_id="b", adapter_kind="lora", mask_density=0.01)
    with pytest.raises(
        ValidationError, match=r"either a mask or an adapter: density, .* do not go with an adapter"
    ):
        BuildCreate.model_validate(both)
    calibrated = body(
        JobKind.QUANTIZATION,
        model_id="a",
        options_scheme="auto-round",
        options_calibration_corpus_id="stories",
    )
    assert calibrated["options"] == {
        "scheme": "auto-round",
        "embeddings": "q8_0",
        "calibration_corpus_id": f"corpus_{ULIDS[0]}",
    }


def test_options_are_named_after_fields_and_required_where_every_form_is() -> None:
    options = {option.flag: option for option in form_of(WORK[JobKind.BUILD].request).options}
    assert [flag for flag, option in options.items() if option.required] == ["--model"]
    assert options["--method"].choices == ("fisher", "magnitude", "random")
    assert options["--method"].default == "fisher"
    assert (options["--group-size"].value_type, options["--group-size"].default) == (int, None)
    assert options["--density"].default == 0.001
    assert {"--corpus", "--evaluate-on", "--calibrate-on"} <= options.keys()
    asked = {work.collection: form_of(work.request) for work in WORK.values()}
    every = {f"{name} {option.flag}": option for name, form in asked.items() for option in form.options}
    assert [name for name, option in every.items() if not option.help] == []
    for option in every.values():
        *above, field = option.place
        known = {flag for name, flag in FLAGS.items() if name.rpartition(".")[2] == field}
        assert option.flag in {*known, flag_of(field), flag_of(above[-1]) if field == "path" else None}, (
            option
        )
    told = {one.name: one.annotation.__metadata__[0].help for one in parameters_of(asked["builds"])}
    assert told["mask_seed"].endswith(" Default: 0.")


def test_help_of_eighty_columns_cuts_no_option_in_two() -> None:
    for name in (kind.collection for kind in WORK.values()):
        told = CliRunner().invoke(main.app, [name, "create", "--help"], env={"COLUMNS": "80"})
        assert told.exit_code == 0
        assert "--no-wait" in told.output
        assert "…" not in told.output


def test_tables_fit_eighty_columns_and_tell_apart_what_differs() -> None:
    rows = [
        {"id": row["id"], "digest": "sha256:" + "ab" * 32, "size_bytes": 12_345_678, "created_at": created}
        for row, created in zip(
            MODELS, ("2026-05-04T11:57:00Z", "2026-05-02T12:00:00Z", 1_777_896_010), strict=True
        )
    ]
    text = printed(table_of(rows, ("id", "digest", "size_bytes", "created_at", "log.state"), now=NOW))
    assert max(map(len, text.splitlines())) <= 80
    assert text.split("\n")[0].split() == ["id", "digest", "size", "created", "state"]
    cells = [line.split() for line in text.splitlines()[1:]]
    assert [line[0] for line in cells] == ["model_01jd3kq8z7m4", "model_01jd3kq8z7m5", "model_01jd3kq8zzm4"]
    assert cells[0][1:] == ["sha256:abababababab", "12.3", "MB", "3", "min", "ago", "-"]
    assert [" ".join(line[4:-1]) for line in cells] == ["3 min ago", "2 days ago", "in 10 s"]


def test_an_id_is_never_cut_in_two_where_a_sentence_can_give_way() -> None:
    row = {"id": MODELS[0]["id"], "kind": "quantization", "state": "succeeded", "message": "packing " * 20}
    text = printed(table_of([row], ("id", "kind", "state", "message")))
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[1].split()[:3] == ["model_01jd3kq8z7", "quantization", "succeeded"]


def test_a_record_has_its_own_id_in_full_and_a_line_for_each_value() -> None:
    record = {"id": MODELS[0]["id"], "mask_id": f"mask_{ULIDS[0]}", "options": {"density": 0.001}, "bad": {}}
    lines = [line.split() for line in printed(fields_of(record)).splitlines()]
    assert lines == [
        ["id", MODELS[0]["id"]],
        ["mask_id", "mask_01jd3kq8z7"],
        ["options.density", "0.001"],
        ["bad", "none"],
    ]


def test_a_table_in_a_record_has_a_column_for_each_value() -> None:
    shown = output()
    shown.show({"rounds": [{"rate": 0.5, "perplexity": {"before": 2.0, "after": 3.0}}]})
    lines = shown.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split() for line in lines if line.strip()][-2:] == [
        ["rate", "perplexity", "before", "perplexity", "after"],
        ["0.5", "2", "3"],
    ]


def test_a_rollback_passes_over_withdrawn_packages_and_says_so(
    client: Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = list[dict[str, Any]]()

    def post(_path: str, body: dict[str, Any], **_: object) -> dict[str, int]:
        posted.append(body)
        return {"version": 5}

    monkeypatch.setattr(client, "post", post)
    client.rows["releases"] = [
        {"version": n, "manifest_digest": digest, "yanked": n == 3, "aliases": ["stable"] if n == 4 else []}
        for n, digest in ((4, "new"), (3, "bad"), (2, "bad"), (1, "old"))
    ]
    assert main.main(["releases", "rollback", "tiny"]) == 0
    assert main.main(["releases", "rollback", "tiny", "--to", "2", "--yanked"]) == 0
    assert [body["package_digest"] for body in posted] == ["old", "bad"]
    assert ["yanked" in body for body in posted] == [False, True]
    said = " ".join(client.output.console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "Versions 3, 2 are passed over" in said


def test_a_release_is_shown_with_yanked_versions_that_devices_have(
    client: Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: dict[str, Any] = {"improvement": None, "peak_rss_bytes": None, "changes": [], "verdict": "unsure"}
    known = [{"name": "tiny", "version": n, "yanked": n == 2, **none} for n in (3, 2, 1)]
    compared = dict[str, Any]()

    def get(path: str, **_: str | int | None) -> Any:
        if path == "/v1/fleet":
            return {"versions": [*known, {"name": "other", "version": 7, **none}]}
        if path.endswith("/comparison") and not compared:
            raise CommandError("no version before", Exit.NOT_FOUND)
        return compared or {"version": int(path.rpartition("/")[2])}

    def shown() -> str:
        client.output.console.file = io.StringIO()
        assert main.main(["releases", "show", "tiny"]) == 0
        return client.output.console.file.getvalue()

    monkeypatch.setattr(client, "get", get)
    assert main.main(["releases", "show", "tiny"]) == Exit.NOT_FOUND
    client.rows["releases"] = [{"name": "tiny", "version": 3}]
    alone = shown()
    assert "Version 3 is not compared" in alone
    compared |= {"version": known[0], "against": known[2], "changes": [], "verdict": "unsure"}
    for text in (alone, shown()):
        rows = [line.split() for line in text.splitlines() if line.startswith(("tiny", "other"))]
        assert sorted((int(row[1]), row[3]) for row in rows) == [(1, "no"), (2, "yes"), (3, "no")]


@pytest.mark.parametrize("digests", ["ab", "aa", "aba"])
def test_a_package_that_is_published_again_is_told(
    client: Collections, monkeypatch: pytest.MonkeyPatch, digests: str
) -> None:
    rows = [{"name": "t", "version": n, "manifest_digest": one} for n, one in enumerate(digests, 1)]
    client.rows.update(releases=rows, packages=[{"digest": "sha256:1"}])
    monkeypatch.setattr(client, "post", lambda *_, **__: rows[-1])
    assert main.main(["releases", "publish", "t", "--package", "sha256:1"]) == 0
    said = " ".join(client.output.console.file.getvalue().split())  # type: ignore[attr-defined]
    assert (f"Version {len(rows)} has the same package as version 1." in said) == (digests != "ab")


def test_brackets_are_printed_in_rows_and_fields() -> None:
    assert TEXT in printed(table_of([{"name": TEXT}], ("name",)))
    assert TEXT in printed(fields_of({"name": TEXT}))


def test_an_error_is_one_line_with_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    message = (
        f"expected {TEXT}, got something else that makes this line longer than any terminal is wide: 123"
    )
    main._show_error(CommandError(message, Exit.REFUSED), as_json=False)
    assert capsys.readouterr().err == f"permille: {message}\n"


def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    for name in ("no.pem", "none.pem"):
        place = ("--url", "https://localhost", "--token", "x", "--ca-file", str(tmp_path / name))
        assert main.main([*place, "models", "list"]) == Exit.USAGE
        assert f"--ca-file {tmp_path / name} cannot be used: " in capsys.readouterr().err
    assert main.main(["trust", "key", str(tmp_path / "none" / "root.pem")]) == Exit.FAILED
    assert "The system refused a file: " in capsys.readouterr().err


def test_what_is_wrong_with_a_request_is_said_without_patterns() -> None:
    errors = [
        {"location": "body.name", "message": f"String should match pattern '{NAME_PATTERN}'"},
        {"location": "body.mask.fisher.corpus_id", "message": "Field required"},
        {"location": "body.mask.random.sequences", "message": "Extra inputs are not permitted"},
    ]
    text = in_words(errors)
    assert "[a-z" not in text
    assert text.startswith("--name must be 1 to 63 small letters, digits")
    assert text.endswith("--corpus is missing; --sequences does not go with the other options")
    assert (
        in_words([{"location": "body.adapter.kind", "message": "Field required"}]) == "--adapter is missing"
    )
    assert in_words([{"location": "body", "message": "Value error, expected one, got both"}]) == (
        "expected one, got both"
    )
    assert in_words([{"location": "body.source.streamed.dataset", "message": "Input should be 'c4'"}]) == (
        "--streamed: input should be 'c4'"
    )
    assert in_words([{"location": "body.rules", "message": "Value error, Waves must grow"}]) == (
        "--wave: waves must grow"
    )
    neither = {"location": "body", "message": "Value error, Give either a mask or an adapter"}
    assert in_words([neither]).endswith("--adapter, or for a mask --corpus (of `packages create`: --mask)")
    path = {"location": "body.source.folder.path", "message": f"String should match pattern '{PATH_PATTERN}'"}
    assert in_words([path]).startswith("--folder must be a path below the model root or the corpus root")
    commit = {
        "location": "body.source.hub.commit",
        "message": f"String should match pattern '{COMMIT_PATTERN}'",
    }
    assert in_words([commit]).startswith("--commit must be a commit of 40 hexadecimal digits")


def test_an_events_data_is_words() -> None:
    events = [
        {"seq": 1, "kind": "progress", "data": {"progress": 0.25, "message": "scoring", "eta_s": 90.0}},
        {"seq": 2, "kind": "state", "data": {"state": "succeeded"}},
    ]
    lines = [
        " ".join(line.split()) for line in printed(table_of(events, ("seq", "kind", "data"))).splitlines()
    ]
    assert lines[1:] == [
        "1 progress progress 25%, message scoring, eta s 2 min",
        "2 state state succeeded",
    ]


def test_an_invitation_needs_its_release_and_is_a_line_for_the_device(client: Collections) -> None:
    create = ["invitations", "create", "--release", "tiny"]
    assert main.main(create) == Exit.NOT_FOUND
    client.rows["releases"] = [{"aliases": ["canary"]}]
    assert main.main(create) == Exit.NOT_FOUND
    assert main.main([*create, "--alias", "canary"]) == 0
    said = client.output.console.file.getvalue()  # type: ignore[attr-defined]
    assert said.endswith("  permille-agent enroll https://models.example.org code\n")


def test_watching_a_build_ends_with_the_command_that_publishes_it() -> None:
    job = {"id": "job_1", "kind": "build", "state": "succeeded", "result_id": "sha256:577a9004"}
    client: Any = SimpleNamespace(events=lambda _job_id: iter(()), get=lambda _path: job)
    session: Any = SimpleNamespace(client=client, output=output(), id_of=lambda _group, name: name)
    work.watch_job(session, "job_1")
    assert "permille releases publish" in session.output.console.file.getvalue()


def test_ctrl_c_ends_the_waiting_and_says_that_the_job_runs_on() -> None:
    def interrupted(_job_id: str) -> Iterator[dict[str, Any]]:
        yield {"kind": "progress", "data": {"progress": 0.5, "eta_s": 90.0}}
        raise KeyboardInterrupt

    client: Any = SimpleNamespace(events=interrupted)
    with pytest.raises(
        CommandError, match=r"job j goes on\. Follow it with `permille jobs watch j`"
    ) as ended:
        watch(client, output(), "j")
    assert ended.value.code == 130


@pytest.mark.parametrize("message", ["mask m: Cannot reach the hub.", "worker w stopped renewing its lease"])
@pytest.mark.parametrize("parent", [None, "build"])
@pytest.mark.parametrize(("state", "retryable"), [("dead", True), ("failed", False)])
def test_a_job_that_may_succeed_later_is_told_with_its_retry(
    state: str, retryable: bool, parent: str | None, message: str
) -> None:
    error = {"message": message, "retryable": retryable}
    job = {"state": state, "error": error, "parent_id": parent}
    client: Any = SimpleNamespace(events=lambda _job_id: iter(()), get=lambda _path: job)
    with pytest.raises(CommandError) as ended:
        watch(client, output(), "j")
    told = f"job j {state}: {message}"
    if retryable:
        # The service refuses to retry a part.
        again = f"permille jobs retry {parent or 'j'}"
        told = f"{told.rstrip('.')}. To try again, keeping what is done: `{again}`."
    assert str(ended.value) == told


@pytest.mark.parametrize("group", ["builds", "masks"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--corpus", "c"), "on 100 sequences of up to 512 tokens. Fewer take less time: see --sequences."),
        (("--corpus", "c", "--length", "64"), "on 100 sequences of up to 64 tokens."),
        (("--corpus", "c", "--sequences", "4"), ""),
        (("--method", "random"), ""),
    ],
)
def test_sequences_that_were_not_chosen_are_told(
    client: Collections, monkeypatch: pytest.MonkeyPatch, group: str, options: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr(client, "post", lambda *_, **__: {"id": "job_1", "state": "queued"})
    client.rows.update(models=MODELS, corpora=[{"id": "corpus_1", "name": "c"}])
    assert main.main([group, "create", "--model", "a", *options, "--no-wait"]) == 0
    said = " ".join(client.output.console.file.getvalue().split())  # type: ignore[attr-defined]
    assert told in said and ("Gradients" in said) == bool(told)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("running", "It stops at its next step, usually within seconds.\nnext: permille jobs show job_1\n"),
        ("succeeded", "The job had ended before (succeeded), so it was not cancelled.\n"),
        ("cancelled", "cancelled\n"),
    ],
)
def test_a_cancel_tells_when_the_job_stops(
    client: Collections, monkeypatch: pytest.MonkeyPatch, state: str, told: str
) -> None:
    monkeypatch.setattr(client, "post", lambda path: {"id": path.split("/")[3], "state": state})
    client.rows["jobs"] = [{"id": "job_1"}]
    assert main.main(["jobs", "cancel", "job_1"]) == 0
    said = client.output.console.file.getvalue()  # type: ignore[attr-defined]
    assert said.endswith(told)


def test_a_pipe_gets_a_line_of_progress_twice_a_minute() -> None:
    times = iter([0.0, 10.0, 40.0, 50.0])
    lines = io.StringIO()
    piped = Output(as_json=False, console=Console(), errors=Console(file=lines))
    follower = Follower(piped, lambda: next(times))
    bar = Progress(disable=True)
    task = bar.add_task("")
    for done, eta_s in ((0.1, None), (0.2, None), (0.3, None), (0.9, 5.0)):
        data = {"progress": done, "message": "mask: fisher", "eta_s": eta_s}
        follower.follow({"kind": "progress", "data": data}, bar, task)
    assert lines.getvalue().splitlines() == [
        "mask: fisher: 10 % done",
        "mask: fisher: 30 % done, 2 min left",  # 20% in 40 s
    ]


def test_a_command_from_outside_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    entry = EntryPoint(
        name="lacking", value="tests.unit.service.test_commands:lacking", group="permille.commands"
    )
    app = typer.Typer()
    app.command()(main.plugin(entry))
    with pytest.raises(
        CommandError, match=r"`permille lacking` needs nowhere\. Run `pip install 'permille\[tests\]'`"
    ):
        app(["x"], standalone_mode=False)


def lacking(sweep: str) -> None:
    """A lab command without its libraries."""
    import nowhere  # type: ignore[import-not-found] # noqa: F401


_ALL = ("get", "post", "put", "delete")


@pytest.mark.parametrize(
    ("methods", "answer", "told"),
    [
        (_ALL, httpx.Response(200, html="<p>Sign in"), "answers with text/html"),
        (_ALL, httpx.Response(302, headers={"Location": "https://login"}), "a redirect to 'https://login'"),
        (_ALL, httpx.Response(200, text="[" * 100_000), "answers with text/plain"),
        (("get",), httpx.Response(200, json="welcome"), "answers with application/json"),
        (("get",), httpx.Response(204), "answers with nothing"),
    ],
)
def test_a_stranger_at_the_address_is_told(
    methods: tuple[str, ...], answer: httpx.Response, told: str
) -> None:
    client = Client("http://127.0.0.1", "token")
    client._http = httpx.Client(transport=httpx.MockTransport(lambda _: answer), base_url="http://127.0.0.1")
    for method in methods:
        with pytest.raises(CommandError, match=told) as refused:
            getattr(client, method)("/v1/models", *([{}] if method == "put" else []))
        assert refused.value.code is Exit.USAGE
    if answer.status_code != 204:  # which says that the job has ended
        with pytest.raises(CommandError, match="so it is not a permille service"):
            next(client.events("job_1"))


def test_events_are_looked_up_where_no_stream_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["running", "succeeded"])
    events = [{"seq": 1, "kind": "state", "data": {}}, {"seq": 2, "kind": "state", "data": {}}]

    def answer(request: httpx.Request) -> httpx.Response:
        match request.url.path.rpartition("/")[2]:
            case "stream":
                return httpx.Response(429)
            case "events":
                after = int(request.url.params["after"])
                return httpx.Response(200, json=[one for one in events if one["seq"] == after + 1])
        return httpx.Response(200, json={"state": next(states)})

    monkeypatch.setattr(client_module, "LOOK_S", 0.0)
    client = Client("http://127.0.0.1", "token")
    client._http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1")
    assert [event["seq"] for event in client.events("job_1")] == [1, 2]


class Cut(httpx.SyncByteStream):
    """A stream that ends with the first event, because the API is killed."""

    def __iter__(self) -> Iterator[bytes]:
        yield b'data: {"seq": 1}\n\n'
        raise httpx.RemoteProtocolError("peer closed connection")


def test_the_waiting_goes_on_when_the_api_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    stream = {"Content-Type": "text/event-stream; charset=utf-8"}

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Last-Event-ID"])
        match len(asked):
            case 1:
                return httpx.Response(200, headers=stream, stream=Cut())
            case 3:
                return httpx.Response(200, headers=stream, content=b'data: {"seq": 2}\n\n')
            case 4:
                return httpx.Response(204)
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(client_module, "LOOK_S", 0.0)
    client = Client("http://127.0.0.1", "token")
    client._http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1")
    assert [event["seq"] for event in client.events("job_1")] == [1, 2]
    assert asked == ["0", "1", "1", "2"]
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.0)
    with pytest.raises(CommandError, match="No service answers"):
        list(client.events("job_1"))
