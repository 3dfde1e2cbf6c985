/**
 * Graft in ComfyUI's editor: a live panel on every Train Steps node, and a report on every node of Graft.
 *
 * The server decides which run a node shows: it compares the settings in the graph with those that runs were
 * queued with. Ids of workflows and nodes are not enough, because a graph opened from an image has the same ids.
 */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { addImages } from "./dataset.js"
import { Panel } from "./panel.js"
import { Report } from "./report.js"
import { wordsFor } from "./words.js"

const NODE = "GraftTrainSteps"

/** Node -> its Panel. */
const panels = new WeakMap()
/** Node -> its Report, and the Report's widget. */
const reports = new WeakMap()
/** Reports since the page was opened, by node and settings: Undo and other tabs create nodes again. */
const told = new Map()
/** The pending request to the server, and the run it was last asked about. */
let asking, askedFor

api.addEventListener("graft.run", ({ detail }) => show(detail)) // at once: a run may be under way
api.addEventListener("reconnected", () => refill()) // what the server told meanwhile is lost

// The panel shows the samples, so ComfyUI's own preview below it is hidden: here for Nodes 2.0.
const style = document.createElement("style")
style.textContent = `[data-testid^="node-body-"]:has(.graft-panel) > :is(img, img + div, div:has(img)) { display: none; }`
document.head.append(style)

app.registerExtension({
    name: "graft.trainSteps",

    nodeCreated(node) {
        if (!node.comfyClass?.startsWith("Graft")) return
        if (node.comfyClass === NODE) addPanel(node)
        addImages(node)
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
    // Hide ComfyUI's preview in the classic rendering too: the first line is for 0.33.
    node.hideOutputImages = true
    node.onDrawBackground = () => {}
    const { onRemoved } = node
    node.onRemoved = function (...args) {
        panel.remove()
        panels.delete(node)
        return onRemoved?.apply(this, args)
    }
}

/** Add a Panel or Report as a node's last widget; `scrolling` scrolls by itself. */
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

/** Nodes 2.0 of 0.3.75 rounds to three digits, and so a learning rate to 0. */
function showAllDigits(node) {
    for (const { type, options } of node.widgets ?? [])
        if (type === "number" && options?.precision > 3) options.maxFractionDigits ??= options.precision
}

/** Show the report of a node that has run. Nodes 2.0 of 0.3.75 ignores widgets added after the node. */
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

/** Remember a node's report with these settings; several nodes that ran at once make one request. */
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

/** Enlarge a node that is too small for its contents. */
function makeRoom(node) {
    const height = node.computeSize()[1]
    if (node.size[1] < height) node.setSize([node.size[0], height])
    noEdit(node)
    app.canvas?.setDirty(true, true)
}

/**
 * Write the node's size into ComfyUI's change tracker, so it doesn't count as an edit. Otherwise Undo reverts
 * it, we set it again, and Undo can never go further back.
 */
function noEdit(node) {
    const state = app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.activeState
    const subgraphs = state?.definitions?.subgraphs ?? []
    const nodes = [state, ...subgraphs].find((graph) => graph?.id && graph.id === node.graph?.id)?.nodes
    const saved = nodes?.find(({ id }) => String(id) === String(node.id))
    if (saved) saved.size = [...node.size]
}

/** Pass wheel and middle button on to the canvas, as ComfyUI's text boxes do; Nodes 2.0 does so by itself. */
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

/** Show the server's news of a run that a node already shows; for another run, ask which node shows it. */
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

/** Restore what every node showed: after a reload, when a workflow is opened, and when a run begins. */
async function refill() {
    const { runs, settings } = await ask()
    for (const [node, digest] of settings) {
        if (told.has(key(node, digest))) tell(node, told.get(key(node, digest)))
        if (runs.has(node)) panels.get(node)?.follow(runs.get(node))
    }
}

/** Return the runs that the nodes of this graph show, and the digests of their settings: two Maps by node. */
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

/** Return the node with an id like "5", or "12:3" inside subgraphs; undefined if there is none. */
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
