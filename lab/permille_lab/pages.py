"""Write docs/results from lab/results: `make results`, or `python -m permille_lab.pages`.

A page is a template with text and places for tables. The tables come from the finished cells. The text is
written by hand, so check it after each new measurement.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from permille.files import write_atomic
from permille_lab.decision import page as decision
from permille_lab.engine import page as engine
from permille_lab.evidence import page as evidence
from permille_lab.evidence import paper_page
from permille_lab.exports import page as exports
from permille_lab.federation import page as federation
from permille_lab.learning import page as learning
from permille_lab.measuring.cells import RESULTS
from permille_lab.people import page as people
from permille_lab.privacy import page as privacy
from permille_lab.quantization import page as quantization
from permille_lab.real import basis_page, curve_page
from permille_lab.real import page as real
from permille_lab.service import page as service
from permille_lab.sparse import page as sparse

_OUTPUT = Path("docs/results")
_PAGES: Mapping[str, Callable[[Path], dict[str, str]]] = {
    "basis": basis_page.tables,
    "decision": decision.tables,
    "engine": engine.tables,
    "estimators": learning.estimator_tables,
    "evidence": evidence.tables,
    "exports": exports.tables,
    "federation": federation.tables,
    "device": engine.device_tables,
    "inference": engine.inference_tables,
    "paper": paper_page.tables,
    "people": people.tables,
    "privacy": privacy.tables,
    "prompt-or-training": curve_page.tables,
    "quantizers": quantization.tables,
    "real-model": real.tables,
    "service": service.tables,
    "sparse": sparse.tables,
    "learning": learning.learning_tables,
    "zeroth-order": real.zeroth_order_tables,
}


def written(results: Path) -> dict[Path, str]:
    """Return the text of every file that is made from results, by its path in a checkout."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    found = {
        _OUTPUT / f"{name}.md": templates.get_template(f"{name}.md").render(**tables(results))
        for name, tables in _PAGES.items()
    }
    return found | {
        RESULTS / "evidence/verdicts.csv": evidence.verdict_rows(results),
        Path("docs/images/prompt-or-training.svg"): curve_page.picture(results),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all pages of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")
    root: Path = parser.parse_args(arguments).root
    for path, text in written(root / RESULTS).items():
        write_atomic(root / path, text.encode())
        print(root / path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
