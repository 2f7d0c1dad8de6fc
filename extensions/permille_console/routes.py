"""General routes of the console: styles and scripts, sign-in and sign-out, and the page of a job."""

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse

from permille.addresses import address_key
from permille.schemas.access import Role
from permille.schemas.jobs import ENDED
from permille.schemas.problems import ProblemType
from permille.store import rows, tables
from permille.store.jobs import queue
from permille_console import assets, sign_in
from permille_console.names import lines_of, names_of, page_at
from permille_console.rendering import (
    HEADERS,
    MakerPage,
    Page,
    PageRoute,
    ViewerPage,
    WatcherPage,
    is_part,
    render,
)
from permille_service.access.principals import PUBLIC, Operator, find_principal
from permille_service.context import Served
from permille_service.jobs import records
from permille_service.jobs import routes as job_routes
from permille_service.parameters import JobId
from permille_service.problems import ApiError

router = APIRouter(prefix=sign_in.PATH, include_in_schema=False, route_class=PageRoute)
_GZIP = re.compile(r"\bgzip\b")
_EVENTS = 200
Next = Annotated[str, Query(alias="next", max_length=500)]


@router.get("/assets/{name}", dependencies=[PUBLIC])
def get_asset(name: str, request: Request) -> Response:
    """Return the file with the styles or the file with the scripts."""
    asset = next((one for one in assets.load() if one.name == name), None)
    if asset is None:
        raise ApiError(ProblemType.NOT_FOUND, "There is no such file. Reload the page.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if not _GZIP.search(request.headers.get("accept-encoding", "")):
        return Response(asset.body, media_type=asset.media_type, headers=headers)
    headers["Content-Encoding"] = "gzip"
    return Response(asset.packed, media_type=asset.media_type, headers=headers)


@router.get("")
@router.get("/")
def show_first(page: WatcherPage) -> Response:
    """Redirect the operator to the first page that the operator's role may see."""
    first = "jobs" if page.may(Role.VIEWER) else "fleet"
    return page.go_to(first)


@router.get("/sign-in", dependencies=[PUBLIC])
def show_sign_in(request: Request, to: Next = "") -> Response:
    """Show the form that asks for a token."""
    return render(request, "sign_in", {"to": sign_in.own_path(to), "refusal": None})


@router.post("/sign-in", dependencies=[PUBLIC])
def do_sign_in(
    request: Request, service: Served, form: Annotated[dict[str, str], Depends(sign_in.form_of)]
) -> Response:
    """Check the token and keep it in a cookie."""
    to, token = sign_in.own_path(form.get("next", "")), form.get("token", "").strip()
    if not isinstance(find_principal(service, token), Operator):
        service.sign_ins.check(address_key(request.client.host if request.client else ""))
        refusal = "This is not a valid operator token. It may have expired or been revoked."
        return render(request, "sign_in", {"to": to, "refusal": refusal}, status=401)
    answer = RedirectResponse(to, status_code=303, headers=HEADERS)
    sign_in.keep(answer, service, token, secure=request.url.scheme == "https")
    return answer


@router.post("/sign-out", dependencies=[PUBLIC])
def do_sign_out(request: Request, service: Served) -> Response:
    """End the session."""
    answer = RedirectResponse(f"{sign_in.PATH}/sign-in", status_code=303, headers=HEADERS)
    sign_in.forget(request, answer, service)
    return answer


@router.get("/jobs/{job_id}")
def show_job(job_id: JobId, page: ViewerPage) -> Response:
    """Show one job and its events."""
    return _job(page, job_id)


@router.post("/jobs/{job_id}/cancel")
def cancel(job_id: JobId, page: MakerPage) -> Response:
    """Cancel a job."""
    operator = page.acting("cancel_job", f"/v1/jobs/{job_id}/cancel")
    job_routes.cancel_job(job_id, page.service, operator)
    return _after(page, job_id)


@router.post("/jobs/{job_id}/retry")
def retry(job_id: JobId, page: MakerPage) -> Response:
    """Queue a job again."""
    operator = page.acting("retry_job", f"/v1/jobs/{job_id}/retry")
    job_routes.retry_job(job_id, page.service, operator)
    return _after(page, job_id)


def _after(page: Page, job_id: str) -> Response:
    if is_part(page.request):
        return _job(page, job_id)
    return page.go_to(f"jobs/{job_id}")


def _job(page: Page, job_id: str) -> Response:
    with page.service.database.read() as session:
        row = rows.get(session, tables.Job, tenant_id=page.tenant_id, row_id=job_id)
        job = records.present(session, row)
        parts = rows.records_of(queue.parts_of(session, row), lambda part: records.present(session, part))
        newest = max(0, row.event_seq - _EVENTS)
        events = queue.events_after(session, tenant_id=page.tenant_id, job_id=job_id, seq=newest)
        told = rows.records_of(reversed(events), records.present_event)
        payload = list(lines_of(row.payload))
        names = names_of(session, page.tenant_id, [job.result_id, *(value for _, value in payload)])
    return page.render(
        "job",
        job=job,
        children=parts,
        events=told,
        payload=payload,
        names=names,
        live=job.state not in ENDED,
        made=page_at(job.result),
    )
