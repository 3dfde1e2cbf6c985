/** The runs in the sidebar: one row each, to open, and to tick for a comparison. */

import { make } from "./dialog.js"
import { icon } from "./icons.js"
import { differences, settingName, settingText } from "./run_settings.js"
import { short } from "./series.js"

const UNITS = [["minute", 60], ["hour", 3600], ["day", 86400]]

export class RunList {
    static style = `
ul { flex: 1; min-height: 0; overflow-y: auto; margin: 0; padding: 2px 8px 12px; list-style: none; }
li { position: relative; content-visibility: auto; contain-intrinsic-size: auto 92px; margin-bottom: 6px; }
.run { display: flex; gap: 10px; width: 100%; min-height: 84px; padding: 6px; text-align: left; white-space: normal;
       border-radius: 8px; outline-offset: -2px; }
.picture { display: grid; place-items: center; flex: none; width: 72px; height: 72px; overflow: hidden;
           border-radius: 6px; background: rgb(127 127 127 / 0.16); font-size: 22px; }
.picture img { width: 100%; height: 100%; object-fit: cover; }
.facts { display: flex; flex-direction: column; gap: 1px; min-width: 0; font-size: 12px;
         font-variant-numeric: tabular-nums; }
.facts > * { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.facts b { font-size: 13px; }
.live { color: #7ee08c; }
.facts .more { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; white-space: normal; }
.differs { color: #ffc46b; }
li input { position: absolute; top: 10px; left: 10px; width: 16px; height: 16px; margin: 0; accent-color: #1668c7; }`

    /** `open(row)` shows a run, `onTick()` follows the ticks, `url(row)` is its picture. */
    constructor(words, { open, onTick, url, locale }) {
        Object.assign(this, { words, open, onTick, url })
        this.since = new Intl.RelativeTimeFormat(locale, { numeric: "auto", style: "narrow" })
        this.element = make("ul", { ariaLabel: words.runs })
        this.element.addEventListener("keydown", (event) => this.#move(event))
        this.element.addEventListener("focusin", ({ target }) => this.#enter(target.closest("li")))
        this.rows = []
        this.items = new Map()
        this.ticked = new Set()
    }

    /** Show these rows; those that are as before keep their elements, and with them their pictures. */
    show(rows) {
        this.rows = rows
        const focused = this.element.getRootNode().activeElement
        const items = rows.map((row) => this.#item(row))
        const { children } = this.element
        if (items.length !== children.length || items.some((item, i) => item !== children[i])) {
            this.element.replaceChildren(...items)
            if (focused?.dataset.run) this.items.get(focused.dataset.run)?.querySelector(focused.tagName)?.focus()
        }
        this.#enter(items.find((item) => item.querySelector("[tabindex='0']")) ?? items[0])
    }

    #item(row) {
        const state = JSON.stringify(row)
        const before = this.items.get(row.run)
        if (before?.state === state) return before
        const { words } = this
        const name = { type: "button", className: "run", title: row.run }
        const button = make("button", name, this.#picture(row), this.#facts(row))
        button.addEventListener("click", () => this.open(row))
        const label = { ariaLabel: words.tick(row.name), title: words.tickTip }
        const box = make("input", { type: "checkbox", checked: this.ticked.has(row.run), ...label })
        box.addEventListener("change", () => {
            this.ticked[box.checked ? "add" : "delete"](row.run)
            this.onTick()
        })
        for (const part of [button, box]) Object.assign(part, { tabIndex: -1 }).dataset.run = row.run
        const item = Object.assign(make("li", {}, button, box), { state })
        this.items.set(row.run, item)
        return item
    }

    #picture(row) {
        const box = make("span", { className: "picture" })
        if (!row.sample) box.append(icon("compare"))
        else box.append(make("img", { loading: "lazy", alt: "", src: this.url(row), draggable: false }))
        return box
    }

    #facts(row) {
        const { words } = this
        const step = row.live ? row.live.step : row.step
        const last = row.live ? row.live.last : row.last
        const line = (...parts) => make("span", { textContent: parts.filter(Boolean).join(" \u00b7 ") })
        const loss = Number.isFinite(row.loss) && `${words.loss} ${short(row.loss)}`
        const { "adapter.algorithm": algorithm, ...settings } = row.settings
        const values = Object.entries(settings).map(([name, value]) => `${settingName(name)} ${settingText(value)}`)
        const differs = row.differs.length > 0
        return make(
            "span",
            { className: "facts" },
            make("b", { textContent: row.name }),
            line(`${words.step} ${step}${last ? ` / ${last}` : ""}`, !row.live && this.#ago(row.changed)),
            line(loss, sizeText(row.bytes)),
            row.live ? make("span", { className: "live", textContent: words.running }) : "",
            make("span", {
                className: differs ? "more differs" : "more",
                textContent: (differs ? differences(row) : [algorithm, ...values]).filter(Boolean).join(", "),
            }),
        )
    }

    #ago(seconds) {
        const past = Date.now() / 1000 - seconds
        const [unit, length] = UNITS.findLast(([, each]) => past >= each) ?? UNITS[0]
        return this.since.format(-Math.floor(past / length), unit)
    }

    /** Arrow keys go from run to run, and between a run and its tick. */
    #move(event) {
        const items = [...this.element.children]
        const at = items.indexOf(event.target.closest("li"))
        const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key]
        const tag = { ArrowRight: "input", ArrowLeft: "button" }[event.key] ?? event.target.tagName
        if (to === undefined && !event.key.startsWith("Arrow")) return
        event.preventDefault()
        items[to ?? at]?.querySelector(tag).focus()
    }

    /** Let Tab reach this run and no other. */
    #enter(item) {
        for (const part of this.element.querySelectorAll("[tabindex='0']")) part.tabIndex = -1
        for (const part of item?.children ?? []) part.tabIndex = 0
    }
}

/** Return a size like 12 kB, 3.4 MB or 1.2 GB. */
export function sizeText(bytes) {
    if (bytes < 1e6) return `${Math.ceil(bytes / 1e3)} kB`
    return bytes < 1e9 ? `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB` : `${(bytes / 1e9).toFixed(1)} GB`
}
