"""The child process that renders chat templates: reads requests line by line, answers line by line, ends at
end of input.

A template comes with the package, so it is code of somebody else. It runs in jinja2's immutable sandbox,
without files, network or imports, and in a process of its own, because a sandbox bounds what a template may
touch but not how long it loops or how much it allocates: the parent gives a time limit, this process a memory
limit.
"""

import json
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` renders its body: so templates mark the assistant's turns."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def main() -> int:
    """Serve requests {template, messages, add_generation_prompt, variables, limit} from standard input."""
    _limit_memory()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    _say({"ready": "yes"})
    for line in sys.stdin:
        _say(_answer(environment, json.loads(line)))
    return 0


def _answer(environment: ImmutableSandboxedEnvironment, request: dict[str, Any]) -> dict[str, str]:
    try:
        template = environment.from_string(request["template"])
        pieces = []
        length = 0
        for piece in template.generate(
            messages=request["messages"],
            add_generation_prompt=request["add_generation_prompt"],
            **request["variables"],
        ):
            pieces.append(piece)
            length += len(piece)
            if length > request["limit"]:
                return {"error": f"expected at most {request['limit']} characters, got more"}
        return {"text": "".join(pieces)}
    except (TemplateError, SecurityError) as exc:
        return {"error": f"{type(exc).__name__}: {exc}"[:500]}
    except MemoryError:
        return {"error": f"expected at most {MEMORY_BYTES} bytes of memory, the template needs more"}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        return {"error": f"{type(exc).__name__} in the template"}


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _limit_memory() -> None:
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


if __name__ == "__main__":
    raise SystemExit(main())
