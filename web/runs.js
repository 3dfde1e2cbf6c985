/** Every run of this installation in ComfyUI's sidebar: to look at, compare, continue, use and delete. */

import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { continueRun, loadLora } from "./continue_run.js"
import { baseStyle, make } from "./dialog.js"
import { iconButton, iconStyle } from "./icons.js"
import { RunList, sizeText } from "./run_list.js"
import { differences } from "./run_settings.js"
import { RunView } from "./run_view.js"
import { runsWords } from "./runs_words.js"

/** Milliseconds between two lists while a run is under way. */
const EVERY = 3000
/** Events that are not the canvas's. */
const KEPT = ["keydown", "keyup", "copy", "paste", "cut"]
const STYLE = `${baseStyle}${iconStyle}${RunList.style}
:host { display: flex; flex-direction: column; height: 100%; color: var(--input-text, #ddd);
        font: 13px/1.4 system-ui, sans-serif; }
header { display: flex; align-items: center; gap: 8px; padding: 12px 12px 8px; }
h2 { flex: 1; margin: 0; font-size: 14px; font-weight: 600; }
h2 span { margin-left: 6px; font-weight: 400; font-size: 12px; }
.bar { display: flex; gap: 6px; padding: 0 12px 8px; }
.bar input { flex: 1; min-width: 0; padding: 5px 8px; }
.note { margin: 8px 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
.note:empty { display: none; }`

/** Graft's routes. */
const server = {
    url: (route, query) => api.apiURL(`/graft/${route}?${new URLSearchParams(query)}`),
    get: (route, query = {}) => ask(`/graft/${route}?${new URLSearchParams(query)}`),
    post: (route, body) => ask(`/graft/${route}`, { method: "POST", headers: JSON_TYPE, body: JSON.stringify(body) }),
}
const JSON_TYPE = { "Content-Type": "application/json" }

async function ask(path, options) {
    const answer = await api.fetchApi(path, options)
    const found = await answer.json().catch(() => ({}))
    if (!answer.ok) throw new Error(found.error ?? `${answer.status} ${answer.statusText}`)
    return found
}

class Runs {
    constructor(container) {
        this.locale = app.extensionManager?.setting?.get?.("Comfy.Locale") || "en"
        const words = (this.words = runsWords(this.locale))
        container.style.height = "100%"
        const root = container.shadowRoot ?? container.attachShadow({ mode: "open" })
        this.count = make("span", { role: "status" })
        this.search = make("input", { type: "search", placeholder: words.search, ariaLabel: words.search })
        this.search.addEventListener("input", () => this.#render())
        this.compare = iconButton("compare", words.compare(0), () => this.#open(this.#ticked))
        const refresh = iconButton("refresh", words.refresh, () => this.load(), true)
        this.note = make("p", { className: "note", role: "status", textContent: words.loading })
        this.list = new RunList(words, {
            locale: this.locale,
            open: (row) => this.#open([row]),
            onTick: () => this.#render(),
            url: ({ run, sample }) => server.url("sample", { run, name: sample, small: 1 }),
        })
        this.rows = []
        root.replaceChildren(
            make("style", { textContent: STYLE }),
            make("header", {}, make("h2", {}, words.runs, this.count), refresh),
            make("div", { className: "bar" }, this.search, this.compare),
            this.note,
            this.list.element,
        )
        for (const type of KEPT) container.addEventListener(type, (event) => event.stopPropagation())
        this.load()
    }

    /** Ask for all runs and show them. */
    async load() {
        clearTimeout(this.later)
        this.later = undefined
        try {
            this.rows = (await server.get("runs/all")).runs
            this.note.textContent = this.rows.length ? "" : this.words.none
        } catch (error) {
            this.note.textContent = `${this.words.lost} (${error.message})`
        }
        if (!this.removed) this.#render()
    }

    /** Ask again, but not more often than every few seconds. */
    loadSoon() {
        this.later ??= setTimeout(() => this.load(), EVERY)
    }

    remove() {
        this.removed = true
        clearTimeout(this.later)
    }

    #render() {
        const { words, rows, list } = this
        const wanted = this.search.value.trim().toLowerCase()
        list.show(rows.filter((row) => [row.run, ...differences(row)].join(" ").toLowerCase().includes(wanted)))
        const ticked = this.#ticked.length
        this.compare.lastChild.textContent = this.compare.title = words.compare(ticked)
        this.compare.disabled = ticked < 2
        const bytes = rows.reduce((sum, row) => sum + row.bytes, 0)
        this.count.textContent = rows.length ? words.total(rows.length, sizeText(bytes)) : ""
    }

    get #ticked() {
        return this.rows.filter(({ run }) => this.list.ticked.has(run))
    }

    #open(rows) {
        const { words } = this
        const does = {
            async continueRun(row) {
                const found = await server.get("runs/graph", { run: row.run })
                const node = await continueRun(row.run, found)
                const { value } = node?.widgets.find(({ name }) => name === "steps") ?? {}
                tell(words.ready, words.pressRun(found.how, value, row))
            },
            async useLora(row) {
                const { name } = await server.post("runs/lora", { run: row.run })
                await loadLora(name)
                tell(words.loraReady, name)
            },
        }
        new RunView(words, rows, { server, does, onChange: () => this.load() }).open()
    }
}

function tell(summary, detail) {
    app.extensionManager?.toast?.add?.({ severity: "info", summary, detail, life: 8000 })
}

let shown = null
for (const event of ["graft.run", "reconnected"]) api.addEventListener(event, () => shown?.loadSoon())

app.registerExtension({
    name: "graft.runs",

    setup() {
        const words = runsWords(app.extensionManager?.setting?.get?.("Comfy.Locale"))
        app.extensionManager?.registerSidebarTab?.({
            id: "graft-runs",
            icon: "pi pi-chart-line",
            title: words.tab,
            tooltip: words.runs,
            type: "custom",
            render(container) {
                shown?.remove()
                shown = new Runs(container)
            },
            destroy() {
                shown?.remove()
                shown = null
            },
        })
    },
})
