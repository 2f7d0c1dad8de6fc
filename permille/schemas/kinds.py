"""The kinds of jobs that a request can start, in one table.

From this table, the service makes routes, the command line makes commands, and store and workers
parse the payload of a job. The request is also the payload of the job, unchanged. So a new option of the
API and of the command line only needs a new field in a request.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Union

from pydantic import Field, TypeAdapter, ValidationError, create_model

from permille.errors import InputError
from permille.extensions import extensions
from permille.schemas.fields import Closed, examples_of
from permille.schemas.jobs import JobKind
from permille.schemas.masks import Mask, MaskCreate, ShardRequest
from permille.schemas.packages import (
    Build,
    BuildCreate,
    Export,
    ExportCreate,
    PackageCreate,
    PackageRecord,
)
from permille.schemas.quantizations import Quantization, QuantizationCreate
from permille.schemas.runs import ReplayRequest
from permille.schemas.work import Kind, View, WorkKind

_SCHEME: Final = ("request.options.scheme", "request.options.group_size")


_OWN: Final = (
    WorkKind(
        kind=JobKind.BUILD,
        request=BuildCreate,
        record=Build,
        collection="builds",
        about="Build packages: mask, quantization and package in one request.",
        starts="Build a package of a model: mask, quantization, package.",
        view=View(
            columns=("id", "state", "model_id", "package_digest", "created_at"),
            example="--model tiny --corpus stories --evaluate-on stories",
            then="permille releases publish NAME --package {} --alias stable",
        ),
        # A build is a job, and its package is the result.
        key="build_id",
        prefix="job",
    ),
    WorkKind(
        kind=JobKind.MASK,
        request=MaskCreate,
        record=Mask,
        collection="masks",
        about="Find the sensitive weights of models, and see the evidence.",
        starts="Find the sensitive weights of a model.",
        shows="Show the evidence behind a mask: the coverage curve and a table by tensor.",
        view=View(
            columns=("id", "model_id", "request.method", "request.density", "k", "created_at"),
            example="--model tiny --corpus stories --density 0.001",
            then="permille masks report {}",
        ),
        key="mask_id",
        prefix="mask",
    ),
    WorkKind(
        kind=JobKind.QUANTIZATION,
        request=QuantizationCreate,
        record=Quantization,
        collection="quantizations",
        about="Quantize models, and see what that costs.",
        starts="Quantize the frozen weights of a model.",
        shows="Show what a quantization costs: error by tensor, perplexity before and after.",
        view=View(
            columns=("id", "model_id", *_SCHEME, "size_bytes", "created_at"),
            example="--model tiny --scheme nf4 --evaluate-on stories",
            then="permille quantizations report {}",
        ),
        key="quantization_id",
        prefix="quant",
    ),
    WorkKind(
        kind=JobKind.PACKAGE,
        request=PackageCreate,
        record=PackageRecord,
        collection="packages",
        about="Make packages of finished masks and quantizations.",
        starts="Make a package of a quantization with a mask, or with an adapter.",
        view=View(
            columns=("digest", "model_id", "k", "size_bytes", "created_at"),
            example="--mask mask_01jd3kq8z7 --quantization quant_01jd3kq8z9",
            then="permille releases publish NAME --package {} --alias stable",
        ),
        key="digest",
        prefix=None,
    ),
    WorkKind(
        kind=JobKind.EXPORT,
        request=ExportCreate,
        record=Export,
        collection="exports",
        about="Add programs for an inference engine to packages.",
        starts="Add a program for ExecuTorch's runtime to a package.",
        view=View(
            columns=("id", "state", "package_digest", "created_at"),
            example="--package 577a9004 --weights int4",
            then="permille releases publish NAME --package {} --alias stable",
        ),
        key="export_id",
        prefix="job",
    ),
)
# Jobs that the service or a worker starts, so that no route takes them.
_STARTED: Final = (
    Kind(kind=JobKind.REPLAY, request=ReplayRequest, collection="runs"),
    Kind(kind=JobKind.SHARD, request=ShardRequest, collection=None),
)
_ALL: Final[Mapping[JobKind, Kind]] = {
    one.kind: one for one in (*_STARTED, *_OWN, *extensions("kinds", Kind))
}
_ORDER: Final = (JobKind.BUILD, *JobKind)
WORK: Final[Mapping[JobKind, WorkKind]] = {
    one.kind: one
    for one in sorted(_ALL.values(), key=lambda one: _ORDER.index(one.kind))
    if isinstance(one, WorkKind)
}
"""The kinds that requests start, with those of extensions, in the order of document and commands."""
# Kinds of jobs whose result is a package.
MAKES_PACKAGES: Final = frozenset({JobKind.PACKAGE, JobKind.BUILD, JobKind.EXPORT})


def _preflight(work: WorkKind) -> type[Closed]:
    fields: dict[str, Any] = {"kind": Literal[work.kind.value], "request": work.request}
    # A class for each kind, because pydantic tells the forms apart by the literal in `kind`.
    made = create_model(
        f"{work.kind.capitalize()}Preflight", __base__=Closed, __doc__=f"Ask for a {work.kind}.", **fields
    )
    made.examples = {
        f"{work.kind}: {name}": {"kind": work.kind.value, "request": body}
        for name, body in examples_of(work.request).items()
    }
    return made


# A request for the needs of a job, with one form for each kind.
PreflightCreate: Final[Any] = Annotated[
    Union[tuple(map(_preflight, WORK.values()))],  # noqa: UP007 - the fix would be another type
    Field(discriminator="kind"),
]
_REQUESTS: Final[dict[str, TypeAdapter[Any]]] = {kind: TypeAdapter(one.request) for kind, one in _ALL.items()}


def parse_request(kind: str, payload: Mapping[str, object]) -> Any:
    """Parse the payload of a job into the request class of its kind.

    Raises:
        InputError: the kind is unknown, or fields are not valid in this version. The message names them.

    Example:
        >>> payload = {"model_id": "model_" + 26 * "0", "method": "magnitude"}
        >>> parse_request("mask", payload).density
        0.001
    """
    if kind not in _REQUESTS:
        raise InputError(f"There is no job of kind {kind!r}, only {', '.join(_REQUESTS)}.")
    try:
        return _REQUESTS[kind].validate_python(dict(payload))
    except ValidationError as exc:
        # Five errors suffice for a person, and a payload may have thousands.
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors()[:5])
        raise InputError(f"This version of permille cannot read the job: {wrong}") from exc


def result_path(kind: JobKind, result_id: str) -> str | None:
    """Return the API path of a result of this kind, or None if no path shows it.

    Example:
        >>> result_path(JobKind.MASK, "mask_1")
        '/v1/masks/mask_1'
    """
    # The result of a build or an export is a package.
    made = _ALL.get(JobKind.PACKAGE if kind in MAKES_PACKAGES else kind)
    return None if made is None or made.collection is None else f"/v1/{made.collection}/{result_id}"
