/**
 * Graft in ComfyUI's editor: a live panel on every Train Steps node, and a report on every node of Graft.
 *
 * The server decides which run a node shows: it compares the settings in the graph with those that runs were
 * queued with. Ids of workflows and nodes are not enough, because a graph opened from an image has the same ids.
 */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { addImages, words as datasetWords } from "./dataset.js"
import { Gallery } from "./gallery.js"
import { Panel } from "./panel.js"
import { Report } from "./report.js"
import { sortTemplates } from "./templates.js"
import { allNodes, expose, holds, nodesAt } from "./subgraph.js"
import { wordsFor } from "./words.js"

const NODE = "GraftTrainSteps"
const REPORT = "GraftDatasetReport"

/** Node -> its Panel. */
const panels = new WeakMap()
/** Node -> its Report, and the Report's widget. */
const reports = new WeakMap()
/** Node -> its Gallery, and the Gallery's widget. */
const galleries = new WeakMap()
/** What nodes put out since the page was opened, by node and settings: Undo and other tabs create nodes again. */
const told = new Map()
/** The pending request to the server, and the run it was last asked about. */
let asking, askedFor
/** The timer of the next look ahead. */
let looking

api.addEventListener("graft.run", ({ detail }) => show(detail)) // at once: a run may be under way
api.addEventListener("execution_error", ({ detail }) => showError(detail))
api.addEventListener("execution_start", () => forgetErrors())
api.addEventListener("reconnected", () => refill()) // what the server told meanwhile is lost
api.addEventListener("graphChanged", () => lookAheadSoon())
sortTemplates(api)

// The panel shows the samples, so ComfyUI's own preview below it is hidden: here for Nodes 2.0.
const style = document.createElement("style")
style.textContent = `[data-testid^="node-body-"]:has(.graft-panel) > :is(img, img + div, div:has(img)) { display: none; }`
document.head.append(style)

app.registerExtension({
    name: "graft.trainSteps",

    setup() {
        app.canvas.canvas.addEventListener("subgraph-converted", ({ detail: { subgraphNode } }) => {
            if (!holds(subgraphNode, NODE)) return
            expose(subgraphNode, NODE)
            showOutside(subgraphNode)
            subgraphNode.setSize([Math.max(subgraphNode.size[0], 360), subgraphNode.size[1]])
            refill()
        })
    },

    nodeCreated(node) {
        if (node.subgraph) setTimeout(() => showOutside(node)) // its nodes come later
        if (!node.comfyClass?.startsWith("Graft")) return
        if (node.comfyClass === NODE) addPanel(node)
        if (node.comfyClass === REPORT) addGallery(node)
        addImages(node)
        showAllDigits(node)
        addReport(node)
    },

    afterConfigureGraph() {
        enlargeNotes(rootGraph())
        allNodes(rootGraph()).forEach(showOutside)
        return refill()
    },
})

/** Notes of Graft's templates have letters that can be read at the first view. */
function enlargeNotes(graph) {
    for (const { properties, widgets } of graph?.nodes ?? [])
        if (properties?.graft === "note")
            widgets?.[0]?.element?.style.setProperty("--comfy-textarea-font-size", "15px")
}

function addPanel(node) {
    const panel = new Panel(api, words(), () => makeRoom(node))
    addElement(node, "graft_chart", words().chart, panel, panel.thumbnails)
    panels.set(node, panel)
    const { onRemoved } = node
    node.onRemoved = function (...args) {
        panel.remove()
        panels.delete(node)
        return onRemoved?.apply(this, args)
    }
    hidePreview(node, panel.element)
}

function addGallery(node) {
    const gallery = new Gallery(node, datasetWords())
    const widget = addElement(node, "graft_gallery", datasetWords().title, gallery, gallery.list)
    widget.hidden = true
    galleries.set(node, { gallery, widget })
    hidePreview(node, gallery.element)
}

/** Hide ComfyUI's own preview of a node's images below an element that shows them. */
function hidePreview(node, element) {
    element.classList.add("graft-panel")
    if (node.subgraph) return
    node.hideOutputImages = true // the classic rendering of 0.33; the next line is for older ones
    node.onDrawBackground = () => {}
}

/** Show the chart on the node of a subgraph too, as the node that trains is not seen. */
function showOutside(node) {
    if (!panels.has(node) && holds(node, NODE)) addPanel(node)
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
    const report = new Report(node, words().report)
    const widget = addElement(node, "graft_text", words().report, report, report.element)
    widget.hidden = true
    reports.set(node, { report, widget })
    const { onExecuted } = node
    node.onExecuted = function (output, ...args) {
        const result = onExecuted?.call(this, output, ...args)
        if (Array.isArray(output?.text)) {
            recall(node, output)
            remember(node, output)
        }
        return result
    }
}

/** Remember a node's output with these settings; several nodes that ran at once make one request. */
async function remember(node, output) {
    asking ??= ask().finally(() => (asking = undefined))
    const { settings } = await asking
    told.set(key(node, settings.get(node)), output)
}

/** Show what a node put out. */
async function recall(node, output) {
    if (galleries.has(node)) {
        const { gallery, widget } = galleries.get(node)
        await gallery.show(output.graft_report ?? [])
        widget.hidden = !gallery.rows.length
    }
    tell(node, output.text.join("\n"))
}

function tell(node, text, bad = false) {
    const { report, widget } = reports.get(node)
    report.show(text, bad)
    widget.hidden = !text
    makeRoom(node)
}

/** Show on its node what a run ended with: ComfyUI hides it behind a button. */
function showError({ node_id, exception_message }) {
    const node = nodesAt(rootGraph(), node_id).at(-1)
    if (reports.has(node)) tell(node, String(exception_message).trim(), true)
}

function forgetErrors() {
    for (const node of allNodes(rootGraph())) if (reports.get(node)?.report.bad) tell(node, "")
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
    const found = panelsAt(graph, live.node)
    if (!found.length) return
    const shown = found.every((panel) => panel.live?.run === live.run && (panel.live.running || !live.running))
    if (shown) for (const panel of found) panel.follow({ ...live, same: panel.live.same })
    else if (askedFor !== live.run || !live.running) refill()
    askedFor = live.running ? live.run : undefined
}

/** Restore what every node showed: after a reload, when a workflow is opened, and when a run begins. */
async function refill() {
    const { runs, settings } = await ask()
    for (const [node, digest] of settings) {
        if (told.has(key(node, digest))) recall(node, told.get(key(node, digest)))
    }
    for (const [panel, run] of runs) panel.follow(run)
    lookAheadSoon()
}

/** Show before Run what the runs of this graph will take, once edits have come to rest. */
function lookAheadSoon() {
    clearTimeout(looking)
    looking = setTimeout(lookAhead, 600)
}

async function lookAhead() {
    const graph = rootGraph()
    if (!allNodes(graph).some(({ comfyClass }) => comfyClass === NODE)) return
    try {
        const { output } = await app.graphToPrompt(graph)
        const body = JSON.stringify({ prompt: output })
        const answer = await api.fetchApi("/graft/before", { method: "POST", body })
        const found = answer.ok ? await answer.json() : {}
        for (const id in found) for (const panel of panelsAt(graph, id)) panel.expect(found[id])
    } catch (error) {
        console.debug("Graft: nothing is known before the run.", error)
    }
}

/** Return the runs that this graph's panels show, and the digests of its nodes' settings: two Maps. */
async function ask() {
    const [runs, settings] = [new Map(), new Map()]
    const graph = rootGraph()
    try {
        const { output } = await app.graphToPrompt(graph)
        const ids = Object.keys(output) // those of now: others may come
        const nodes = ids.map((id) => [id, nodesAt(graph, id).at(-1), panelsAt(graph, id)])
        const body = JSON.stringify({ workflow: graph.id, prompt: output })
        const answer = await api.fetchApi("/graft/runs", { method: "POST", body })
        const found = await answer.json()
        for (const [id, node, shown] of nodes) {
            if (reports.has(node)) settings.set(node, found.settings?.[id])
            const run = found.runs?.[id]
            // Of two in a subgraph, its panel shows the one that trains.
            for (const panel of run ? shown : []) if (!runs.get(panel)?.running) runs.set(panel, run)
        }
    } catch (error) {
        console.debug("Graft: the server's runs could not be read.", error)
    }
    return { runs, settings }
}

function rootGraph() {
    return app.rootGraph ?? app.graph
}

/** Return the panels of a node and of the subgraphs that it is in. */
function panelsAt(graph, id) {
    return nodesAt(graph, id).map((node) => panels.get(node)).filter(Boolean)
}

function key(node, settings) {
    return [node.graph?.id, node.id, node.comfyClass, settings].join()
}

function words() {
    return wordsFor(app.extensionManager?.setting?.get?.("Comfy.Locale"))
}
