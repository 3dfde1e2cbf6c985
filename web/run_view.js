/** One run, or several beside one another: curves, sample images by step, settings, and what can be done. */

import { PALETTE, drawCurves, stepUnder } from "./curves.js"
import { make, openDialog } from "./dialog.js"
import { icon, iconButton, iconStyle } from "./icons.js"
import { differences, sizeText, plain, told } from "./run_list.js"
import { Series, short } from "./series.js"

const STYLE = `${iconStyle}
header { display: flex; align-items: center; gap: 10px; padding: 12px 16px; }
h2, h3 { margin: 0; font-size: 16px; font-weight: 600; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
h2 { flex: 1; }
h3 { font-size: 14px; }
h3::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 50%;
             background: var(--color); }
.scroll { flex: 1; overflow-y: auto; padding: 0 16px 16px; }
.chart { position: relative; height: 220px; border-radius: 8px; background: var(--comfy-input-bg, #1c1c1c); }
canvas { position: absolute; inset: 0; width: 100%; height: 100%; }
.chart button { position: absolute; top: 6px; right: 8px; }
.chart p { position: absolute; inset: 0; display: grid; place-items: center; margin: 0; }
button[aria-pressed="true"] { border-color: #5aa9ff; background: rgb(90 169 255 / 0.18); }
.bar { display: flex; align-items: center; gap: 12px; padding: 12px 0; font-variant-numeric: tabular-nums; }
.bar input { flex: 1; accent-color: #1668c7; }
.runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px; padding-top: 12px; }
.runs > section { display: flex; flex-direction: column; gap: 8px; min-width: 0; padding: 10px;
                  border: 1px solid var(--border-color, #4e4e4e); border-radius: 8px; }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); gap: 6px; }
.sheet img { display: block; width: 100%; border-radius: 6px; }
.runs.one .sheet { grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); }
.actions { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-top: auto; }
button.danger:hover:enabled { border-color: #e5534b; background: rgb(229 83 75 / 0.2); }
.differs { color: #ffc46b; }
[role="status"]:empty { display: none; }
.bad { color: #ff8b82; }
details { margin-top: 14px; }
summary { cursor: pointer; }
table { width: 100%; margin-top: 8px; border-collapse: collapse; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--border-color, #4e4e4e); text-align: left; overflow-wrap: anywhere; }
`

export class RunView {
    /**
     * `server` asks Graft's routes: {get(route, query), post(route, body), url(route, query)}. `actions` are
     * {continueRun(row), useLora(row)}; `onChange` is called when a run was deleted or asked for something.
     */
    constructor(words, rows, { server, actions, onChange }) {
        Object.assign(this, { words, rows, server, actions, onChange })
        this.series = rows.map(() => new Series())
        this.samples = rows.map(() => [])
        this.hover = null
        this.log = false
    }

    async open() {
        const { words, rows } = this
        const title = rows.length === 1 ? rows[0].name : words.comparing(rows.length)
        const opened = openDialog(title, STYLE, () => this.observer.disconnect())
        this.close = opened.close
        this.canvas = make("canvas", { role: "img", ariaLabel: words.curves })
        this.note = make("p", { textContent: words.loading })
        const log = make("button", { type: "button", textContent: words.log, ariaPressed: "false" })
        log.addEventListener("click", () => {
            this.log = !this.log
            log.ariaPressed = String(this.log)
            this.#draw()
        })
        this.slider = make("input", { type: "range", min: 0, value: 0, ariaLabel: words.sampleStep })
        this.slider.addEventListener("input", () => this.#showSheets())
        this.at = make("span")
        this.bar = make("div", { className: "bar", hidden: true }, icon("images"), this.at, this.slider)
        this.columns = rows.map((row, i) => this.#column(row, i))
        this.table = make("div")
        opened.dialog.append(
            make("header", {}, make("h2", { textContent: title }), iconButton("close", words.close, opened.close, true)),
            make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: title },
                make("div", { className: "chart" }, this.canvas, this.note, log), this.bar,
                make("div", { className: rows.length === 1 ? "runs one" : "runs" }, ...this.columns.map(({ element }) => element)),
                this.table),
        )
        this.canvas.addEventListener("pointermove", (event) => this.#point(event.offsetX))
        this.canvas.addEventListener("pointerleave", () => this.#point(null))
        this.observer = new ResizeObserver(() => this.#draw())
        this.observer.observe(this.canvas)
        await Promise.all([...rows.map((row, i) => this.#load(row, i)), this.#showSettings()])
        this.note.textContent = this.series.some(({ steps }) => steps.length) ? "" : words.noSteps
        this.#draw()
    }

    async #load(row, i) {
        const { server } = this
        const loadSamples = async () => {
            this.samples[i] = (await server.get("files", { run: row.run })).samples
            this.#setSteps()
        }
        const loadLog = async () => {
            for (let start = 0, more = true; more; ) {
                const part = await server.get("log", { run: row.run, start })
                this.series[i].append(part.entries)
                start = part.next
                more = part.more
            }
        }
        await Promise.all([loadSamples(), loadLog()]).catch((error) => this.#tell(i, error.message, true))
    }

    /** Let the slider go over the steps at which any of the runs has samples; it begins at the newest. */
    #setSteps() {
        this.steps = [...new Set(this.samples.flat().map(({ step }) => step))].sort((a, b) => a - b)
        this.bar.hidden = !this.steps.length
        this.slider.max = Math.max(0, this.steps.length - 1)
        this.slider.value = this.slider.max
        this.#showSheets()
    }

    /** Show each run's samples of the chosen step, or of the last one before at which it has some. */
    #showSheets() {
        const { words, server } = this
        const chosen = this.steps[this.slider.value]
        this.at.textContent = chosen === undefined ? "" : `${words.step} ${chosen}`
        this.slider.ariaValueText = this.at.textContent
        this.columns.forEach(({ sheet }, i) => {
            const { run } = this.rows[i]
            const step = this.samples[i].findLast((sample) => sample.step <= chosen)?.step
            sheet.replaceChildren(...this.samples[i].filter((sample) => sample.step === step).map(({ name, number }) => {
                const title = words.sampleOf(step, number + 1)
                const image = make("img", { src: server.url("sample", { run, name, small: 1 }), alt: title, title, loading: "lazy" })
                return make("a", { href: server.url("sample", { run, name }), target: "_blank", rel: "noopener" }, image)
            }))
        })
    }

    #column(row, i) {
        const { words } = this
        const heading = make("h3", { textContent: row.name, title: row.run })
        heading.style.setProperty("--color", PALETTE[i % PALETTE.length])
        const value = make("span")
        const sheet = make("div", { className: "sheet" })
        const status = make("div", { role: "status" })
        const actions = make("div", { className: "actions", role: "group", ariaLabel: words.actionsOf(row.name) })
        const differs = row.differs.length ? make("span", { className: "differs", textContent: `${words.changed}: ${differences(row).join(", ")}` }) : ""
        const element = make("section", { ariaLabel: row.name }, heading, value, differs, sheet, status, actions)
        const column = { element, value, sheet, status, actions }
        this.#fill(column, row, i)
        return column
    }

    /** Fill a column's figures and actions; without a pointer on the chart, they are those of the last step. */
    #fill(column, row, i) {
        const { words } = this
        const live = row.live
        const button = (name, text, act) => iconButton(name, text, () => act().catch((error) => this.#tell(i, error.message, true)))
        const now = (what) => async () => {
            await this.server.post("runs/now", { run: row.run, what })
            this.#tell(i, words.asked[what])
        }
        const actions = [
            button("play", words.continueRun, () => this.#leave(() => this.actions.continueRun(row))),
            button("plus", words.useLora, () => this.#leave(() => this.actions.useLora(row))),
        ]
        if (live?.can.includes("draw")) actions.push(button("image", words.draw, now("draw")))
        if (live?.can.includes("save")) actions.push(button("save", words.save, now("save")))
        if (!live) {
            const remove = button("trash", words.delete, async () => this.#confirm(column, row, i))
            remove.classList.add("danger")
            actions.push(remove)
        }
        column.actions.replaceChildren(...actions)
    }

    /** Do what shows something in the graph, and close over it. */
    async #leave(act) {
        await act()
        this.close()
    }

    #confirm(column, row, i) {
        const { words } = this
        const back = () => this.#fill(column, row, i)
        const keep = make("button", { type: "button", textContent: words.keep })
        keep.addEventListener("click", back)
        const remove = iconButton("trash", words.deleteIt, async () => {
            try {
                await this.server.post("runs/delete", { run: row.run })
                column.element.remove()
                this.onChange()
                if (!this.columns.some(({ element }) => element.isConnected)) this.close()
            } catch (error) {
                back()
                this.#tell(i, error.message, true)
            }
        })
        remove.classList.add("danger")
        column.actions.replaceChildren(make("span", { role: "alert", textContent: words.sure(row.run, sizeText(row.bytes)) }), remove, keep)
        keep.focus()
    }

    async #showSettings() {
        const { words, rows } = this
        const all = await Promise.all(rows.map(({ run }) => this.server.get("runs/settings", { run }).catch(() => ({}))))
        const names = Object.keys(all[0]).filter((name) => rows.length === 1 || all.some((each) => JSON.stringify(each[name]) !== JSON.stringify(all[0][name])))
        const head = make("tr", {}, ...[words.setting, ...rows.map(({ name }) => name)].map((text) => make("th", { scope: "col", textContent: text })))
        const body = names.map((name) => make("tr", {}, make("th", { scope: "row", textContent: plain(name), title: name }), ...all.map((each) => make("td", { textContent: told(each[name] ?? null) }))))
        const summary = make("summary", { textContent: rows.length === 1 ? words.settings : words.differing(names.length) })
        this.table.replaceChildren(make("details", { open: rows.length > 1 }, summary, make("table", {}, head, ...body)))
    }

    #point(x) {
        this.hover = x === null ? null : stepUnder(x, this.canvas.clientWidth, this.series)
        this.#draw()
    }

    #draw() {
        const { clientWidth: width, clientHeight: height } = this.canvas
        const scale = window.devicePixelRatio
        Object.assign(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) })
        const context = this.canvas.getContext("2d")
        context.setTransform(scale, 0, 0, scale, 0, 0)
        drawCurves(context, width, height, this.series, { log: this.log, hover: this.hover, text: getComputedStyle(this.canvas).color })
        this.columns.forEach(({ value }, i) => (value.textContent = this.#figures(i)))
    }

    #figures(i) {
        const { words, series, rows } = this
        const at = this.hover === null ? series[i].steps.length - 1 : series[i].nearest(this.hover)
        const row = rows[i]
        const step = series[i].steps[at] ?? row.step
        const loss = series[i].smoothed[at] ?? row.loss
        const parts = [`${words.step} ${step}${row.last && this.hover === null ? ` / ${row.last}` : ""}`]
        if (Number.isFinite(loss)) parts.push(`${words.loss} ${short(loss)}`)
        if (this.hover === null) parts.push(sizeText(row.bytes), ...(row.live ? [words.running] : []))
        return parts.join(" \u00b7 ")
    }

    #tell(i, text, bad = false) {
        const { status } = this.columns[i]
        status.textContent = text
        status.classList.toggle("bad", bad)
    }
}
