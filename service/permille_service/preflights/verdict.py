"""Needs against a machine: the figures that an operator is shown, and the refusal."""

from permille.schemas.preflights import Preflight
from permille.schemas.problems import Figure, ProblemType
from permille_service.preflights.estimates import Needs
from permille_service.preflights.machine import Machine
from permille_service.problems import ApiError


def judge(needs: Needs, machine: Machine) -> Preflight:
    """Compare; what is unknown counts as enough."""
    rows = (
        (
            "memory",
            "bytes",
            needs.memory_bytes,
            machine.memory_bytes,
            "weights, scores, gradients and activations",
        ),
        (
            "disk",
            "bytes",
            needs.disk_bytes,
            machine.disk_bytes,
            "layers, scores and reports in the blob folder",
        ),
        (
            "time",
            "seconds",
            needs.seconds,
            machine.max_job_s,
            "estimated from the floating-point work",
        ),
    )
    figures = [
        Figure(
            name=name,
            unit=unit,
            needed=needed,
            available=available,
            enough=available is None or needed <= available,
            explanation=explanation,
        )
        for name, unit, needed, available, explanation in rows
    ]
    return Preflight(accepted=all(figure.enough for figure in figures), figures=figures)


def require(needs: Needs, machine: Machine) -> None:
    """Pass, or refuse with the figures. Raises ApiError (`preflight-refused`)."""
    verdict = judge(needs, machine)
    if verdict.accepted:
        return
    short = "; ".join(
        f"expected {figure.needed} {figure.unit} of {figure.name}, got {figure.available}"
        for figure in verdict.figures
        if not figure.enough
    )
    raise ApiError(ProblemType.PREFLIGHT_REFUSED, short, figures=verdict.figures)
