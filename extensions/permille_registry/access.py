"""Access to a repository: the user's login, and the tokens that a registry asks for.

A registry answers 401 with a challenge (RFC 9110, 11.3). It wants the login itself, or a token of a token
service that it names (docs "Token Authentication Specification" of the CNCF distribution project). Rules:

- The login is read from the files that `docker login` and `skopeo login` write. It is never stored elsewhere.
- It is sent only to the registry, or to a token service of the same domain, and only after a challenge.
- A token is requested for this repository only, whatever scope the challenge names.
"""

import json
import os
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.request import parse_http_list, parse_keqv_list

from permille.addresses import is_loopback
from permille.errors import OperatorError
from permille.system import user_id
from permille_registry.address import Address

TOKEN_LIMIT_BYTES = 1 << 20

# Takes a URL and headers. Returns the body of the answer, of at most TOKEN_LIMIT_BYTES.
Fetch = Callable[[str, Mapping[str, str]], bytes]


class Access:
    """Access to one repository.

    For example:

        access = Access(address, "pull", fetch)
        access.take_up('Bearer realm="https://registry.example.org/token",service="registry"')
        headers = access.headers

    Args:
        address: the repository.
        actions: `pull`, or `pull,push`.
        fetch: fetches the answer of a token service.
    """

    def __init__(self, address: Address, actions: str, fetch: Fetch) -> None:
        self._address = address
        self._scope = f"repository:{address.name}:{actions}"
        self._fetch = fetch
        self.headers: dict[str, str] = {}
        """The headers of a request to the registry, empty before the first challenge."""

    def take_up(self, challenge: str) -> None:
        """Set the headers that a challenge asks for.

        Args:
            challenge: the header `WWW-Authenticate` of an answer with status 401.

        Raises:
            OperatorError: there is no login, the token service is foreign, or the challenge is malformed.
        """
        kind, _, rest = challenge.partition(" ")
        login = stored_login(self._address.registry)
        if kind.lower() == "basic" and login:
            self.headers = {"authorization": f"Basic {login}"}
        elif kind.lower() == "bearer":
            self.headers = {"authorization": f"Bearer {self._token(rest, login)}"}
        else:
            raise self._refused()

    def refuse(self) -> OperatorError:
        """Forget the headers, and return the error of a registry that refuses them."""
        self.headers = {}
        return self._refused()

    def _refused(self) -> OperatorError:
        registry = self._address.registry
        return OperatorError(
            f"{registry} refuses access to {self._address.name}. Log in with `skopeo login {registry}` or "
            f"`docker login {registry}`, as a user who may read this repository, or write for a push."
        )

    def _token(self, parameters: str, login: str) -> str:
        try:
            asked = parse_keqv_list(parse_http_list(parameters))
            realm = urllib.parse.urlsplit(asked["realm"])
            host = realm.hostname or ""
        except (ValueError, KeyError) as exc:
            raise OperatorError(f"{self._address.registry} sent a malformed challenge: {exc}") from exc
        own = urllib.parse.urlsplit(self._address.url)
        safe = realm.scheme == "https" or (realm.scheme == own.scheme and is_loopback(host))
        if not safe or realm.username is not None or not _akin(host, own.hostname or ""):
            raise OperatorError(
                f"{own.hostname} names the token service {realm.scheme:.20}://{host:.100}, which is foreign "
                "or without TLS. The login was not sent there."
            )
        query = {"service": asked.get("service", ""), "scope": self._scope}
        url = realm._replace(query=urllib.parse.urlencode(query), fragment="").geturl()
        data = self._fetch(url, {"authorization": f"Basic {login}"} if login else {})
        try:
            answer = json.loads(data)
            token = answer.get("token") or answer["access_token"]
            # A line break in the token could add another header.
            if not (token.isascii() and token.isprintable()):
                raise ValueError("the token has characters that no header may have")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
            raise OperatorError(f"The token service {host} sent a malformed answer: {exc!r:.100}") from exc
        return str(token)


def stored_login(registry: str) -> str:
    """Return the user's login at a registry as base64 of `user:password`, or "" if there is none.

    `REGISTRY_AUTH_FILE` names the file. By default, they are those of `skopeo login` and `docker login`.

    Raises:
        OperatorError: a file is damaged.
    """
    named, runtime = os.environ.get("REGISTRY_AUTH_FILE"), os.environ.get("XDG_RUNTIME_DIR")
    of_skopeo = Path(runtime) / "containers" if runtime else Path(f"/run/containers/{user_id()}")
    of_docker = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    paths = [Path(named)] if named else [of_skopeo / "auth.json", of_docker / "config.json"]
    return next(filter(None, (_login_in(path, registry) for path in paths)), "")


def _login_in(path: Path, registry: str) -> str:
    try:
        document: Any = json.loads(path.read_bytes())
        login = document.get("auths", {}).get(registry, {}).get("auth", "")
        # The characters of base64 cannot end the header.
        if not (isinstance(login, str) and login.isascii() and login.isprintable()):
            raise ValueError("auth is not base64")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, AttributeError, RecursionError) as exc:
        raise OperatorError(f"{path} cannot be read as a file of logins: {exc}. Log in again.") from exc
    return login


def _akin(host: str, registry: str) -> bool:
    """Return whether two hosts are the same, siblings, or parent and child, below one domain.

    Docker Hub and GitLab have token services such as `auth.docker.io` beside `registry-1.docker.io`, and
    `gitlab.com` above `registry.gitlab.com`.
    """
    if host == registry:
        return True
    if is_loopback(host) or is_loopback(registry) or host.replace(".", "").isdigit():
        return False
    parents = {host, host.partition(".")[2]} & {registry, registry.partition(".")[2]}
    return any("." in parent for parent in parents)
