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


class QuantizationPayload(_Closed):
    """Quantize a model."""

    model_id: str
    scheme: str
    group_size: int
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
    """Pack a mask and a quantization of one model."""

    mask_id: str
    quantization_id: str
    fisher_exponents: bool = False


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
