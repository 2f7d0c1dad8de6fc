"""The part of sparse models for the service."""

from pathlib import Path
from typing import Final

from permille_service.extension import ServiceExtension
from permille_sparsify.schemas import SparsificationCreate
from permille_sparsify.service import pages
from permille_sparsify.service.needs import planned

EXTENSION: Final = ServiceExtension(
    page_routers=(pages.router,),
    templates=Path(__file__).with_name("templates"),
    needs={SparsificationCreate: planned},
)
