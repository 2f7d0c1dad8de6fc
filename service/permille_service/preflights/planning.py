"""What a request will need, from the rows that it names, and whether the machine has it.

A hub model that no worker has read yet has no figures: the answer says so, and refuses nothing.
"""

from sqlalchemy.orm import Session

from permille.choices import AdapterKind
from permille.errors import InputError
from permille.schemas.fields import Closed
from permille.schemas.jobs import JobKind, Preflight
from permille.schemas.kinds import parse_request
from permille.schemas.masks import FisherMask, FisherMaskCreate, WeightMask, WeightMaskCreate
from permille.schemas.packages import Adapter, BuildCreate, ExportCreate, PackageCreate, PoolingCreate
from permille.schemas.problems import Figure, ProblemType
from permille.schemas.quantizations import (
    AnyBuildOptions,
    AnyOptions,
    AutoRound,
    BuildSqueezeLLM,
    CodeBooks,
    QuantizationCreate,
    SqueezeLLM,
)
from permille.schemas.sparsifications import SparsificationCreate
from permille.store import artifacts, inputs, rows
from permille.store.artifacts import SCORES
from permille.store.jobs.dispatch import none_can_export
from permille.store.settings import FISHER_SPLIT_FLOPS
from permille.store.tables import Artifact, Corpus, Model
from permille_service.context import Service
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
from permille_service.problems import ApiError

ADAPTER = "adapter"  # the package's own word for the layer
NOTHING = Needs(memory_bytes=0, disk_bytes=0, seconds=0.0)
_UNREAD = "the files of this hub model have not been read yet: its first job downloads them"
_EXPLANATIONS = {
    "memory": "weights, scores, gradients and activations",
    "disk": "layers, scores and reports in the blob folder",
    "time": "estimated from the floating-point work",
}


def check(service: Service, tenant_id: str, request: Closed) -> None:
    """Refuse what cannot be, or what the machine cannot hold.

    Raises:
        ApiError: `preflight-refused`, with the figures; `conflict`: parts that do not go together.
        NotFoundError: something that the request names.
    """
    verdict = preflight_of(service, tenant_id, request)
    if verdict.accepted:
        return
    short = "; ".join(
        f"expected {figure.needed} {figure.unit} of {figure.name}, got {figure.available}"
        for figure in verdict.figures
        if not figure.enough
    )
    raise ApiError(ProblemType.PREFLIGHT_REFUSED, short, figures=verdict.figures)


def preflight_of(service: Service, tenant_id: str, request: Closed) -> Preflight:
    """What a request needs and whether the machine has it. Raises as `check`, but for the refusal."""
    machine = measure_machine(service.settings)
    with service.database.read() as session:
        needs = _Planner(session, tenant_id, machine).needs_of(request)
    if needs is NOTHING:
        return Preflight(accepted=True, figures=[], unknown=_UNREAD)
    return compare(needs, machine)


def compare(needs: Needs, machine: Capacity) -> Preflight:
    """Needs against a machine; what is unknown counts as enough."""
    rows = (
        ("memory", "bytes", needs.memory_bytes, machine.memory_bytes),
        ("disk", "bytes", needs.disk_bytes, machine.disk_bytes),
        ("time", "seconds", needs.seconds, MAX_JOB_S),
    )
    figures = [
        Figure(
            name=name,
            unit=unit,
            needed=needed,
            available=available,
            enough=available is None or needed <= available,
            explanation=_EXPLANATIONS[name],
        )
        for name, unit, needed, available in rows
    ]
    return Preflight(accepted=all(figure.enough for figure in figures), figures=figures)


class _Planner:
    """Finds what a tenant's requests name, and estimates their needs on a machine."""

    def __init__(self, session: Session, tenant_id: str, machine: Capacity) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._machine = machine

    def needs_of(self, request: Closed) -> Needs:
        """What any request needs."""
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
        raise TypeError(f"expected a request for work, got {type(request).__name__}")

    def _sparsification(self, request: SparsificationCreate) -> Needs:
        """Refuses early what the job would refuse by the config alone, or by a name that is taken."""
        self._check_corpus(request.corpus_id, request.sequences * request.length)
        inputs.check_name(self._session, Model, self._tenant_id, request.name)
        sizes = self._sizes(request.model_id)
        model = rows.get(self._session, Model, tenant_id=self._tenant_id, row_id=request.model_id)
        if sizes is None or model.config is None:
            return NOTHING
        try:
            request.plan().check(model.config)
        except InputError as exc:
            raise ApiError(ProblemType.CONFLICT, str(exc)) from exc
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
            split_flops=FISHER_SPLIT_FLOPS,
        )

    def _quantization(
        self, request: QuantizationCreate | BuildCreate, options: AnyOptions | AnyBuildOptions
    ) -> Needs:
        sizes = self._sizes(request.model_id)
        self._check_corpus(request.evaluation_corpus_id)
        if isinstance(options, CodeBooks):
            self._check_dense(request.model_id)
        if isinstance(options, (SqueezeLLM, BuildSqueezeLLM)) and options.mask_id is not None:
            self._check_scores(self._part(JobKind.MASK, options.mask_id), request.model_id)
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
                f"expected parts of one model, got {mask.model_id} and {quantization.model_id}",
            )

    def _check_scores(self, mask: Artifact, model_id: str) -> None:
        if mask.model_id != model_id:
            raise ApiError(
                ProblemType.CONFLICT, f"expected a mask of {model_id}, got {mask.id} of {mask.model_id}"
            )
        request = parse_request(JobKind.MASK, mask.request)
        if artifacts.blob_of(mask, SCORES) is None or request.scope != "all":
            raise ApiError(
                ProblemType.CONFLICT,
                f"expected a fisher mask of all linears, whose scores squeezellm takes, got {mask.id}: "
                f"{request.method} of {request.scope}",
            )

    def _check_dense(self, model_id: str) -> None:
        """That of a folder's or the hub's model is for the worker, which reads it."""
        model = rows.get(self._session, Model, tenant_id=self._tenant_id, row_id=model_id)
        if model.source["kind"] == "sparsified":
            raise ApiError(
                ProblemType.CONFLICT,
                f"expected a model that is not sparse for squeezellm, got {model.name!r}: nf4 and int4 keep "
                "its zeros",
            )

    def _check_adapter(self, adapter: Adapter, model_id: str) -> None:
        sizes = self._sizes(model_id, adapter.scope)
        if sizes is None:
            return
        most = sizes.lora_rank if adapter.kind is AdapterKind.LORA else sizes.lora_fa_rank
        if adapter.rank > most:
            raise ApiError(
                ProblemType.CONFLICT,
                f"expected an adapter smaller than every linear in scope, of rank {most} at most, "
                f"got rank {adapter.rank}",
            )

    def _build(self, request: BuildCreate) -> Needs:
        mask = NOTHING if request.mask is None else self._mask(request.mask, request.model_id)
        if request.adapter is not None:
            self._check_adapter(request.adapter, request.model_id)
        own = request.mask
        if request.takes_own_scores and not (isinstance(own, FisherMask) and own.scope == "all"):
            got = "no mask" if own is None else f"method {own.method}, scope {own.scope}"
            raise ApiError(
                ProblemType.CONFLICT,
                "expected a fisher mask of all linears, whose scores squeezellm takes, or another mask of "
                f"that kind (--scores-of), got {got}",
            )
        quantization = self._quantization(request, request.quantization)
        sizes = self._sizes(request.model_id)
        return NOTHING if sizes is None else mask.then(quantization).then(package_needs(sizes))

    def _pooling(self, request: PoolingCreate) -> Needs:
        package = artifacts.get(
            self._session, tenant_id=self._tenant_id, kind=JobKind.PACKAGE, key=request.package_digest
        )
        self._check_corpus(request.corpus_id)
        sizes = self._sizes(package.model_id)
        if sizes is None:
            return NOTHING
        return pooling_needs(
            sizes, request, package_bytes=package.size_bytes, flops_per_s=self._machine.flops_per_s
        )

    def _export(self, request: ExportCreate) -> Needs:
        package = artifacts.get(
            self._session, tenant_id=self._tenant_id, kind=JobKind.PACKAGE, key=request.package_digest
        )
        if artifacts.blob_of(package, ADAPTER) is not None:
            raise ApiError(
                ProblemType.CONFLICT,
                "expected a package with a mask (a program takes sparse values): this one trains an adapter",
            )
        if request.variants > request.rows:  # which no JSON schema can say
            raise ApiError(
                ProblemType.CONFLICT,
                f"expected a row or more for each of {request.variants} variants, got {request.rows}",
            )
        if none_can_export(self._session):
            raise ApiError(
                ProblemType.CONFLICT,
                "expected a worker that can export programs, none that runs can: "
                "pip install 'permille[executorch]' where one is, and start it again",
            )
        sizes = self._sizes(package.model_id)
        return NOTHING if sizes is None else export_needs(sizes)

    def _sizes(self, model_id: str, scope: str = "all") -> Sizes | None:
        model = rows.get(self._session, Model, tenant_id=self._tenant_id, row_id=model_id)
        if model.config is None:
            return None
        try:
            return sizes_of(model.config, scope)
        except InputError as exc:
            raise ApiError(ProblemType.CONFLICT, str(exc)) from exc

    def _check_corpus(self, corpus_id: str | None, tokens: int = 0) -> None:
        """Refuse a corpus that cannot hold so many tokens, each of which takes a byte at least.

        How many it has is known when it was read.
        """
        if corpus_id is None:
            return
        corpus = rows.get(self._session, Corpus, tenant_id=self._tenant_id, row_id=corpus_id)
        packed = str(corpus.source.get("path", "")).endswith(".gz")
        if corpus.size_bytes is not None and not packed and tokens > corpus.size_bytes:
            raise ApiError(
                ProblemType.CONFLICT,
                f"expected a corpus that holds {tokens} tokens (sequences times length), got {corpus.name!r} "
                f"of {corpus.size_bytes} bytes: ask for fewer or shorter sequences",
            )
