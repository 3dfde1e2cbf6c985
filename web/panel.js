/**
 * The panel of Train Steps: chart, figures, newest samples and Finish.
 *
 * Display only. Everything comes from the run's log and folder on the server, so a reload, a second tab and a
 * run watched from the start look the same.
 */

import { COLORS, draw, stepAt } from "./chart.js"
import { isWanted, notify, toggle } from "./notify.js"
import { Series, clock, short } from "./series.js"

const FILES_EVERY = 3000
const CHART_HEIGHT = 150
const THUMBNAILS_HEIGHT = 84
/** The plan that is not shown: nothing is offloaded or computed twice. */
const FASTEST = "resident, none"

const STYLE = `
:host { display: block; color: var(--input-text, #ddd); font: 11px sans-serif; }
* { box-sizing: border-box; }
.panel { display: flex; flex-direction: column; gap: 4px; height: 100%; padding: 6px 8px; border-radius: 6px;
         background: var(--comfy-input-bg, #222); overflow: hidden; }
.row { display: flex; align-items: center; gap: 8px; flex: none; height: 20px; white-space: nowrap; }
.status { flex: 1; overflow: hidden; text-overflow: ellipsis; font-variant-numeric: tabular-nums; }
button { flex: none; height: 20px; padding: 0 8px; border: 1px solid var(--border-color, #4e4e4e);
         border-radius: 4px; background: transparent; color: inherit; font: inherit; cursor: pointer; }
button:hover:enabled { background: var(--border-color, #4e4e4e); }
button:disabled { opacity: 0.4; cursor: default; }
button[aria-pressed="true"] { border-color: ${COLORS.smoothed}; color: ${COLORS.smoothed}; }
.chart { position: relative; flex: 1 1 128px; min-height: 112px; }
canvas { position: absolute; inset: 0; width: 100%; height: 100%; }
.empty { position: absolute; inset: 0; display: grid; place-items: center; opacity: 0.6; text-align: center; }
.before { position: absolute; inset: 0 0 auto; margin: 0; padding: 2px 6px; list-style: none; pointer-events: none;
          max-height: 100%; overflow: hidden; border-radius: 4px; line-height: 15px; white-space: normal;
          background: color-mix(in srgb, var(--comfy-input-bg, #222) 85%, transparent); }
.before .warning { color: #ffb84d; }
.legend { flex-wrap: wrap; height: auto; min-height: 20px; gap: 2px 12px; font-variant-numeric: tabular-nums; }
.legend span::before { content: ""; display: inline-block; width: 8px; height: 8px; margin-right: 4px;
                       border-radius: 50%; background: var(--color); }
.samples { display: flex; gap: 4px; flex: none; height: ${THUMBNAILS_HEIGHT - 4}px; overflow-x: auto; }
.samples img { height: 100%; border-radius: 4px; display: block; }
.samples span { align-self: center; opacity: 0.6; }
.samples audio { height: 100%; max-height: 40px; align-self: center; flex: none; }
[hidden] { display: none; }`

export class Panel {
    /**
     * `api` is ComfyUI's, `words` those of words.js, `onLayout` is called when the panel's height changes.
     */
    constructor(api, words, onLayout) {
        this.api = api
        this.words = words
        this.onLayout = onLayout
        this.live = null
        this.log = false
        this.hover = -1
        this.#forget()
        this.#build()
    }

    /** Smallest height in pixels that shows everything. */
    get minHeight() {
        return CHART_HEIGHT + 60 + (this.newest.length ? THUMBNAILS_HEIGHT : 0)
    }

    /** Show a run, or its progress, as the server sends it. */
    follow(live) {
        const again = live.running && !this.live?.running
        if (this.live?.running && !live.running && live.run === this.live.run)
            notify(this.words.ended, live.run, `${this.words.step} ${live.step}`)
        if (live.run !== this.live?.run || again) this.#forget()
        this.live = live
        this.stale = true
        this.#update()
    }

    /** Show what a run will take, {lines, warnings}; beside a chart, the warnings alone. */
    expect(before) {
        this.expected = before
        this.#update()
    }

    /** Stop everything; the element is about to be removed. */
    remove() {
        this.removed = true
        this.observer.disconnect()
        cancelAnimationFrame(this.frame)
        clearTimeout(this.later)
    }

    #forget() {
        this.series = new Series()
        this.next = 0
        this.checkpoints = []
        this.samples = []
        this.newest = []
        this.inputs = {}
        this.lookedForFiles = 0
    }

    #build() {
        this.element = document.createElement("div")
        const root = this.element.attachShadow({ mode: "open" })
        const style = make("style", { textContent: STYLE })
        this.status = make("div", { className: "status" })
        this.switch = make("button", { textContent: this.words.log, title: this.words.logTip, type: "button" })
        this.button = make("button", { textContent: this.words.finish, title: this.words.finishTip, type: "button" })
        this.canvas = make("canvas", { role: "img", ariaLabel: this.words.chart })
        this.empty = make("div", { className: "empty", textContent: this.words.empty })
        this.legend = make("div", { className: "row legend" })
        this.thumbnails = make("div", { className: "samples", hidden: true })
        this.before = make("ul", { className: "before", role: "status" })
        this.bell = make("button", { textContent: this.words.notify, title: this.words.notifyTip, type: "button" })
        const chart = make("div", { className: "chart" }, this.canvas, this.empty, this.before)
        const head = make("div", { className: "row" }, this.status, this.switch, this.button, this.bell)
        root.append(style, make("div", { className: "panel" }, head, chart, this.legend, this.thumbnails))
        this.switch.addEventListener("click", () => {
            this.log = !this.log
            this.#update()
        })
        this.bell.addEventListener("click", () => toggle().then(() => this.#update()))
        this.button.addEventListener("click", () => this.#finish())
        this.canvas.addEventListener("pointermove", (event) => this.#point(event))
        this.canvas.addEventListener("pointerleave", () => this.#point(null))
        this.observer = new ResizeObserver(() => this.#update())
        this.observer.observe(chart)
        this.#update()
    }

    /** Update the panel in the next frame; a hidden page has no frames and catches up when it is shown. */
    #update() {
        this.frame ||= requestAnimationFrame(() => {
            this.frame = 0
            if (this.removed) return
            this.#render()
            if (this.stale && !this.pulling) this.#pull()
        })
    }

    async #pull() {
        const { live } = this
        this.pulling = true
        this.stale = false
        try {
            await this.#pullLog(live)
            const now = performance.now()
            if (!live.running || now - this.lookedForFiles > FILES_EVERY) {
                this.lookedForFiles = now
                await this.#pullFiles(live)
            }
        } catch (error) {
            console.debug("Graft: the run's log could not be read.", error)
        } finally {
            this.pulling = false
            this.#update()
        }
    }

    async #pullLog(live) {
        for (let more = true; more && live.run === this.live.run && !this.removed; ) {
            const { series } = this
            const start = this.next
            const part = await this.#get("log", { run: live.run, start })
            if (!part || series !== this.series) return
            if (part.start < start) this.#forget()
            this.series.append(part.entries)
            this.next = part.next
            more = part.more
        }
    }

    async #pullFiles(live) {
        const files = await this.#get("files", { run: live.run })
        if (!files || live.run !== this.live.run) return
        const newest = files.samples.filter((sample) => sample.step === files.samples.at(-1).step).slice(0, 8)
        const inputs = Object.fromEntries((files.inputs ?? []).map(({ number, name }) => [number, name]))
        const names = (samples, beside) => samples.flatMap(({ name, number }) => [beside[number], name]).join()
        const changed = names(newest, inputs) !== names(this.newest, this.inputs)
        this.checkpoints = files.checkpoints
        this.samples = [...new Set(files.samples.map((sample) => sample.step))]
        this.newest = newest
        this.inputs = inputs
        if (changed) this.#showThumbnails(live)
    }

    /** Return the JSON of a route, or null if there is nothing (yet). */
    async #get(route, query) {
        const answer = await this.api.fetchApi(`/graft/${route}?${new URLSearchParams(query)}`)
        return answer.ok ? answer.json() : null
    }

    async #finish() {
        if (!this.live?.running) return
        this.live.finishing = true
        this.#update()
        const run = this.live.run.split("/").map(encodeURIComponent).join("/")
        const asked = this.api.fetchApi(`/graft/finish/${run}`, { method: "POST" })
        if (await asked.then((answer) => answer.ok, () => false)) return
        this.live.finishing = false
        this.#update()
    }

    #point(event) {
        const box = this.canvas.getBoundingClientRect()
        const width = this.canvas.clientWidth
        this.hover = event
            ? this.series.nearest(stepAt(((event.clientX - box.left) * width) / box.width, width, this.series, this.#view()))
            : -1
        this.#update()
    }

    #view() {
        return {
            end: this.live?.running ? this.live.last : 0,
            log: this.log,
            hover: Math.min(this.hover, this.series.steps.length - 1),
            checkpoints: this.checkpoints,
            samples: this.samples,
            text: getComputedStyle(this.element).color,
        }
    }

    #render() {
        const { clientWidth: width, clientHeight: height } = this.canvas
        const zoom = this.canvas.getBoundingClientRect().width / width || 1
        const view = this.#view()
        this.#renderTexts() // after the last look at the layout, which it changes
        if (!width || !height) return
        const scale = window.devicePixelRatio * Math.min(3, Math.max(1, zoom))
        const [w, h] = [Math.round(width * scale), Math.round(height * scale)]
        if (this.canvas.width !== w || this.canvas.height !== h) Object.assign(this.canvas, { width: w, height: h })
        const context = this.canvas.getContext("2d")
        context.setTransform(scale, 0, 0, scale, 0, 0)
        draw(context, width, height, this.series, view)
    }

    #renderTexts() {
        const { words, series, live } = this
        const running = Boolean(live?.running)
        this.empty.hidden = series.steps.length > 0
        this.switch.setAttribute("aria-pressed", String(this.log))
        this.bell.setAttribute("aria-pressed", String(isWanted()))
        this.#renderExpected(running)
        this.button.disabled = !running || live.finishing
        this.button.textContent = running && live.finishing ? words.finishing : words.finish
        this.status.textContent = this.#statusText()
        this.status.title = [this.status.textContent, live?.run].filter(Boolean).join("\n")
        const i = this.hover >= 0 ? Math.min(this.hover, series.steps.length - 1) : series.steps.length - 1
        const step = series.steps[i]
        const validation = series.validation.findLast?.(([at]) => at <= step)?.[1]
        const items = [
            ["loss", words.loss, series.loss[i]],
            ["smoothed", words.smoothed, series.smoothed[i]],
            ["validation", words.validation, validation],
            ["rate", words.rate, series.rate[i]],
        ]
        const shown = items.filter(([, , value]) => Number.isFinite(value))
        this.legend.replaceChildren(
            ...(this.hover >= 0 && i >= 0 ? [make("b", { textContent: `${words.step} ${step}` })] : []),
            ...shown.map(([name, word, value]) => this.#legendItem(name, `${word} ${short(value)}`)),
            ...(this.hover < 0 && this.samples.length ? [this.#legendItem("sample", words.sample)] : []),
            ...(this.hover < 0 && this.checkpoints.length ? [this.#legendItem("checkpoint", words.checkpoint)] : []),
        )
    }

    #renderExpected(running) {
        const { lines = [], warnings = [] } = (!running && this.expected) || {}
        const item = (className) => (textContent) => make("li", { className, textContent })
        const shown = [...warnings.map(item("warning")), ...(this.empty.hidden ? [] : lines.map(item("")))]
        this.before.hidden = !shown.length
        this.empty.style.visibility = shown.length ? "hidden" : ""
        if (this.before.textContent !== shown.map((each) => each.textContent).join("")) this.before.replaceChildren(...shown)
    }

    #legendItem(name, text) {
        const item = make("span", { textContent: text })
        item.style.setProperty("--color", COLORS[name])
        return item
    }

    #statusText() {
        const { words, live, series } = this
        const { last } = series
        if (!live || !last) return ""
        const step = Math.max(last.step, live.running ? live.step : 0)
        const parts = live.same === false ? [words.other] : []
        parts.push(live.last ? `${words.step} ${step} / ${live.last}` : `${words.step} ${step}`)
        if (Number.isFinite(last.seconds)) parts.push(`${short(last.seconds)} ${words.perStep}`)
        if (live.running && Number.isFinite(last.time_left)) parts.push(`${clock(last.time_left)} ${words.left}`)
        if (last.memory) parts.push(`${(last.memory / 2 ** 30).toFixed(1)} GB`)
        if (last.plan && last.plan !== FASTEST) parts.push(`${words.plan} ${last.plan}`)
        if (!live.running && live.last && step < live.last) parts.push(words.done)
        return parts.join("  \u00b7  ")
    }

    #showThumbnails(live) {
        this.thumbnails.hidden = !this.newest.length
        const shown = (name, title) => {
            const url = this.api.apiURL(`/graft/sample?${new URLSearchParams({ run: live.run, name })}`)
            if (name.endsWith(".flac")) return make("audio", { src: url, title, controls: true, preload: "none" })
            const image = make("img", { src: url, alt: title, title, draggable: false })
            return make("a", { href: url, target: "_blank", rel: "noopener" }, image)
        }
        this.thumbnails.replaceChildren(
            ...this.newest.flatMap(({ name, step, number }) => {
                const sample = shown(name, `${this.words.step} ${step}, ${number + 1}`)
                const input = this.inputs[number]
                if (!input) return [sample]
                return [shown(input, `${this.words.input} ${number + 1}`), make("span", { textContent: "\u2192" }), sample]
            }),
        )
        this.onLayout()
    }
}

function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties)
    element.append(...children)
    return element
}
