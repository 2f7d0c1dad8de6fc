"""Parameters: ids by their table's prefix, digests, names; in paths, or as a list's filter."""

from typing import Annotated

from fastapi import Path, Query

from permille.schemas.fields import DIGEST_PATTERN, NAME_PATTERN

ULID = "[0-9a-hjkmnp-tv-z]{26}"
EXAMPLE = "01jd3kq8z7m4n5p6r7s8t9v0wx"

ModelId = Annotated[str, Path(pattern=f"^model_{ULID}$", examples=[f"model_{EXAMPLE}"])]
CorpusId = Annotated[str, Path(pattern=f"^corpus_{ULID}$", examples=[f"corpus_{EXAMPLE}"])]
JobId = Annotated[str, Path(pattern=f"^job_{ULID}$", examples=[f"job_{EXAMPLE}"])]
MaskId = Annotated[str, Path(pattern=f"^mask_{ULID}$", examples=[f"mask_{EXAMPLE}"])]
QuantizationId = Annotated[str, Path(pattern=f"^quant_{ULID}$", examples=[f"quant_{EXAMPLE}"])]
DeviceId = Annotated[str, Path(pattern=f"^dev_{ULID}$", examples=[f"dev_{EXAMPLE}"])]
InvitationId = Annotated[str, Path(pattern=f"^inv_{ULID}$", examples=[f"inv_{EXAMPLE}"])]
TokenId = Annotated[str, Path(pattern=f"^operator_{ULID}$", examples=[f"operator_{EXAMPLE}"])]
RunId = Annotated[
    str,
    Path(
        pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        examples=["5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11"],
    ),
]
PackageDigest = Annotated[
    str, Path(alias="digest", pattern=DIGEST_PATTERN, examples=["sha256:" + "0123456789abcdef" * 4])
]
BlobDigest = Annotated[str, Path(pattern=DIGEST_PATTERN, examples=["sha256:" + "fedcba9876543210" * 4])]
ReleaseName = Annotated[str, Path(alias="name", pattern=NAME_PATTERN, examples=["tiny-llama"])]
AliasName = Annotated[str, Path(alias="alias", pattern=NAME_PATTERN, examples=["stable"])]
VersionNumber = Annotated[int, Path(alias="version", ge=1, le=2**53 - 1, examples=[1])]

OfModel = Annotated[str | None, Query(pattern=f"^model_{ULID}$", description="only those of this model")]
OfDevice = Annotated[str | None, Query(pattern=f"^dev_{ULID}$", description="only those of this device")]
