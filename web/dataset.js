/** The images of Load Dataset and Dataset From Images: a button that shows them, and files dropped on the node. */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { datasetWords } from "./dataset_words.js"
import { Grid } from "./grid.js"
import { filesOfDrop } from "./upload.js"

const LOAD = "GraftLoadDataset"
const IN_MEMORY = "GraftDatasetFromImages"

/** Give a node of a dataset its button; other nodes stay as they are. */
export function addImages(node) {
    if (![LOAD, IN_MEMORY].includes(node.comfyClass)) return
    const words = datasetWords(app.extensionManager?.setting?.get?.("Comfy.Locale"))
    const load = node.comfyClass === LOAD
    const open = (files) => new Grid(api, words, load ? folderOf(node) : memoryOf(node, words)).open(files)
    const text = load ? words.showAndAdd : words.showImages
    const button = node.addWidget("button", text, null, () => open(), { serialize: false })
    button.tooltip = load ? words.showTip : words.memoryTip
    button.serialize = false
    if (!load) return rememberSet(node)
    acceptDrops(node, open)
    const leaveOut = node.widgets.find(({ name }) => name === "leave_out")
    if (!leaveOut) return
    leaveOut.hidden = true // the images have buttons for it
    leaveOut.computeLayoutSize = () => ({ minHeight: 0, maxHeight: 0, minWidth: 0 })
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
function memoryOf(node, words) {
    return {
        title: words.title,
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
