"""Actions that operators start from the console: builds, releases and invitations.

Each form is made from a request model of the API, and calls the function of the API's route. Permissions,
rules, errors and audit entries are therefore the same as in the API. Before an action that affects devices, a
page names the number of devices and asks for a confirmation. If the facts on that page have changed when the
operator confirms, the page asks again.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from permille.schemas.devices import Invitation, InvitationCreate
from permille.schemas.jobs import JobKind
from permille.schemas.packages import BuildCreate
from permille.schemas.problems import ProblemType
from permille.schemas.releases import ReleaseCreate
from permille.store import releases, tables
from permille.store.database import now
from permille.store.fleet.versions import followers
from permille.store.ids import new_code
from permille.store.jobs.queue import KEPT_FOR
from permille_console import forms, sign_in
from permille_console.extension import console_extensions
from permille_console.names import names_of
from permille_console.rendering import MakerPage, Page, PageRoute
from permille_service.creation import Creation
from permille_service.devices import routes as device_routes
from permille_service.forms import Form, form_of
from permille_service.problems import ApiError
from permille_service.releases import routes as release_routes

router = APIRouter(prefix="/ui", include_in_schema=False, route_class=PageRoute)
CONFIRMED: Final = "confirmed"
Found = TypeVar("Found")
TypedForm = Annotated[dict[str, str], Depends(sign_in.form_of)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of an action on devices.

    Attributes:
        words: the text that the operator reads.
        facts: the versions and the state that the text describes. They do not include counts of devices,
            because these change in a large fleet while the operator reads.
    """

    words: str
    facts: tuple[object, ...]

    @property
    def shown(self) -> str:
        """A digest of the facts. The form of the confirmation sends it back."""
        return hashlib.sha256(repr(self.facts).encode()).hexdigest()

    def is_confirmed(self, typed: Mapping[str, str]) -> bool:
        """Return whether the operator has confirmed these facts, and not facts that were shown earlier."""
        return typed.get("step") == CONFIRMED and typed.get("shown") == self.shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action that creates an object from a form.

    Attributes:
        path, operation: the path and the name of the API's route, for the audit log.
        request: the model of the API's request.
        first: the fields that are always visible. The others are in a section that can be opened.
        call: the function of the API's route.
        after: a function that returns the response when the object has been created.
        effect: a function that describes the effect on devices. It returns None if there is no effect, and
            then no confirmation is needed.
    """

    title: str
    button: str
    path: str
    operation: str
    request: type[BaseModel]
    first: tuple[str, ...]
    call: Callable[[Any, Creation], Any]
    after: Callable[[Page, Any], Response]
    effect: Callable[[Session, str, Any], Effect | None] = lambda _session, _tenant_id, _body: None

    @property
    def form(self) -> Form:
        """The options of the request, as a form."""
        return form_of(self.request)


@router.get("/new/{name}")
def show_form(name: str, request: Request, page: MakerPage) -> Response:
    """Show the form of an action. The query of the URL can fill its fields."""
    return _form(page, find(name, actions()), dict(request.query_params), None)


@router.post("/new/{name}")
def make(name: str, page: MakerPage, typed: TypedForm) -> Response:
    """Run the action, after a confirmation if it affects devices. If it fails, show the form with the typed
    values.
    """
    action = find(name, actions())
    if typed.get("step") == "edit":
        return _form(page, action, typed, None)
    try:
        body = forms.parse(action.form, action.request, typed)
        # If the same form is sent twice, this key lets the API create only one object. A form with changed
        # values creates another object.
        key = hashlib.sha256(f"{typed.get('form', '')}\0{body.model_dump_json()}".encode()).hexdigest()
        with page.service.database.read() as session:
            effect = action.effect(session, page.tenant_id, body)
            answer = session.get(tables.IdempotentAnswer, (page.tenant_id, key))
            is_made = answer is not None and answer.created_at > now(session) - KEPT_FOR
        if effect is not None and not is_made and not effect.is_confirmed(typed):
            return page.render(
                "confirm",
                title=action.title,
                button=action.button,
                effect=effect,
                typed=typed,
                changed=typed.get("step") == CONFIRMED,
                problem=None,
                back=None,
            )
        made = action.call(body, _creation(page, action, key))
    except Exception as exc:  # noqa: BLE001 - after any error, the form keeps the typed values
        return _form(page, action, typed, exc)
    return action.after(page, made)


def actions() -> Mapping[str, Action]:
    """Return all actions, including those of extensions, by the name in their path."""
    added = [action for extension in console_extensions() for action in extension.actions.items()]
    return {**_ACTIONS, **dict(added)}


def find(name: str, of: Mapping[str, Found]) -> Found:
    """Return the value of a name. Raises ApiError (`not-found`) if there is none."""
    if name not in of:
        raise ApiError(ProblemType.NOT_FOUND, f"there is no page {name[:80]!r}")
    return of[name]


def _form(page: Page, action: Action, typed: forms.Typed, exc: Exception | None) -> Response:
    problem = None if exc is None else page.problem_of(exc)
    with page.service.database.read() as session:
        fields, others = forms.fields_of(session, page.tenant_id, action.form, typed, problem)
    by_name = {one.option.parameter: one for one in fields}
    first = [by_name.pop(name) for name in action.first]
    more = list(by_name.values())
    return page.render(
        "form",
        status=200 if problem is None else problem.status,
        action=action,
        first=first,
        more=more,
        is_open=any(one.text or one.error for one in more),
        problem=problem,
        others=others,
        form_id=typed.get("form") or new_code(),
    )


def _creation(page: Page, action: Action, key: str) -> Creation:
    operator = page.acting(action.operation, action.path)
    return Creation(
        service=page.service, operation=action.operation, operator=operator, key=key, response=Response()
    )


def _show_invitation(page: Page, made: Invitation) -> Response:
    return page.render("invitation", made=made, url=str(page.request.base_url).rstrip("/"))


def _release_effect(session: Session, tenant_id: str, body: ReleaseCreate) -> Effect | None:
    if body.alias is None:
        return None
    version = releases.latest_version(session, tenant_id=tenant_id, name=body.name) + 1
    earlier = names_of(session, tenant_id, [body.package_digest]).get(body.package_digest)
    same = "a package that is in no release yet" if earlier is None else f"the package of {earlier}"
    count = count_words(followers(session, tenant_id, body.name, body.alias))
    return Effect(
        words=f"Version {version} of {body.name} will have {same}. The alias {body.alias} will point at this "
        f"version. This affects {count}: devices that follow the alias install the version when they next "
        "ask.",
        facts=(version, earlier, body.package_digest, body.alias),
    )


def count_words(devices: int) -> str:
    """Return a number of devices in words."""
    return "1 device" if devices == 1 else f"{devices:,} devices".replace(",", " ")


_PUBLISH: Final = Action(
    title="Publish a release",
    button="Publish",
    path="/v1/releases",
    operation="create_release",
    request=ReleaseCreate,
    first=("name", "package_digest", "alias"),
    call=release_routes.create_release,
    after=lambda page, made: page.go_to(f"releases/{made.name}?version={made.version}"),
    effect=_release_effect,
)
_ACTIONS: Final[dict[str, Action]] = {
    "build": Action(
        title="Build a package",
        button="Start the build",
        path="/v1/builds",
        operation="create_build",
        request=BuildCreate,
        first=("model_id", "mask_corpus_id", "mask_density", "quantization_scheme", "evaluation_corpus_id"),
        call=lambda body, creation: creation.start(JobKind.BUILD, body, again=False),
        after=lambda page, made: page.go_to(f"jobs/{made.id}"),
    ),
    "release": _PUBLISH,
    "rollback": replace(_PUBLISH, title="Roll back", button="Roll back"),
    "invitation": Action(
        title="Invite a device",
        button="Invite",
        path="/v1/invitations",
        operation="create_invitation",
        request=InvitationCreate,
        first=("release", "alias"),
        call=device_routes.create_invitation,
        after=_show_invitation,
    ),
}
