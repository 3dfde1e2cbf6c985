"""What holds for every node: inputs that its widgets cannot have are refused, errors can be written."""

from __future__ import annotations

import traceback

import pytest
import torch
from comfy_api.latest import io

from graft.nodes.all_nodes import ALL_NODES
from graft.nodes.node import Files, Node
from graft.tests.support.runs import assert_same
from graft.training.run.execute import execute
from graft.training.run.folder import Run

from ..support.adapter_cases import METHODS, adapter_config, train_config
from ..support.tiny import TinyDataset, TinyDenoiser

HALF = "\ud83d"
SCHEMAS = {node: node.define_schema() for node in ALL_NODES}


class Failing:
    """Something on a wire that fails when it is looked at."""

    def __getattr__(self, name):
        raise ValueError(f"{HALF}: no {name}")


def inputs(kind, *, but=()):
    """Return (node, name of an input) for every input of a kind."""
    return [
        pytest.param(node, entry.id, id=f"{node.__name__}-{entry.id}")
        for node, schema in SCHEMAS.items()
        for entry in schema.inputs
        if isinstance(entry, kind) and not (but and isinstance(entry, but))
    ]


def sockets(node):
    return [entry.id for entry in SCHEMAS[node].inputs if not isinstance(entry, io.WidgetInput)]


def refused(node, name, value):
    """Return what the node says to `value` as its input `name`."""
    value = [value] if SCHEMAS[node].is_input_list else value
    with pytest.raises(ValueError) as raised:
        node.execute(**{name: value})
    text = "".join(traceback.format_exception(raised.value))
    assert text.encode() and str(raised.value).startswith(f"{name}: ") and len(str(raised.value)) < 2000
    return str(raised.value)


@pytest.mark.parametrize("node", ALL_NODES, ids=lambda node: node.__name__)
def test_every_node_is_one_of_grafts(node):
    assert issubclass(node, Node)


@pytest.mark.feature(103)
@pytest.mark.parametrize("value", [7, {"a": [1]}, ["1", 0], "no such", HALF, "x" * 5000], ids=str)
@pytest.mark.parametrize(("node", "name"), inputs(io.Combo.Input, but=Files))
def test_a_menu_takes_only_what_it_offers_also_from_a_client(node, name, value):
    options = next(entry.options for entry in SCHEMAS[node].inputs if entry.id == name)
    assert refused(node, name, value).endswith(f"is not one of {', '.join(options)}.")


@pytest.mark.parametrize("value", [7, {"a": [1]}, ["1", 0], "x" * 5000], ids=str)
@pytest.mark.parametrize(("node", "name"), inputs(Files))
def test_a_menu_of_files_takes_only_names(node, name, value):
    assert refused(node, name, value).endswith("is not a file name; choose one from the menu.")


@pytest.mark.parametrize(("node", "name"), inputs(io.String.Input))
def test_no_text_may_hold_half_a_letter(node, name):
    assert "holds half of a letter" in refused(node, name, f"a {HALF}")


@pytest.mark.parametrize("node", [node for node in ALL_NODES if sockets(node)], ids=lambda n: n.__name__)
def test_an_error_of_a_node_can_be_written(node):
    widgets = {
        entry.id: entry.options[0] if isinstance(entry, io.Combo.Input) else entry.default
        for entry in SCHEMAS[node].inputs
        if isinstance(entry, io.WidgetInput) and entry.default is not None
    }
    given = {**widgets, **{name: Failing() for name in sockets(node)}}
    if SCHEMAS[node].is_input_list:
        given = {name: [value] for name, value in given.items()}
    with pytest.raises(Exception) as raised:  # noqa: PT011 (any, as nodes fail in many ways)
        node.execute(**given)
    assert "".join(traceback.format_exception(raised.value)).encode()


def test_what_a_node_says_of_changed_files_can_be_written(graft_nodes):
    with pytest.raises(ValueError, match=r"\\ud83d: no such file") as raised:
        graft_nodes["GraftInspectLora"].fingerprint_inputs(lora_name=HALF)
    assert str(raised.value).encode()


def test_an_input_on_a_wire_is_not_known_when_changes_are_asked_for(graft_nodes):
    assert graft_nodes["GraftBuildLora"].fingerprint_inputs(start_size=None, rank=None) == ""


def test_an_optional_input_that_is_null_is_left_out_and_a_required_one_refused():
    class Reporting(Node):
        @classmethod
        def define_schema(cls):
            optional = {"x": True, "y": False}
            menus = [io.Combo.Input(i, options=["a", "b"], optional=may) for i, may in optional.items()]
            return io.Schema(node_id="Reporting", display_name="Report", inputs=menus, outputs=[])

        @classmethod
        def execute(cls, x="a", y="a"):
            return x + y

    assert Reporting.execute(x=None, y="b") == "ab"
    with pytest.raises(ValueError, match="y: missing; Report needs a value"):
        Reporting.execute(x="a", y=None)


class Training(Node):
    """Trains the tiny denoiser for two steps."""

    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="Training", display_name="Train", inputs=[], outputs=[])

    @classmethod
    def execute(cls, folder, method):
        config = train_config(adapter_config(method))
        return execute(Run(folder), TinyDenoiser(), TinyDataset(), config, None, steps=2)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_trained_in_inference_mode_as_outside(method, tmp_path):
    with torch.inference_mode():  # as ComfyUI runs nodes
        inside = Training.execute(tmp_path / "inside", method)
        assert torch.is_inference_mode_enabled()
    assert_same(inside.load(), Training.execute(tmp_path / "outside", method).load())


def test_what_a_node_makes_in_inference_mode_can_be_trained_on():
    class Making(Node):
        @classmethod
        def define_schema(cls):
            return io.Schema(node_id="Making", display_name="Make", inputs=[], outputs=[])

        @classmethod
        def execute(cls):
            return torch.ones(1), torch.is_grad_enabled()

    with torch.inference_mode():
        made, keeps_graphs = Making.execute()
    assert not made.is_inference() and not keeps_graphs
