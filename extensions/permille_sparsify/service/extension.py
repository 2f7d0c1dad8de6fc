"""The part of sparse models for the service."""

from typing import Final

from permille_service.extension import ServiceExtension
from permille_sparsify.schemas import SparsificationCreate
from permille_sparsify.service.needs import planned

EXTENSION: Final = ServiceExtension(needs={SparsificationCreate: planned})
