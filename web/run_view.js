/** One run, or several beside one another: curves, sample images by step, settings, and what can be done. */

import { PALETTE, drawCurves, stepUnder } from "./curves.js"
import { make, openDialog } from "./dialog.js"
import { icon, iconButton, iconStyle } from "./icons.js"
import { RunActions } from "./run_actions.js"
import { sizeText } from "./run_list.js"
import { differences, settingsStyle, settingsTable } from "./run_settings.js"
import { Series, short } from "./series.js"

/** Milliseconds between two looks at a run under way. */
const EVERY = 3000
const STYLE = `${iconStyle}${RunActions.style}${settingsStyle}
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
.sheet audio { width: 100%; }
.sheet img { display: block; width: 100%; border-radius: 6px; }
.runs.one .sheet { grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); }
.differs { color: #ffc46b; }
`

export class RunView {
    /**
     * `server` asks Graft's routes: {get(route, query), post(route, body), url(route, query)}. `does` is
     * {continueRun(row), useLora(row)}; `onChange` is called when a run was deleted.
     */
    constructor(words, rows, { server, does, onChange }) {
        Object.assign(this, { words, rows, server, does, onChange })
        const twice = new Set(rows.map(({ name }) => name)).size < rows.length
        this.labels = rows.map(({ name, run }) => (twice ? run : name))
        this.series = rows.map(() => new Series())
        this.samples = rows.map(() => [])
        this.next = rows.map(() => 0)
        this.steps = []
        this.hover = null
        this.log = false
    }

    async open() {
        const { words, rows } = this
        const title = rows.length === 1 ? rows[0].name : words.comparing(rows.length)
        const opened = openDialog(title, STYLE, () => this.#leave())
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
        const close = iconButton("close", words.close, opened.close, true)
        const runs = this.columns.map(({ element }) => element)
        opened.dialog.append(
            make("header", {}, make("h2", { textContent: title }), close),
            make(
                "div",
                { className: "scroll", tabIndex: 0, role: "region", ariaLabel: title },
                make("div", { className: "chart" }, this.canvas, this.note, log),
                this.bar,
                make("div", { className: rows.length === 1 ? "runs one" : "runs" }, ...runs),
                this.table,
            ),
        )
        this.canvas.addEventListener("pointermove", (event) => this.#point(event.offsetX))
        this.canvas.addEventListener("pointerleave", () => this.#point(null))
        this.observer = new ResizeObserver(() => this.#draw())
        this.observer.observe(this.canvas)
        await Promise.all([this.#load(), this.#showSettings()])
        if (rows.some(({ live }) => live) && !this.left) this.timer = setInterval(() => this.#load(), EVERY)
    }

    #leave() {
        this.left = true
        this.observer.disconnect()
        clearInterval(this.timer)
    }

    /** Read what is new of every run, and show it. */
    async #load() {
        const each = this.rows.map((row, i) =>
            Promise.all([this.#loadSamples(row, i), this.#loadLog(row, i)]).catch((error) =>
                this.columns[i].actions.tell(error.message, true),
            ),
        )
        await Promise.all(each)
        this.note.textContent = this.series.some(({ steps }) => steps.length) ? "" : this.words.noSteps
        this.#draw()
    }

    async #loadSamples({ run }, i) {
        const { samples } = await this.server.get("files", { run })
        if (samples.length === this.samples[i].length) return
        this.samples[i] = samples
        this.#setSteps()
    }

    async #loadLog({ run }, i) {
        for (let more = true; more; ) {
            const part = await this.server.get("log", { run, start: this.next[i] })
            this.series[i].append(part.entries)
            this.next[i] = part.next
            more = part.more
        }
    }

    /** Let the slider go over the steps at which any of the runs has samples; it begins at the newest. */
    #setSteps() {
        const atEnd = this.slider.value === this.slider.max || !this.steps.length
        this.steps = [...new Set(this.samples.flat().map(({ step }) => step))].sort((a, b) => a - b)
        this.bar.hidden = !this.steps.length
        this.slider.max = Math.max(0, this.steps.length - 1)
        if (atEnd) this.slider.value = this.slider.max
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
            const shown = this.samples[i].filter((sample) => sample.step === step)
            const images = shown.map(({ name, number }) => {
                const title = words.sampleOf(step, number + 1)
                const href = server.url("sample", { run, name })
                if (name.endsWith(".flac")) return make("audio", { src: href, title, controls: true, preload: "none" })
                const src = server.url("sample", { run, name, small: 1 })
                const image = make("img", { src, alt: title, title, loading: "lazy" })
                return make("a", { href, target: "_blank", rel: "noopener" }, image)
            })
            sheet.replaceChildren(...images)
        })
    }

    #column(row, i) {
        const { words } = this
        const heading = make("h3", { textContent: this.labels[i], title: row.run })
        heading.style.setProperty("--color", PALETTE[i % PALETTE.length])
        const figures = make("span")
        const sheet = make("div", { className: "sheet" })
        const text = row.differs.length ? `${words.changed}: ${differences(row).join(", ")}` : ""
        const actions = new RunActions(words, row, {
            server: this.server,
            does: { ...this.does, close: () => this.close() },
            onDeleted: () => this.#forget(element),
        })
        const parts = [heading, figures, make("span", { className: "differs", textContent: text }), sheet]
        const element = make("section", { ariaLabel: this.labels[i] }, ...parts, actions.status, actions.element)
        return { element, figures, sheet, actions }
    }

    /** Take a run that was deleted out of the view; without another one, close it. */
    #forget(element) {
        element.remove()
        this.onChange()
        if (!this.columns.some((column) => column.element.isConnected)) this.close()
    }

    async #showSettings() {
        const all = this.rows.map(({ run }) => this.server.get("runs/settings", { run }).catch(() => ({})))
        this.table.replaceChildren(settingsTable(this.words, this.labels, await Promise.all(all)))
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
        const { log, hover } = this
        drawCurves(context, width, height, this.series, { log, hover, text: getComputedStyle(this.canvas).color })
        this.columns.forEach(({ figures }, i) => (figures.textContent = this.#figures(i)))
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
}
