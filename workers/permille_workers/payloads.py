"""What the payloads of jobs hold.

The API has validated them; a row that another version wrote is checked again.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from permille.errors import InputError

Payload = TypeVar("Payload", bound=BaseModel)


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MaskPayload(_Closed):
    """Choose the weights of a model. `fisher` needs corpus, sequences and length."""

    model_id: str
    method: str
    density: float
    corpus_id: str | None = None
    sequences: int | None = None
    length: int | None = None
    seed: int = 0
    scope: str = "all"
    allocation: str = "tensor"

    def options(self) -> dict[str, Any]:
        """What is stored of the mask: everything but what it was made of."""
        return self.model_dump(exclude={"model_id", "corpus_id"})


class BasisPayload(_Closed):
    """Learn directions for a mask's weights from a corpus."""

    mask_id: str
    corpus_id: str
    sequences: int = 256
    length: int = 128
    rank: int = 32
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """What is stored of the basis: everything but what it was made of."""
        return self.model_dump(exclude={"mask_id", "corpus_id"})


class TaskFilesPayload(_Closed):
    """Files of one task, below the corpus root."""

    train: str
    test: str | None = None


class EvaluationPayload(_Closed):
    """Compare methods on tasks. What is None has the sweep's own default."""

    model_ids: list[str]
    corpus_id: str
    tasks: dict[str, TaskFilesPayload]
    methods: list[str]
    bases: list[str] | None = None
    seeds: list[int] | None = None
    density: float | None = None
    zo_steps: int | None = None
    fo_steps: int | None = None
    queries: int | None = None
    estimator: str | None = None
    batch_size: int | None = None
    trials: int | None = None
    tuning_seeds: int | None = None
    evaluations: int | None = None
    sizes: list[int] | None = None
    max_tokens: int | None = None
    refresh_steps: int | None = None
    corpus_sequences: int | None = None
    corpus_tokens: int | None = None
    wording: str | None = None

    def options(self) -> dict[str, Any]:
        """What is stored of the evaluation: everything but what it was made of."""
        return self.model_dump(exclude={"model_ids", "corpus_id"}, exclude_none=True)


class QuantizationPayload(_Closed):
    """Quantize a model, with regard to a mask or without."""

    model_id: str
    scheme: str
    group_size: int
    mask_id: str | None = None
    evaluation_corpus_id: str | None = None
    evaluation_tokens: int = 8192
    rounding: str = "nearest"
    calibration_corpus_id: str | None = None
    calibration_sequences: int = 128
    calibration_length: int = 512

    def options(self) -> dict[str, Any]:
        """What is stored of the quantization: everything but what it was made of."""
        names = {"scheme", "group_size", "evaluation_tokens"}
        if self.rounding != "nearest":
            names |= {"rounding", "calibration_corpus_id", "calibration_sequences", "calibration_length"}
        return self.model_dump(include=names)


class PackagePayload(_Closed):
    """Pack a mask and a quantization of one model, with directions and measured precision if asked for."""

    mask_id: str
    quantization_id: str
    basis_id: str | None = None
    fisher_exponents: bool = False
    measure_precision: bool = False
    precision_corpus_id: str | None = None


class ReplayPayload(_Closed):
    """Replay the log that a run has shared."""

    run_id: str


def parse_payload(kind: type[Payload], payload: dict[str, Any]) -> Payload:
    """Check a payload. Raises InputError with the fields that are wrong."""
    try:
        return kind.model_validate(payload)
    except ValidationError as exc:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors()[:5])
        raise InputError(f"expected the payload of a job as this version writes it: {wrong}") from exc
