"""axe-core in a page: what of an element people with a screen reader or a keyboard cannot use."""

from __future__ import annotations

import json
from importlib.resources import files

AXE = files("axe_core_python") / "axe.min.js"
SERIOUS = ("serious", "critical")


def serious_faults(page, element):
    """Return [rule, HTML, remedy] of each serious fault in the element that a JavaScript expression gives."""
    if not page.evaluate("!!window.axe"):
        page.evaluate(AXE.read_text("utf-8") + "; true")
    found = page.evaluate(f"axe.run({element}).then(found => JSON.stringify(found.violations))")
    return [
        (fault["id"], node["html"][:200], node["failureSummary"])
        for fault in json.loads(found)
        if fault["impact"] in SERIOUS
        for node in fault["nodes"]
    ]
