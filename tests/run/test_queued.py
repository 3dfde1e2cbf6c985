"""What a queued graph asks for, as digests of its nodes."""

from __future__ import annotations

import pytest

from graft.training.run.queued import run_settings, settings_of
from graft.training.user_error import UserError


def chain(count, last):
    """Nodes each of which is wired to the next one."""
    wires = [[str(n + 1), 0] for n in range(count - 1)] + [last]
    return {str(n): {"class_type": "A", "inputs": {"x": wire}} for n, wire in enumerate(wires)}


def test_a_node_is_known_by_all_that_leads_to_it():
    one, two = settings_of(chain(3, 1)), settings_of(chain(3, 2))
    assert len(set(one.values())) == 3 and not set(one.values()) & set(two.values())
    assert settings_of(chain(3, 1.0)) == one and settings_of(chain(3, 1.5)) != one
    assert run_settings(chain(3, 1), "0") == one["0"] and run_settings(chain(3, 1), "9") == ""


def test_a_graph_with_a_circle_is_read_and_one_that_is_nested_too_deeply_refused():
    assert len(set(settings_of(chain(3, ["0", 0])).values())) == 3
    with pytest.raises(UserError, match="nested too deeply"):
        settings_of(chain(5000, 1))
    assert run_settings(chain(5000, 1), "0") == ""


@pytest.mark.parametrize(
    "graph", [[], None, {"1": []}, {"1": {"inputs": [1]}}, {"1": {"inputs": {}}, "2": []}], ids=str
)
def test_what_is_no_graph_is_refused(graph):
    with pytest.raises(UserError, match="not a graph in API form"):
        settings_of(graph)
