/**
 * Graft in ComfyUI's editor: a live panel on every Train Steps node, and on every node of Graft what it tells.
 *
 * Which run a node shows, the server says: it compares the settings that stand here with those that runs were
 * queued with. The id of the workflow and the node's own do not tell, as a picture's graph has the same ids.
 */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { Panel } from "./panel.js"
import { Report } from "./report.js"
import { wordsFor } from "./words.js"

const NODE = "GraftTrainSteps"

/** Node -> its Panel. */
const panels = new WeakMap()
/** Node -> its Report, and the widget of that. */
const reports = new WeakMap()
/** What nodes have told since the page was opened, by node and settings: Undo and other tabs make nodes anew. */
const told = new Map()
/** A question to the server that is under way, and the run that it was last asked about. */
let asking, askedFor

api.addEventListener("graft.run", ({ detail }) => show(detail)) // at once: a run may be under way
api.addEventListener("reconnected", () => refill()) // what the server told meanwhile is lost

// The panel shows the samples. ComfyUI's own preview of them, below it, is left out: here for Nodes 2.0.
const style = document.createElement("style")
style.textContent = `[data-testid^="node-body-"]:has(.graft-panel) > :is(img, img + div, div:has(img)) { display: none; }`
document.head.append(style)

app.registerExtension({
    name: "graft.trainSteps",

    nodeCreated(node) {
        if (!node.comfyClass?.startsWith("Graft")) return
        if (node.comfyClass === NODE) addPanel(node)
        showAllDigits(node)
        addReport(node)
    },

    afterConfigureGraph() {
        return refill()
    },
})

function addPanel(node) {
    const panel = new Panel(api, words(), () => makeRoom(node))
    addElement(node, "graft_chart", words().chart, panel, panel.thumbnails)
    panel.element.classList.add("graft-panel")
    panels.set(node, panel)
    // No preview of ComfyUI's in the classic rendering either: the first for 0.33.
    node.hideOutputImages = true
    node.onDrawBackground = () => {}
    const { onRemoved } = node
    node.onRemoved = function (...args) {
        panel.remove()
        panels.delete(node)
        return onRemoved?.apply(this, args)
    }
}

/** Add what a Panel or Report shows as a node's last widget; `scrolling` scrolls by itself. */
function addElement(node, name, label, shown, scrolling) {
    const widget = node.addDOMWidget(name, name, shown.element, {
        serialize: false,
        hideOnZoom: false,
        getMinHeight: () => shown.minHeight,
        getMaxHeight: () => shown.maxHeight,
    })
    widget.serialize = false
    widget.label = label // ComfyUI's app mode shows it
    forward(shown.element, scrolling)
    return widget
}

/** Nodes 2.0 of 0.3.75 rounds to three digits, and a learning rate to nothing. */
function showAllDigits(node) {
    for (const { type, options } of node.widgets ?? [])
        if (type === "number" && options?.precision > 3) options.maxFractionDigits ??= options.precision
}

/** Show what the node tells when it has run. Nodes 2.0 of 0.3.75 sees no widget that comes later than the node. */
function addReport(node) {
    const report = new Report(node)
    const widget = addElement(node, "graft_text", words().report, report, report.element)
    widget.hidden = true
    reports.set(node, { report, widget })
    const { onExecuted } = node
    node.onExecuted = function (output, ...args) {
        const result = onExecuted?.call(this, output, ...args)
        if (Array.isArray(output?.text)) {
            const text = output.text.join("\n")
            tell(node, text)
            remember(node, text)
        }
        return result
    }
}

/** Keep what a node told with these settings; several that have run at once ask once. */
async function remember(node, text) {
    asking ??= ask().finally(() => (asking = undefined))
    const { settings } = await asking
    told.set(key(node, settings.get(node)), text)
}

function tell(node, text) {
    const { report, widget } = reports.get(node)
    report.show(text)
    widget.hidden = !text
    makeRoom(node)
}

/** Enlarge a node that has become too small for what it shows. */
function makeRoom(node) {
    const height = node.computeSize()[1]
    if (node.size[1] < height) node.setSize([node.size[0], height])
    noEdit(node)
    app.canvas?.setDirty(true, true)
}

/**
 * Write a node's size into the state that ComfyUI looks for edits from, so that it is no edit. Otherwise Undo
 * reverts it, it comes again, and Undo can never go further back.
 */
function noEdit(node) {
    const state = app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.activeState
    const subgraphs = state?.definitions?.subgraphs ?? []
    const nodes = [state, ...subgraphs].find((graph) => graph?.id && graph.id === node.graph?.id)?.nodes
    const saved = nodes?.find(({ id }) => String(id) === String(node.id))
    if (saved) saved.size = [...node.size]
}

/** Hand the canvas its wheel and middle button, as ComfyUI's text boxes do; Nodes 2.0 does so by itself. */
function forward(element, scrolling) {
    const to = (type, method, meant) =>
        element.addEventListener(type, (event) => {
            if (LiteGraph.vueNodesMode || !meant(event)) return
            if (type === "wheel") event.preventDefault()
            app.canvas[method](event)
        })
    to("wheel", "processMouseWheel", (event) => {
        const { ctrlKey, shiftKey, deltaX, deltaY } = event
        if (ctrlKey || !event.composedPath().includes(scrolling)) return true
        return shiftKey || Math.abs(deltaX) > Math.abs(deltaY)
            ? scrolling.scrollWidth <= scrolling.clientWidth
            : scrolling.scrollHeight <= scrolling.clientHeight
    })
    to("pointerdown", "processMouseDown", (event) => event.button === 1 && !event.composedPath()[0].closest("a"))
    to("pointermove", "processMouseMove", (event) => event.buttons & 4)
    to("pointerup", "processMouseUp", (event) => event.button === 1)
}

/** Show what the server tells of a run that a node here shows already; of another one, ask whether it is to. */
function show(live) {
    const graph = rootGraph()
    if (!live.workflow || live.workflow !== graph?.id) return
    const panel = panels.get(findNode(graph, live.node))
    if (!panel) return
    const shown = panel.live?.run === live.run && (panel.live.running || !live.running)
    if (shown) panel.follow({ ...live, same: panel.live.same })
    else if (askedFor !== live.run || !live.running) refill()
    askedFor = live.running ? live.run : undefined
}

/** Give every node what it showed, after a reload, when a workflow was opened, and when a run begins. */
async function refill() {
    const { runs, settings } = await ask()
    for (const [node, digest] of settings) {
        if (told.has(key(node, digest))) tell(node, told.get(key(node, digest)))
        if (runs.has(node)) panels.get(node)?.follow(runs.get(node))
    }
}

/** Return the runs that the nodes of this graph show, and digests of their settings: two Maps by node. */
async function ask() {
    const [runs, settings] = [new Map(), new Map()]
    const graph = rootGraph()
    try {
        const { output } = await app.graphToPrompt(graph)
        const nodes = Object.keys(output).map((id) => [id, findNode(graph, id)]) // those of now: others may come
        const body = JSON.stringify({ workflow: graph.id, prompt: output })
        const answer = await api.fetchApi("/graft/runs", { method: "POST", body })
        const found = await answer.json()
        for (const [id, node] of nodes) {
            if (reports.has(node)) settings.set(node, found.settings?.[id])
            if (found.runs?.[id]) runs.set(node, found.runs[id])
        }
    } catch (error) {
        console.debug("Graft: the server's runs could not be read.", error)
    }
    return { runs, settings }
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

function key(node, settings) {
    return [node.graph?.id, node.id, node.comfyClass, settings].join()
}

function words() {
    return wordsFor(app.extensionManager?.setting?.get?.("Comfy.Locale"))
}
