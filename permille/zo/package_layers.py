"""From an opened package to the layers that directions are made with."""

from permille.package.limits import Role
from permille.package.reader import Package
from permille.zo.header import LogHeader
from permille.zo.layers import NO_LAYERS, Basis, DirectionLayers, Exponents


def needs_layers(header: LogHeader) -> bool:
    """Whether a log's directions are made with a layer of its package; most logs need none."""
    return header.basis is not None or header.exponents is not None


def layers_of(package: Package, header: LogHeader) -> DirectionLayers:
    """What a log of this package needs of its layers; they are read only where it needs them.

    A layer that the log needs and the package lacks is absent, so that replay refuses the log.

    Raises:
        PackageError: a layer's blob is damaged, or it breaks a rule of FORMAT 4.7 or 4.8.
    """
    if not needs_layers(header):
        return NO_LAYERS
    return DirectionLayers(
        basis=None if header.basis is None else basis_of(package),
        exponents=None if header.exponents is None else exponents_of(package),
    )


def basis_of(package: Package) -> Basis | None:
    """The package's learned directions, r bytes a masked weight; None where it has none.

    Raises:
        PackageError: `blob-digest`, or the layer breaks a rule of FORMAT 4.8.
    """
    u_KR = package.basis()
    return None if u_KR is None else Basis(u_KR, package.manifest.layer(Role.BASIS).digest)


def exponents_of(package: Package) -> Exponents | None:
    """The package's scaling exponents; None where it has none, or where all are 0 and scale nothing.

    Raises:
        PackageError: `blob-digest`, or the layer breaks a rule of FORMAT 4.7.
    """
    e_K = package.exponents()
    if e_K is None or not e_K.any():
        return None
    return Exponents(e_K, package.manifest.layer(Role.EXPONENTS).digest)
