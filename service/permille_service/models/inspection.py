"""Looking at a model's folder before anything is made of it: where it is, its family, its tensors by their
headers."""

from pathlib import Path

from permille.models.checkpoint import Checkpoint
from permille.models.sources import resolve_inside
from permille.store.models import ModelFacts
from permille_service.preflights.estimates import sizes_of


def inspect_folder(root: Path, relative: str) -> ModelFacts:
    """What the service stores of a model's folder; the digest of its weights is left to the first job.

    Raises:
        InputError: the path leads out of the root, the family is not known, or files are missing or foreign.
    """
    checkpoint = Checkpoint(resolve_inside(root, relative, what="folder"))
    sizes = sizes_of(checkpoint.config)
    return ModelFacts(
        family=checkpoint.family.value,
        config=checkpoint.config,
        size_bytes=checkpoint.size_bytes,
        parameter_count=checkpoint.parameters,
        scoped_parameter_count=sizes.scoped,
    )
