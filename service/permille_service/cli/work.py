"""Commands of long work and its results: masks, quantizations, packages, builds, jobs, preflight."""

from pathlib import Path
from typing import Annotated, Any

import typer

from permille.files import write_atomic
from permille_service.cli.collections import add_list, add_show
from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.output import watch
from permille_service.cli.session import AsJson, Key, Rows, Session, Wait, connect

masks = typer.Typer(no_args_is_help=True, help="Which weights are sensitive, and the evidence.")
quantizations = typer.Typer(no_args_is_help=True, help="The dense layer, and what it costs.")
packages = typer.Typer(no_args_is_help=True, help="What a device downloads.")
builds = typer.Typer(no_args_is_help=True, help="Mask, quantization, package in one go.")
jobs = typer.Typer(no_args_is_help=True, help="Long work: state, progress, events, cancel, retry.")

JOB_COLUMNS = ("id", "kind", "state", "progress.fraction", "progress.message", "result", "created_at")
MASK_COLUMNS = ("id", "model_id", "request.method", "request.density", "k", "created_at")
QUANTIZATION_COLUMNS = (
    "id",
    "model_id",
    "request.options.scheme",
    "request.options.group_size",
    "size_bytes",
    "created_at",
)
PACKAGE_COLUMNS = ("digest", "model_id", "k", "size_bytes", "created_at")
BUILD_COLUMNS = ("id", "state", "model_id", "package_digest", "created_at")

Model = Annotated[str, typer.Option("--model", help="Id of a registered model.")]
Corpus = Annotated[str | None, typer.Option("--corpus", help="Id of a corpus; `fisher` needs one.")]
Method = Annotated[str, typer.Option(help="fisher, magnitude or random.")]
Density = Annotated[float, typer.Option(help="Share of the weights: 0.001 is one in a thousand.")]
Sequences = Annotated[int, typer.Option(help="Sequences to measure gradients on.")]
Length = Annotated[int, typer.Option(help="Tokens of a sequence.")]
Seed = Annotated[int, typer.Option(help="Seed of the choice of sequences, or of a random mask.")]
ScopeFlag = Annotated[str, typer.Option("--scope", help='"all", or blocks: "layers:4-7".')]
Exponents = Annotated[
    bool, typer.Option("--fisher-exponents", help="Add powers of two from the scores of a fisher mask.")
]
Scheme = Annotated[str, typer.Option(help="nf4, int4 or auto-round: int4 calibrated on texts.")]
GroupSize = Annotated[int | None, typer.Option(help="nf4: 64; int4: 32 or 128; auto-round: 128.")]
Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate-on",
        help="Corpus that auto-round takes its texts from: better codes, in minutes or hours.",
    ),
]
Evaluate = Annotated[str | None, typer.Option("--evaluate-on", help="Corpus to measure perplexity on.")]
EvaluationTokens = Annotated[int, typer.Option(help="Tokens to measure perplexity on.")]
Report = Annotated[Path | None, typer.Option("--picture", help="Save the picture to this file.")]


@masks.command("create")
def create_mask(
    context: typer.Context,
    model: Model,
    corpus: Corpus = None,
    method: Method = "fisher",
    density: Density = 0.001,
    sequences: Sequences = 100,
    length: Length = 512,
    seed: Seed = 0,
    scope: ScopeFlag = "all",
    wait: Wait = True,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Choose the sensitive weights of a model.

    Example:

      permille masks create --model model_01j... --corpus corpus_01j... --density 0.001
    """
    options = mask_options(method, corpus, density, sequences, length, seed, scope)
    with connect(context, as_json=as_json) as session:
        follow(session, session.client.post("/v1/masks", {"model_id": model, **options}, key=key), wait=wait)


add_list(masks, "/v1/masks", MASK_COLUMNS, "List finished masks.")
add_show(masks, "/v1/masks", "mask_id", "Show one mask.")


@masks.command("report")
def report_mask(
    context: typer.Context, mask_id: str, picture: Report = None, as_json: AsJson = False
) -> None:
    """Show the evidence behind a mask: coverage curve and table by tensor."""
    with connect(context, as_json=as_json) as session:
        _report(session, f"/v1/masks/{mask_id}/report", picture)


@quantizations.command("create")
def create_quantization(
    context: typer.Context,
    model: Model,
    scheme: Scheme = "nf4",
    group_size: GroupSize = None,
    calibrate_on: Calibrate = None,
    evaluate_on: Evaluate = None,
    evaluation_tokens: EvaluationTokens = 8192,
    wait: Wait = True,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Code a model's dense weights.

    Example:

      permille quantizations create --model model_01j... --scheme nf4 --evaluate-on corpus_01j...

      permille quantizations create --model model_01j... --scheme auto-round --calibrate-on corpus_01j...
    """
    body = {
        "model_id": model,
        "evaluation_corpus_id": evaluate_on,
        "options": quantization_options(scheme, group_size, evaluation_tokens, calibrate_on),
    }
    with connect(context, as_json=as_json) as session:
        follow(session, session.client.post("/v1/quantizations", body, key=key), wait=wait)


add_list(quantizations, "/v1/quantizations", QUANTIZATION_COLUMNS, "List finished quantizations.")
add_show(quantizations, "/v1/quantizations", "quantization_id", "Show one quantization.")


@quantizations.command("report")
def report_quantization(
    context: typer.Context, quantization_id: str, picture: Report = None, as_json: AsJson = False
) -> None:
    """Show what a quantization costs: errors by tensor, perplexity before and after."""
    with connect(context, as_json=as_json) as session:
        _report(session, f"/v1/quantizations/{quantization_id}/report", picture)


@packages.command("create")
def create_package(
    context: typer.Context,
    mask: Annotated[str, typer.Option(help="Id of a mask.")],
    quantization: Annotated[str, typer.Option(help="Id of a quantization of the same model.")],
    fisher_exponents: Exponents = False,
    wait: Wait = True,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Pack a mask and a quantization."""
    body = {"mask_id": mask, "quantization_id": quantization, "fisher_exponents": fisher_exponents}
    with connect(context, as_json=as_json) as session:
        follow(session, session.client.post("/v1/packages", body, key=key), wait=wait)


add_list(packages, "/v1/packages", PACKAGE_COLUMNS, "List packages.")
add_show(packages, "/v1/packages", "digest", "Show one package and its layers.")


@builds.command("create")
def create_build(
    context: typer.Context,
    model: Model,
    corpus: Corpus = None,
    method: Method = "fisher",
    density: Density = 0.001,
    sequences: Sequences = 100,
    length: Length = 512,
    seed: Seed = 0,
    scope: ScopeFlag = "all",
    scheme: Scheme = "nf4",
    group_size: GroupSize = None,
    calibrate_on: Calibrate = None,
    evaluate_on: Evaluate = None,
    evaluation_tokens: EvaluationTokens = 8192,
    fisher_exponents: Exponents = False,
    wait: Wait = True,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a package: mask, quantization, package.

    Example:

      permille builds create --model model_01j... --corpus corpus_01j... --evaluate-on corpus_01j...
    """
    body = {
        "model_id": model,
        "mask": mask_options(method, corpus, density, sequences, length, seed, scope),
        "quantization": quantization_options(scheme, group_size, evaluation_tokens, calibrate_on),
        "evaluation_corpus_id": evaluate_on,
        "fisher_exponents": fisher_exponents,
    }
    with connect(context, as_json=as_json) as session:
        follow(session, session.client.post("/v1/builds", body, key=key), wait=wait)


add_list(builds, "/v1/builds", BUILD_COLUMNS, "List builds.")
add_show(builds, "/v1/builds", "build_id", "Show one build and what it has made so far.")


@jobs.command("list")
def list_jobs(
    context: typer.Context,
    state: Annotated[
        str | None, typer.Option(help="queued, running, succeeded, failed, cancelled, dead.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="mask, quantization, package, build, replay.")] = None,
    limit: Rows = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs."""
    with connect(context, as_json=as_json) as session:
        found = session.client.pages("/v1/jobs", limit=limit, state=state, kind=kind)
        session.output.show(found, JOB_COLUMNS)


add_show(jobs, "/v1/jobs", "job_id", "Show one job.")


@jobs.command("watch")
def watch_job(context: typer.Context, job_id: str, as_json: AsJson = False) -> None:
    """Follow a job to its end with a progress bar. Exit code 1 when it does not succeed."""
    with connect(context, as_json=as_json) as session:
        watch(session.client, session.output, job_id)


@jobs.command("events")
def list_job_events(context: typer.Context, job_id: str, as_json: AsJson = False) -> None:
    """List a job's events."""
    with connect(context, as_json=as_json) as session:
        found: list[Any] = []
        while page := session.client.get(
            f"/v1/jobs/{job_id}/events", after=found[-1]["seq"] if found else 0, limit=200
        ):
            found += page
        session.output.show(found, ("seq", "created_at", "kind", "data"))


@jobs.command("cancel")
def cancel_job(context: typer.Context, job_id: str, as_json: AsJson = False) -> None:
    """Ask a job to stop."""
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post(f"/v1/jobs/{job_id}/cancel"))


@jobs.command("retry")
def retry_job(context: typer.Context, job_id: str, as_json: AsJson = False) -> None:
    """Queue a job again that failed, died or was cancelled."""
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.post(f"/v1/jobs/{job_id}/retry"))


def preflight(
    context: typer.Context,
    model: Model,
    corpus: Corpus = None,
    method: Method = "fisher",
    density: Density = 0.001,
    sequences: Sequences = 100,
    length: Length = 512,
    scheme: Scheme = "nf4",
    group_size: GroupSize = None,
    calibrate_on: Calibrate = None,
    evaluate_on: Evaluate = None,
    evaluation_tokens: EvaluationTokens = 8192,
    as_json: AsJson = False,
) -> None:
    """Say what a build needs and whether the machine has it. Exit code 3 when it has not.

    Example:

      permille preflight --model model_01j... --corpus corpus_01j... --sequences 1000
    """
    request = {
        "model_id": model,
        "mask": mask_options(method, corpus, density, sequences, length, 0, "all"),
        "quantization": quantization_options(scheme, group_size, evaluation_tokens, calibrate_on),
        "evaluation_corpus_id": evaluate_on,
    }
    with connect(context, as_json=as_json) as session:
        answer = session.client.post("/v1/preflights", {"kind": "build", "request": request})
        if session.output.as_json:
            session.output.show(answer)
        else:
            columns = ("name", "unit", "needed", "available", "enough", "explanation")
            session.output.show(answer["figures"], columns)
        if not answer["accepted"]:
            raise CommandError("expected a machine that can hold this build, got too little", Exit.REFUSED)


def mask_options(
    method: str, corpus: str | None, density: float, sequences: int, length: int, seed: int, scope: str
) -> dict[str, Any]:
    """The request's part that says how a mask is chosen."""
    options: dict[str, Any] = {"method": method, "density": density, "seed": seed, "scope": scope}
    if method == "fisher":
        if corpus is None:
            raise CommandError("expected --corpus for the method fisher", Exit.USAGE)
        options |= {"corpus_id": corpus, "sequences": sequences, "length": length}
    return options


def quantization_options(
    scheme: str, group_size: int | None, tokens: int, calibrate_on: str | None
) -> dict[str, Any]:
    """The request's part that says how dense weights are coded."""
    options: dict[str, Any] = {"scheme": scheme, "evaluation_tokens": tokens}
    if (scheme == "auto-round") != (calibrate_on is not None):
        given = "no corpus" if calibrate_on is None else calibrate_on
        raise CommandError(
            f"expected --calibrate-on with --scheme auto-round and with no other, got {given} with {scheme}",
            Exit.USAGE,
        )
    if calibrate_on is not None:
        options["calibration_corpus_id"] = calibrate_on
    return options if group_size is None else {**options, "group_size": group_size}


def follow(session: Session, job: dict[str, Any], *, wait: bool) -> dict[str, Any] | None:
    """Wait for a job's end, or show it as it is; the ended job, if it was waited for."""
    if wait:
        return watch(session.client, session.output, job["id"])
    session.output.show(job)
    return None


def _report(session: Session, path: str, picture: Path | None) -> None:
    report = session.client.get(path)
    if picture is not None:
        write_atomic(picture, session.client.get_bytes(f"{path}.png"))
        session.output.say(f"picture: {picture}")
    if session.output.as_json:
        session.output.show(report)
        return
    rows = report.get("tensors")
    if isinstance(rows, list) and rows:
        first = ("name", "shape")
        session.output.show(rows, (*first, *(name for name in rows[0] if name not in first)))
    session.output.show({name: value for name, value in report.items() if name not in ("tensors", "curve")})
