"""Preflight of a request: estimate its needs, and say whether the machine has them.

If no worker has downloaded a hub model yet, the needs of its jobs are unknown. The answer then says so, and
no request is refused for lack of memory, disk or time. The time is estimated from the number of operations,
and corrected by the times that the tenant's past jobs of the same kind took.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from statistics import median
from typing import Annotated, Final

from fastapi import APIRouter, Body
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from permille.choices import AdapterKind
from permille.errors import InputError
from permille.schemas.fields import Closed
from permille.schemas.jobs import JobKind, JobState, Preflight
from permille.schemas.kinds import PreflightCreate, parse_request
from permille.schemas.masks import FisherMask, FisherMaskCreate, WeightMask, WeightMaskCreate
from permille.schemas.packages import Adapter, BuildCreate, ExportCreate, PackageCreate, PoolingCreate
from permille.schemas.problems import Figure, ProblemType
from permille.schemas.quantizations import AnyOptions, AutoRound, QuantizationCreate, Source
from permille.schemas.sparsifications import SparsificationCreate
from permille.store import artifacts, inputs, rows
from permille.store.jobs.dispatch import none_can_export
from permille.store.tables import Artifact, Corpus, Job, Model
from permille_service.access.principals import Viewer
from permille_service.context import Served, Service
from permille_service.preflights.estimates import (
    FLOAT_BYTES,
    MAX_JOB_S,
    Capacity,
    Needs,
    Sizes,
    export_needs,
    mask_needs,
    measure_machine,
    package_needs,
    pooling_needs,
    quantization_needs,
    sizes_of,
    sparsification_needs,
)
from permille_service.problems import PRIVATE, ApiError, as_conflicts, documented

ADAPTER = "adapter"  # the role of the adapter layer in a package's manifest
# No needs. `needs_of` returns this object if the needs are unknown.
NOTHING = Needs(memory_bytes=0, disk_bytes=0, seconds=0.0)
_UNREAD = "the files of this hub model are not here yet; its first job downloads them"
_KINDS = {
    SparsificationCreate: JobKind.SPARSIFICATION,
    FisherMaskCreate: JobKind.MASK,
    WeightMaskCreate: JobKind.MASK,
    QuantizationCreate: JobKind.QUANTIZATION,
    PackageCreate: JobKind.PACKAGE,
    BuildCreate: JobKind.BUILD,
    PoolingCreate: JobKind.POOLING,
    ExportCreate: JobKind.EXPORT,
}
_EXPLANATIONS = {
    "memory": "weights, scores, gradients and activations",
    "disk": "layers and reports in the blob folder",
    "time": "estimated from the number of operations; no past job of this kind has succeeded yet",
}


def check(service: Service, tenant_id: str, request: Closed) -> None:
    """Refuse a request that contradicts itself, or that needs more than the machine has.

    Raises:
        ApiError: `preflight-refused`: the machine has too little memory, disk or time.
            `conflict`: parts of the request do not fit each other.
        NotFoundError: an object of the request does not exist.
    """
    verdict = preflight_of(service, tenant_id, request)
    if verdict.accepted:
        return
    short = "; ".join(
        f"{figure.name}: {figure.needed} {figure.unit} needed, {figure.available} available"
        for figure in verdict.figures
        if not figure.enough
    )
    raise ApiError(ProblemType.PREFLIGHT_REFUSED, short, figures=verdict.figures)


def preflight_of(service: Service, tenant_id: str, request: Closed) -> Preflight:
    """Return the needs of a request, and whether the machine has them.

    Raises the errors of `check`, except `preflight-refused`.
    """
    machine, kind = measure_machine(service.settings), _KINDS[type(request)]
    with service.database.read() as session:
        planner = _Planner(session, tenant_id, machine, service.settings.fisher_split_flops)
        needs = planner.needs_of(request)
        # Do not check this in `needs_of`, which also estimates past jobs: their results have taken the names.
        if isinstance(request, SparsificationCreate):
            inputs.check_name(session, Model, tenant_id, request.name)
        # Compare by identity. NOTHING stands for unknown needs, and known needs may also be zero.
        if needs is NOTHING:
            return compare(None, machine)
        seconds, jobs = forecast_s(
            session,
            tenant_id=tenant_id,
            kind=kind,
            estimated_s=needs.seconds,
            # Estimate past jobs with the same assumed speed. The forecast multiplies the new estimate by the
            # ratio of actual to estimated times of past jobs, so an error of the speed mostly cancels out.
            estimate=lambda past: planner.needs_of(past).seconds,
        )
    told_by = f"corrected by the times of {jobs} past jobs of kind {kind}" if jobs else ""
    return compare(replace(needs, seconds=seconds), machine, told_by=told_by)


def compare(needs: Needs | None, machine: Capacity, *, told_by: str = "") -> Preflight:
    """Compare needs with what a machine has. An unknown figure never causes a refusal.

    Args:
        needs: the estimated needs. None: they are unknown.
        told_by: words that say which past jobs corrected the time. Empty: no past job corrected it.
    """
    memory, disk, seconds = (
        (None, None, None) if needs is None else (needs.memory_bytes, needs.disk_bytes, needs.seconds)
    )
    rows = (
        ("memory", "bytes", memory, machine.memory_bytes),
        ("disk", "bytes", disk, machine.disk_bytes),
        ("time", "seconds", seconds, MAX_JOB_S),
    )
    explanations = _EXPLANATIONS | ({"time": told_by} if told_by else {})
    figures = [
        Figure(
            name=name,
            unit=unit,
            needed=needed,
            available=available,
            enough=available is None or needed is None or needed <= available,
            explanation=explanations[name],
        )
        for name, unit, needed, available in rows
    ]
    return Preflight(
        accepted=all(figure.enough for figure in figures),
        figures=figures,
        unknown=_UNREAD if needs is None else None,
    )


class _Planner:
    """Looks up the models, corpora and artifacts of a request, and estimates its needs on a machine."""

    def __init__(self, session: Session, tenant_id: str, machine: Capacity, split_flops: float) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._machine = machine
        self._split_flops = split_flops

    def needs_of(self, request: Closed) -> Needs:
        """Estimate the needs of any request."""
        match request:
            case SparsificationCreate():
                return self._sparsification(request)
            case FisherMaskCreate() | WeightMaskCreate():
                return self._mask(request, request.model_id)
            case QuantizationCreate():
                return self._quantization(request, request.options)
            case PackageCreate():
                return self._package(request)
            case BuildCreate():
                return self._build(request)
            case PoolingCreate():
                return self._pooling(request)
            case ExportCreate():
                return self._export(request)
        raise TypeError(f"{type(request).__name__} is no request for work")

    def _sparsification(self, request: SparsificationCreate) -> Needs:
        """Estimate a sparsification. Refuse it if it does not fit the model."""
        self._check_corpus(request.corpus_id, request.sequences * request.length)
        sizes = self._sizes(request.model_id)
        model = rows.get(self._session, Model, tenant_id=self._tenant_id, row_id=request.model_id)
        if sizes is None or model.config is None:
            return NOTHING
        with as_conflicts():
            request.plan().check(model.config)
        model_bytes = model.size_bytes or sizes.parameters * FLOAT_BYTES
        return sparsification_needs(
            sizes, request, model_bytes=model_bytes, flops_per_s=self._machine.flops_per_s
        )

    def _mask(self, mask: FisherMask | WeightMask, model_id: str) -> Needs:
        sizes = self._sizes(model_id, mask.scope)
        if isinstance(mask, FisherMask):
            self._check_corpus(mask.corpus_id, mask.sequences * mask.length)
        if sizes is None:
            return NOTHING
        machine = self._machine
        return mask_needs(
            sizes,
            mask,
            memory_bytes=machine.memory_bytes,
            flops_per_s=machine.flops_per_s,
            split_flops=self._split_flops,
        )

    def _quantization(self, request: QuantizationCreate | BuildCreate, options: AnyOptions) -> Needs:
        sizes = self._sizes(request.model_id)
        self._check_corpus(request.evaluation_corpus_id)
        if isinstance(options, Source):
            self._check_gguf(request.model_id)
        if isinstance(options, AutoRound):
            tokens = options.calibration_sequences * options.calibration_length
            self._check_corpus(options.calibration_corpus_id, tokens)
        if sizes is None:
            return NOTHING
        machine, evaluated = self._machine, request.evaluation_corpus_id is not None
        return quantization_needs(
            sizes,
            options,
            evaluated=evaluated,
            flops_per_s=machine.flops_per_s,
            memory_bytes=machine.memory_bytes,
        )

    def _package(self, request: PackageCreate) -> Needs:
        quantization = self._part(JobKind.QUANTIZATION, request.quantization_id)
        if request.adapter is not None:
            self._check_adapter(request.adapter, quantization.model_id)
        if request.mask_id is not None:
            self._check_mask(self._part(JobKind.MASK, request.mask_id), quantization)
        sizes = self._sizes(quantization.model_id)
        return NOTHING if sizes is None else package_needs(sizes)

    def _part(self, kind: JobKind, key: str) -> Artifact:
        return artifacts.get(self._session, tenant_id=self._tenant_id, kind=kind, key=key)

    def _check_mask(self, mask: Artifact, quantization: Artifact) -> None:
        if mask.model_id != quantization.model_id:
            raise ApiError(
                ProblemType.CONFLICT,
                f"The mask belongs to model {mask.model_id}, and the quantization to model "
                f"{quantization.model_id}. Choose parts of the same model.",
            )

    def _check_gguf(self, model_id: str) -> None:
        """Refuse a model without a GGUF file. The worker later checks the tensor types of the file."""
        model = rows.get(self._session, Model, tenant_id=self._tenant_id, row_id=model_id)
        if model.source["kind"] != "gguf":
            raise ApiError(
                ProblemType.CONFLICT,
                f"The scheme `source` keeps the codes of a GGUF file, and {model.name!r} has none. "
                "Add it with `permille models add NAME --gguf FILE`, or choose another scheme.",
            )

    def _check_adapter(self, adapter: Adapter, model_id: str) -> None:
        sizes = self._sizes(model_id, adapter.scope)
        if sizes is None:
            return
        most = sizes.lora_rank if adapter.kind is AdapterKind.LORA else sizes.lora_fa_rank
        if adapter.rank > most:
            raise ApiError(
                ProblemType.CONFLICT,
                f"Rank {adapter.rank} is too high for the smallest linear layer of the model. Choose a rank "
                f"of at most {most}.",
            )

    def _build(self, request: BuildCreate) -> Needs:
        mask = NOTHING if request.mask is None else self._mask(request.mask, request.model_id)
        if request.adapter is not None:
            self._check_adapter(request.adapter, request.model_id)
        quantization = self._quantization(request, request.quantization)
        sizes = self._sizes(request.model_id)
        return NOTHING if sizes is None else mask.then(quantization).then(package_needs(sizes))

    def _pooling(self, request: PoolingCreate) -> Needs:
        package = self._part(JobKind.PACKAGE, request.package_digest)
        self._check_corpus(request.corpus_id)
        sizes = self._sizes(package.model_id)
        if sizes is None:
            return NOTHING
        return pooling_needs(
            sizes, request, package_bytes=package.size_bytes, flops_per_s=self._machine.flops_per_s
        )

    def _export(self, request: ExportCreate) -> Needs:
        package = self._part(JobKind.PACKAGE, request.package_digest)
        if artifacts.blob_of(package, ADAPTER) is not None:
            raise ApiError(
                ProblemType.CONFLICT,
                "This package trains an adapter, but a program can only have sparse values. Export a package "
                "with a mask.",
            )
        if request.variants > request.rows:  # JSON schema cannot compare two fields
            raise ApiError(
                ProblemType.CONFLICT,
                f"{request.rows} rows are too few for {request.variants} variants. Each variant needs a row.",
            )
        if none_can_export(self._session):
            raise ApiError(
                ProblemType.CONFLICT,
                "No running worker can export programs. Start one with `permille[executorch]` installed.",
            )
        sizes = self._sizes(package.model_id)
        return NOTHING if sizes is None else export_needs(sizes)

    def _sizes(self, model_id: str, scope: str = "all") -> Sizes | None:
        model = rows.get(self._session, Model, tenant_id=self._tenant_id, row_id=model_id)
        if model.config is None:
            return None
        with as_conflicts():
            return sizes_of(model.config, scope)

    def _check_corpus(self, corpus_id: str | None, tokens: int = 0) -> None:
        """Refuse a corpus whose file has fewer bytes than the request needs tokens.

        A token takes at least one byte. The exact number of tokens is known only after a job has read the
        corpus.
        """
        if corpus_id is None:
            return
        corpus = rows.get(self._session, Corpus, tenant_id=self._tenant_id, row_id=corpus_id)
        # The text of a compressed file may be many times larger than the file.
        packed = str(corpus.source.get("path", "")).endswith(".gz")
        if corpus.size_bytes is not None and not packed and tokens > corpus.size_bytes:
            raise ApiError(
                ProblemType.CONFLICT,
                f"The corpus {corpus.name!r} of {corpus.size_bytes} bytes cannot hold {tokens} tokens "
                "(sequences times length). Ask for fewer or shorter sequences.",
            )


# A forecast is based on at most this number of past jobs.
COUNTED: Final = 5
# Some past jobs cannot be used. The forecast looks for usable ones among this number of the newest jobs.
_LOOKED_AT: Final = 20
# Seconds to start a process and read files, which the estimates do not include. A small job takes little more
# than this overhead. Without this term, small past jobs would make a large job look ten times slower.
_FIXED_S: Final = 30.0

Estimate = Callable[[Closed], float]


def forecast_s(
    session: Session, *, tenant_id: str, kind: JobKind, estimated_s: float, estimate: Estimate
) -> tuple[float, int]:
    """Forecast how many seconds a new job takes.

    Return the seconds, and the number of past jobs on which the forecast is based.

    The forecast looks at recent jobs that succeeded. For each of them, it divides the time that the job took
    by its estimate. It multiplies the estimate of the new job by the median of these ratios. `_FIXED_S` is
    added to every estimate first. If there are no such jobs, the estimate is returned unchanged.

    Args:
        estimate: a function that estimates the seconds of a past request. If it raises an error, for example
            because a model was removed, the past job is ignored.
    """
    newest = (
        select(Job)
        .where(Job.tenant_id == tenant_id, Job.kind == kind.value, Job.state == JobState.SUCCEEDED.value)
        .order_by(Job.id.desc())
        .limit(_LOOKED_AT)
    )
    found: list[float] = []
    for job in session.scalars(newest):
        if len(found) == COUNTED:
            break
        try:
            past_s = estimate(parse_request(job.kind, job.payload))
        except (ApiError, InputError):
            continue
        if (took_s := _took_s(session, job)) is not None:
            found.append(took_s / (past_s + _FIXED_S))
    if not found:
        return estimated_s, 0
    # Some jobs had to wait for a busy machine or a slow download. The median ignores such outliers.
    return median(found) * (estimated_s + _FIXED_S), len(found)


def _took_s(session: Session, job: Job) -> float | None:
    """Return the seconds from the start of a job to its end, or None if a time is missing.

    If a part of the job has an earlier start, that start counts. The row of a job that was split into parts
    holds only the start of its last attempt, which came after the parts.
    """
    first: datetime | None = session.scalar(select(func.min(Job.started_at)).where(Job.parent_id == job.id))
    started = min(filter(None, (first, job.started_at)), default=None)
    if started is None or job.ended_at is None:
        return None
    return (job.ended_at - started).total_seconds()


router = APIRouter(
    prefix="/v1/preflights",
    tags=["preflights"],
    responses=documented(*PRIVATE, ProblemType.NOT_FOUND, ProblemType.CONFLICT),
)


@router.post("")
def check_preflight(
    body: Annotated[PreflightCreate, Body()],
    service: Served,
    operator: Viewer,
) -> Preflight:
    """Estimate what a request needs, and say whether the machine has it. Nothing is created."""
    return preflight_of(service, operator.tenant_id, body.request)
