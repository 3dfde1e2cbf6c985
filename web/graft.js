/**
 * Graft in ComfyUI's editor: a live panel on every Train Steps node.
 *
 * A run belongs to a node by the id of its workflow and the node's own id, which the server sends with every
 * message and remembers for pages that are opened later. Runs of other workflows are ignored.
 */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { Panel } from "./panel.js"
import { wordsFor } from "./words.js"

const NODE = "GraftTrainSteps"
const REMEMBERED = "graft_run"

/** Node -> its Panel. */
const panels = new WeakMap()

api.addEventListener("graft.run", ({ detail }) => show(detail)) // at once: a run may be under way

app.registerExtension({
    name: "graft.trainSteps",

    nodeCreated(node) {
        if (node.comfyClass === NODE) addPanel(node)
    },

    afterConfigureGraph() {
        return refill()
    },
})

function addPanel(node) {
    const locale = app.extensionManager?.setting?.get?.("Comfy.Locale")
    const panel = new Panel(api, wordsFor(locale), () => makeRoom(node))
    const widget = node.addDOMWidget("graft_chart", "graft_chart", panel.element, {
        serialize: false,
        hideOnZoom: false,
        getMinHeight: () => panel.minHeight,
    })
    widget.serialize = false
    panels.set(node, panel)
    // The panel shows the samples. ComfyUI's own preview of them, below it, is left out: the first for 0.33.
    node.hideOutputImages = true
    node.onDrawBackground = () => {}
    const { onRemoved } = node
    node.onRemoved = function (...args) {
        panel.remove()
        panels.delete(node)
        return onRemoved?.apply(this, args)
    }
}

/** Enlarge a node that has become too small for what it shows. */
function makeRoom(node) {
    const height = node.computeSize()[1]
    if (node.size[1] < height) node.setSize([node.size[0], height])
    app.canvas?.setDirty(true, true)
}

/** Show what the server tells of a run on the node that it belongs to, if that is in this graph. */
function show(live) {
    const graph = rootGraph()
    if (!live.workflow || live.workflow !== graph?.id) return
    const node = findNode(graph, live.node)
    const panel = panels.get(node)
    if (!panel) return
    node.properties[REMEMBERED] = { node: node.id, run: live.run, last: live.last }
    panel.follow({ ...live })
}

/** Give every panel its run again, after a reload or when a workflow was opened. */
async function refill() {
    const graph = rootGraph()
    for (const node of trainNodes(graph)) {
        const remembered = node.properties?.[REMEMBERED]
        if (String(remembered?.node) === String(node.id)) panels.get(node)?.follow({ ...remembered, running: false })
    }
    try {
        const answer = await api.fetchApi("/graft/runs")
        if (!answer.ok || graph !== rootGraph()) return
        const { runs } = await answer.json()
        for (const live of runs) show(live)
    } catch (error) {
        console.debug("Graft: the server's runs could not be read.", error)
    }
}

function rootGraph() {
    return app.rootGraph ?? app.graph
}

/** Return the node of an id like "5", or "12:3" inside subgraphs; undefined where there is none. */
function findNode(graph, id) {
    let node
    for (const part of String(id ?? "").split(":")) {
        node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part))
        graph = node?.subgraph
    }
    return node
}

function trainNodes(graph) {
    return (graph?.nodes ?? []).flatMap((node) =>
        node.subgraph ? trainNodes(node.subgraph) : node.comfyClass === NODE ? [node] : [],
    )
}
