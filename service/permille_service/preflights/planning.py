"""What a request will need, from the rows that it names. A hub model that no worker has read yet has no
figures."""

from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.builds import BuildCreate
from permille.schemas.masks import FisherMask, FisherMaskCreate, WeightMask, WeightMaskCreate
from permille.schemas.problems import ProblemType
from permille.schemas.quantizations import AnyOptions, AutoRound, QuantizationCreate
from permille.store import corpora, models
from permille_service.context import Service
from permille_service.preflights.estimates import (
    Needs,
    Sizes,
    mask_needs,
    package_needs,
    quantization_needs,
    sizes_of,
)
from permille_service.preflights.machine import Machine, look
from permille_service.preflights.verdict import require
from permille_service.problems import ApiError

NOTHING = Needs(memory_bytes=0, disk_bytes=0, seconds=0.0)
MaskBody = FisherMaskCreate | WeightMaskCreate


def needs_of_mask(service: Service, tenant_id: str, body: MaskBody, machine: Machine) -> Needs:
    """Raises NotFoundError for an unknown model or corpus, ApiError (`conflict`) for a scope outside the
    model."""
    with service.database.read() as session:
        sizes = _sizes(session, tenant_id, body.model_id, body.scope)
        _check_mask(session, tenant_id, body)
    return NOTHING if sizes is None else _mask(sizes, body, machine)


def needs_of_quantization(
    service: Service, tenant_id: str, body: QuantizationCreate, machine: Machine
) -> Needs:
    """Raises NotFoundError for an unknown model or corpus."""
    with service.database.read() as session:
        sizes = _sizes(session, tenant_id, body.model_id, "all")
        _check_corpus(session, tenant_id, body.evaluation_corpus_id)
        _check_calibration(session, tenant_id, body.options)
    evaluated = body.evaluation_corpus_id is not None
    return NOTHING if sizes is None else _quantization(sizes, body.options, machine, evaluated=evaluated)


def needs_of_build(service: Service, tenant_id: str, body: BuildCreate, machine: Machine) -> Needs:
    """Raises what the parts raise, and ApiError (`conflict`) for exponents of a mask without scores."""
    if body.fisher_exponents and not isinstance(body.mask, FisherMask):
        raise ApiError(
            ProblemType.CONFLICT, f"expected a mask of method fisher for exponents, got {body.mask.method}"
        )
    with service.database.read() as session:
        sizes = _sizes(session, tenant_id, body.model_id, body.mask.scope)
        _check_mask(session, tenant_id, body.mask)
        _check_corpus(session, tenant_id, body.evaluation_corpus_id)
        _check_calibration(session, tenant_id, body.quantization)
        whole = _sizes(session, tenant_id, body.model_id, "all")
    if sizes is None or whole is None:
        return NOTHING
    evaluated = body.evaluation_corpus_id is not None
    quantization = _quantization(whole, body.quantization, machine, evaluated=evaluated)
    return _mask(sizes, body.mask, machine).then(quantization).then(package_needs(whole))


def check_mask(service: Service, tenant_id: str, body: MaskBody) -> None:
    """Refuse a mask job that the machine cannot hold."""
    machine = look(service.settings)
    require(needs_of_mask(service, tenant_id, body, machine), machine)


def check_quantization(service: Service, tenant_id: str, body: QuantizationCreate) -> None:
    """Refuse a quantization job that the machine cannot hold."""
    machine = look(service.settings)
    require(needs_of_quantization(service, tenant_id, body, machine), machine)


def check_build(service: Service, tenant_id: str, body: BuildCreate) -> None:
    """Refuse a build that the machine cannot hold."""
    machine = look(service.settings)
    require(needs_of_build(service, tenant_id, body, machine), machine)


def _sizes(session: Session, tenant_id: str, model_id: str, scope: str) -> Sizes | None:
    model = models.get(session, tenant_id=tenant_id, model_id=model_id)
    if model.config is None:
        return None
    try:
        return sizes_of(model.config, scope)
    except InputError as exc:
        raise ApiError(ProblemType.CONFLICT, str(exc)) from exc


def _check_mask(session: Session, tenant_id: str, mask: FisherMask | WeightMask) -> None:
    _check_corpus(session, tenant_id, mask.corpus_id if isinstance(mask, FisherMask) else None)


def _check_calibration(session: Session, tenant_id: str, options: AnyOptions) -> None:
    if isinstance(options, AutoRound):
        _check_corpus(session, tenant_id, options.calibration_corpus_id)


def _check_corpus(session: Session, tenant_id: str, corpus_id: str | None) -> None:
    if corpus_id is not None:
        corpora.get(session, tenant_id=tenant_id, corpus_id=corpus_id)


def _mask(sizes: Sizes, mask: FisherMask | WeightMask, machine: Machine) -> Needs:
    return mask_needs(sizes, mask, memory_bytes=machine.memory_bytes, flops_per_s=machine.flops_per_s)


def _quantization(sizes: Sizes, options: AnyOptions, machine: Machine, *, evaluated: bool) -> Needs:
    return quantization_needs(sizes, options, evaluated=evaluated, flops_per_s=machine.flops_per_s)
