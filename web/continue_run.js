/** What the graph gets of a run: its nodes to train on, or its LoRA in a Load LoRA. */

import { app } from "../../scripts/app.js"
import { nodesAt } from "./subgraph.js"

const LOADERS = ["LoraLoader", "LoraLoaderModelOnly"]

/**
 * Open the graph of a run in a tab of its own, ready to go on: `found` is the server's {node, prompt, workflow,
 * how, steps}. Return its Train Steps.
 */
export async function continueRun(run, found) {
    const name = run.split("/").at(-1)
    if (found.workflow) await app.loadGraphData(structuredClone(found.workflow), true, true, name)
    else await app.loadApiJson(found.prompt, name)
    const node = nodesAt(app.rootGraph ?? app.graph, found.node).at(-1)
    if (!node) return null
    if (found.how === "more steps") set(node, "steps", found.steps)
    if (found.how === "from state") addState(node, run)
    show(node)
    return node
}

/** Put a LoRA into the Load LoRA that is selected, else into a new one in the middle of the view. */
export async function loadLora(name) {
    await app.refreshComboInNodes()
    const selected = Object.values(app.canvas.selected_nodes ?? {})
    const node = selected.find(({ comfyClass }) => LOADERS.includes(comfyClass)) ?? addLoader()
    const { values } = node.widgets.find((widget) => widget.name === "lora_name").options
    const listed = Array.isArray(values) && values.find((value) => value.replaceAll("\\", "/") === name)
    if (Array.isArray(values) && !listed) values.push(name)
    set(node, "lora_name", listed || name)
    app.canvas.selectNode(node)
    return node
}

function addLoader() {
    const node = LiteGraph.createNode(LOADERS[0])
    const [x, y, width, height] = app.canvas.ds.visible_area
    node.pos = [x + width / 2 - node.size[0] / 2, y + height / 2 - node.size[1] / 2]
    app.canvas.graph.add(node)
    return node
}

/** Start a Train Steps from the run's newest state, in a node above the others. */
function addState(node, run) {
    const { graph } = node
    const state = LiteGraph.createNode("GraftLoadTrainingState")
    const top = Math.min(...graph.nodes.map(({ pos }) => pos[1]), ...(graph.groups ?? []).map(({ pos }) => pos[1]))
    state.pos = [node.pos[0], top - state.size[1] - 60]
    graph.add(state)
    set(state, "name", run)
    state.connect(0, node, node.inputs.findIndex(({ name }) => name === "start"))
}

function set(node, name, value) {
    const widget = node.widgets.find((each) => each.name === name)
    widget.value = value
    widget.callback?.(value)
}

/** Select a node, and bring it into view at a size that can be read. */
function show(node) {
    app.canvas.setGraph?.(node.graph)
    app.canvas.selectNode(node)
    app.canvas.ds.scale = Math.max(0.8, app.canvas.ds.scale)
    app.canvas.centerOnNode(node)
    app.canvas.setDirty(true, true)
}
