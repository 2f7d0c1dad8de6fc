"""Preflight of a request: estimate its needs, and say whether the machine has them.

If no worker has downloaded a hub model yet, the needs of its jobs are unknown. The answer then says so, and
no request is refused for lack of memory or disk.
"""

from typing import Annotated

from fastapi import APIRouter, Body
from sqlalchemy.orm import Session

from permille.choices import AdapterKind
from permille.models.settings import within_positions
from permille.schemas.fields import Closed
from permille.schemas.jobs import JobKind, Preflight
from permille.schemas.kinds import PreflightCreate, parse_request
from permille.schemas.masks import FisherMask, FisherMaskCreate, WeightMask, WeightMaskCreate
from permille.schemas.packages import (
    Adapter,
    BuildCreate,
    ExportCreate,
    PackageCreate,
    public_text,
)
from permille.schemas.problems import Figure, ProblemType
from permille.schemas.quantizations import AnyOptions, AutoRound, QuantizationCreate, Source
from permille.store import artifacts, rows
from permille.store.jobs.dispatch import largest_memory, none_can_export
from permille.store.tables import Artifact, Corpus, Model
from permille_service.access.principals import Viewer
from permille_service.context import Served, Service
from permille_service.extension import service_extensions
from permille_service.preflights.estimates import (
    Capacity,
    Needs,
    Sizes,
    export_needs,
    mask_needs,
    measure_machine,
    package_needs,
    quantization_needs,
    sizes_of,
)
from permille_service.problems import PRIVATE, ApiError, as_conflicts, documented

ADAPTER = "adapter"  # the role of the adapter layer in a package's manifest
# No needs. `needs_of` returns this object if the needs are unknown.
NOTHING = Needs(memory_bytes=0, disk_bytes=0)
_UNREAD = "the files of this hub model are not here yet; its first job downloads them"
_EXPLANATIONS = {
    "memory": "weights, scores, gradients and activations",
    "disk": "layers and reports in the blob folder",
}


def check(service: Service, tenant_id: str, request: Closed) -> None:
    """Refuse a request that contradicts itself, or that needs more than the machine has.

    Raises:
        ApiError: `preflight-refused`: the machine has too little memory or disk.
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
    with service.database.read() as session:
        machine = measure_machine(service.settings, largest_memory(session))
        planner = Planner(session, tenant_id, machine, service.settings.fisher_split_flops)
        needs = planner.needs_of(request)
    # Compare by identity. NOTHING stands for unknown needs, and known needs may also be zero.
    return compare(None if needs is NOTHING else needs, machine)


def compare(needs: Needs | None, machine: Capacity) -> Preflight:
    """Compare needs with what a machine has. An unknown figure never causes a refusal.

    Args:
        needs: the estimated needs. None: they are unknown.
    """
    memory, disk = (None, None) if needs is None else (needs.memory_bytes, needs.disk_bytes)
    rows = (("memory", memory, machine.memory_bytes), ("disk", disk, machine.disk_bytes))
    figures = [
        Figure(
            name=name,
            unit="bytes",
            needed=needed,
            available=available,
            enough=available is None or needed is None or needed <= available,
            explanation=_EXPLANATIONS[name],
        )
        for name, needed, available in rows
    ]
    return Preflight(
        accepted=all(figure.enough for figure in figures),
        figures=figures,
        unknown=_UNREAD if needs is None else None,
    )


class Planner:
    """Looks up the models, corpora and artifacts of a request, and estimates its needs on a machine."""

    def __init__(self, session: Session, tenant_id: str, machine: Capacity, split_flops: float) -> None:
        self.session = session
        self.tenant_id = tenant_id
        self._machine = machine
        self._split_flops = split_flops

    def needs_of(self, request: Closed) -> Needs:
        """Estimate the needs of any request."""
        match request:
            case FisherMaskCreate() | WeightMaskCreate():
                return self._mask(request, request.model_id)
            case QuantizationCreate():
                return self._quantization(request, request.options)
            case PackageCreate():
                return self._package(request)
            case BuildCreate():
                return self._build(request)
            case ExportCreate():
                return self._export(request)
        for extension in service_extensions():
            for kind, estimate in extension.needs.items():
                if isinstance(request, kind):
                    return estimate(self, request)
        raise TypeError(f"{type(request).__name__} is no request for work")

    def _mask(self, mask: FisherMask | WeightMask, model_id: str) -> Needs:
        sizes = self.sizes(model_id, mask.scope)
        if isinstance(mask, FisherMask):
            self.check_sequences(mask.corpus_id, model_id, mask.sequences, mask.length)
        if sizes is None:
            return NOTHING
        memory_bytes = self._machine.memory_bytes
        return mask_needs(sizes, mask, memory_bytes=memory_bytes, split_flops=self._split_flops)

    def _quantization(self, request: QuantizationCreate | BuildCreate, options: AnyOptions) -> Needs:
        sizes = self.sizes(request.model_id)
        self.check_corpus(request.evaluation_corpus_id)
        if isinstance(options, Source):
            self._check_gguf(request.model_id)
        if isinstance(options, AutoRound):
            number, length = options.calibration_sequences, options.calibration_length
            self.check_sequences(options.calibration_corpus_id, request.model_id, number, length)
        if sizes is None:
            return NOTHING
        evaluated, memory_bytes = request.evaluation_corpus_id is not None, self._machine.memory_bytes
        return quantization_needs(sizes, options, evaluated=evaluated, memory_bytes=memory_bytes)

    def _package(self, request: PackageCreate) -> Needs:
        quantization = self._part(JobKind.QUANTIZATION, request.quantization_id)
        if request.adapter is not None:
            self._check_adapter(request.adapter, quantization.model_id)
        mask = None
        if request.mask_id is not None:
            part = self._part(JobKind.MASK, request.mask_id)
            self._check_mask(part, quantization)
            mask = parse_request(JobKind.MASK, part.request)
        if request.basis:
            coded = parse_request(JobKind.QUANTIZATION, quantization.request)
            self._check_text(public_text(mask, coded.evaluation_corpus_id))
        sizes = self.sizes(quantization.model_id)
        return NOTHING if sizes is None else package_needs(sizes, basis=request.basis)

    def _part(self, kind: JobKind, key: str) -> Artifact:
        return artifacts.get(self.session, tenant_id=self.tenant_id, kind=kind, key=key)

    def _check_mask(self, mask: Artifact, quantization: Artifact) -> None:
        if mask.model_id != quantization.model_id:
            raise ApiError(
                ProblemType.CONFLICT,
                f"The mask belongs to model {mask.model_id}, and the quantization to model "
                f"{quantization.model_id}. Choose parts of the same model.",
            )

    def _check_text(self, corpus_id: str | None) -> None:
        """Refuse a basis without public text, before hours of other work."""
        if corpus_id is None:
            raise ApiError(
                ProblemType.CONFLICT,
                "A basis needs public text. Choose a mask with a corpus, or a corpus to evaluate on.",
            )
        self.check_corpus(corpus_id)

    def _check_gguf(self, model_id: str) -> None:
        """Refuse a model without a GGUF file. The worker later checks the tensor types of the file."""
        model = rows.get(self.session, Model, tenant_id=self.tenant_id, row_id=model_id)
        if model.source["kind"] != "gguf":
            raise ApiError(
                ProblemType.CONFLICT,
                f"The scheme `source` keeps the codes of a GGUF file, and {model.name!r} has none. "
                "Add it with `permille models add NAME --gguf FILE`, or choose another scheme.",
            )

    def _check_adapter(self, adapter: Adapter, model_id: str) -> None:
        sizes = self.sizes(model_id, adapter.scope)
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
        if request.basis:
            self._check_text(public_text(request.mask, request.evaluation_corpus_id))
        quantization = self._quantization(request, request.quantization)
        sizes = self.sizes(request.model_id)
        if sizes is None:
            return NOTHING
        return mask.then(quantization).then(package_needs(sizes, basis=request.basis))

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
        if none_can_export(self.session):
            raise ApiError(
                ProblemType.CONFLICT,
                "No running worker can export programs. Start one with `permille[executorch]` installed.",
            )
        sizes = self.sizes(package.model_id)
        return NOTHING if sizes is None else export_needs(sizes)

    def sizes(self, model_id: str, scope: str = "all") -> Sizes | None:
        """Return the sizes of a model, or None if they are unknown. Raises ApiError, NotFoundError."""
        model = rows.get(self.session, Model, tenant_id=self.tenant_id, row_id=model_id)
        if model.config is None:
            return None
        with as_conflicts():
            return sizes_of(model.config, scope)

    def check_corpus(self, corpus_id: str | None) -> None:
        """Refuse a corpus that does not exist. Raises NotFoundError."""
        if corpus_id is not None:
            rows.get(self.session, Corpus, tenant_id=self.tenant_id, row_id=corpus_id)

    def check_sequences(self, corpus_id: str, model_id: str, number: int, length: int) -> None:
        """Refuse a corpus whose file has fewer bytes than the sequences have tokens.

        A token takes at least one byte. The exact number of tokens is known only after a job has read the
        corpus. Jobs shorten the sequences to the positions of the model.
        """
        corpus = rows.get(self.session, Corpus, tenant_id=self.tenant_id, row_id=corpus_id)
        model = rows.get(self.session, Model, tenant_id=self.tenant_id, row_id=model_id)
        with as_conflicts():
            length = within_positions(model.config or {}, length)
        # The text of a compressed file may be many times larger than the file.
        packed = str(corpus.source.get("path", "")).endswith(".gz")
        if corpus.size_bytes is not None and not packed and number * length > corpus.size_bytes:
            raise ApiError(
                ProblemType.CONFLICT,
                f"The corpus {corpus.name!r} of {corpus.size_bytes} bytes cannot hold {number} sequences of "
                f"{length} tokens. Ask for fewer or shorter sequences.",
            )


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
