/** The images of Load Dataset and Dataset From Images: a button that shows them, and files dropped on the node. */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { datasetWords } from "./dataset_words.js"
import { Grid } from "./grid.js"
import { nodesAt } from "./subgraph.js"
import { filesOfDrop } from "./upload.js"

const LOAD = "GraftLoadDataset"
const IN_MEMORY = "GraftDatasetFromImages"
/** Inputs that take datasets. */
const DATASETS = /^(dataset(_\d)?|positive|negative)$/

/** Give a node of a dataset its button; other nodes stay as they are. */
export function addImages(node) {
    if (![LOAD, IN_MEMORY].includes(node.comfyClass)) return
    const { showAndAdd, showImages, showTip, memoryTip } = words()
    const load = node.comfyClass === LOAD
    const open = (files) => openImages(sourceOf(node), files)
    const button = node.addWidget("button", load ? showAndAdd : showImages, null, () => open(), { serialize: false })
    button.tooltip = load ? showTip : memoryTip
    button.serialize = false
    if (!load) return rememberSet(node)
    acceptDrops(node, open)
    const leaveOut = node.widgets.find(({ name }) => name === "leave_out")
    if (!leaveOut) return
    leaveOut.hidden = leaveOut.options.hidden = true // the images have buttons for it
    leaveOut.computeLayoutSize = () => ({ minHeight: 0, maxHeight: 0, minWidth: 0 })
}

/** Open the dialog with the images of a source of Grid; the others are as Grid takes them. */
export function openImages(source, files, report) {
    return new Grid(api, words(), source, report).open(files)
}

/** Return the sources of Grid that a node's dataset was made of, in their order; null for one without images. */
export async function originsOf(node, input) {
    const graph = app.rootGraph ?? app.graph
    const { output } = await app.graphToPrompt(graph)
    const leaves = (id) => {
        const { inputs, class_type } = output[id] ?? { inputs: {} }
        const links = Object.entries(inputs).filter(([name, value]) => DATASETS.test(name) && Array.isArray(value))
        return links.length ? links.flatMap(([, [from]]) => leaves(from)) : [class_type && id]
    }
    return leaves(idOf(node, output)).map((id) => {
        const leaf = nodesAt(graph, id).at(-1)
        return leaf?.comfyClass === LOAD || leaf?.graftSet ? sourceOf(leaf) : null
    })
}

function sourceOf(node) {
    return node.comfyClass === LOAD ? folderOf(node) : memoryOf(node)
}

/** Let files be dropped on the node, in both renderings. */
function acceptDrops(node, open) {
    node.onDragOver = (event) => [...(event.dataTransfer?.items ?? [])].some(({ kind }) => kind === "file")
    node.onDragDrop = (event) => {
        if (!event.dataTransfer?.files?.length) return false
        filesOfDrop(event.dataTransfer).then(open)
        return true
    }
}

/** Return the Grid's source for a Load Dataset. */
function folderOf(node) {
    const widget = (name) => node.widgets.find((each) => each.name === name)
    const set = (name, value) => {
        widget(name).value = value
        widget(name).callback?.(value)
        node.graph?.change?.()
        app.canvas?.setDirty(true, true)
    }
    return {
        get folder() {
            return String(widget("folder").value ?? "")
        },
        get title() {
            return this.folder
        },
        async setFolder(name) {
            const { values } = widget("folder").options
            if (Array.isArray(values) && !values.includes(name)) values.push(name)
            if (this.folder !== name) set("folder", name)
        },
        get leaveOut() {
            return String(widget("leave_out").value ?? "").split("\n").map((line) => line.trim()).filter(Boolean)
        },
        setLeaveOut(lines) {
            set("leave_out", lines.join("\n"))
        },
        async ask() {
            const { output } = await app.graphToPrompt(app.rootGraph ?? app.graph)
            return { prompt: output, node: idOf(node, output) }
        },
        url(row) {
            const query = new URLSearchParams({ folder: this.folder, key: row.key, v: row.stamp })
            return api.apiURL(`/graft/dataset/thumbnail?${query}`)
        },
    }
}

/** Return the Grid's source for a Dataset From Images: what its last execution made. */
function memoryOf(node) {
    return {
        title: words().title,
        async ask() {
            return { set: node.graftSet ?? "" }
        },
        url(row) {
            return api.apiURL(`/graft/dataset/thumbnail?${new URLSearchParams({ set: node.graftSet, key: row.key })}`)
        },
    }
}

function rememberSet(node) {
    const { onExecuted } = node
    node.onExecuted = function (output, ...args) {
        if (output?.graft_set) node.graftSet = output.graft_set[0]
        return onExecuted?.call(this, output, ...args)
    }
}

/** Return a node's id in a graph in API form, where those in subgraphs have ids like "12:3". */
function idOf(node, output) {
    const own = String(node.id)
    if (output[own]?.class_type === node.comfyClass && (node.graph?.isRootGraph ?? true)) return own
    const inside = Object.keys(output).filter((id) => id.endsWith(`:${own}`) && output[id].class_type === node.comfyClass)
    return inside[0] ?? own
}

export function words() {
    return datasetWords(app.extensionManager?.setting?.get?.("Comfy.Locale"))
}
