/** The images of a Dataset Report, worst first: each opens its dataset there, to be left out or captioned. */

import { openImages, originsOf } from "./dataset.js"
import { make } from "./dialog.js"

const HEIGHT = 236
/** Most images on the node; the dialog has all. */
const MOST = 64
const COLORS = { misfit: "#e5534b", notLearned: "#e0a030", overfitted: "#a371f7", learned: "#3fa35a" }

const STYLE = `
:host { display: block; width: 100%; height: 100%; max-height: ${HEIGHT - 14}px; }
[hidden] { display: none !important; }
div { display: grid; grid-template-columns: repeat(auto-fill, minmax(92px, 1fr)); grid-auto-rows: max-content;
      gap: 6px; height: 100%; max-height: inherit; padding: 2px; overflow-y: auto; box-sizing: border-box; }
button { display: flex; flex-direction: column; padding: 3px; border: 2px solid var(--verdict); border-radius: 6px;
         background: var(--comfy-input-bg, #1c1c1c); color: var(--input-text, #ddd); font: 11px/14px system-ui, sans-serif;
         cursor: pointer; overflow: hidden; }
button:hover { filter: brightness(1.25); }
button:focus-visible { outline: 2px solid #5aa9ff; outline-offset: 1px; }
img { width: 100%; height: 74px; object-fit: contain; border-radius: 3px; background: rgb(0 0 0 / 0.35); }
span { width: 100%; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
button.out { opacity: 0.4; }`

export class Gallery {
    constructor(node, words) {
        Object.assign(this, { node, words, rows: [] })
        this.element = document.createElement("div")
        this.list = make("div", { ariaLabel: words.title })
        this.element.attachShadow({ mode: "open" }).append(make("style", { textContent: STYLE }), this.list)
    }

    get minHeight() {
        return this.rows.length ? HEIGHT : 0
    }

    get maxHeight() {
        return this.minHeight
    }

    /** Show the rows of a report: {key, name, source, stamp, verdict, note}, worst first. */
    async show(rows) {
        this.rows = rows
        this.origins = await originsOf(this.node, "dataset")
        this.#render()
    }

    #render() {
        this.list.replaceChildren(...this.rows.slice(0, MOST).map((row) => this.#button(row)))
    }

    #button(row) {
        const { words } = this
        const verdict = words.verdicts[row.verdict]
        const origin = this.origins[row.source]
        const image = make("img", { alt: "", loading: "lazy", draggable: false })
        if (origin) image.src = origin.url(row)
        const name = make("span", { textContent: row.name })
        const button = make("button", { type: "button" }, image, make("span", { textContent: verdict }), name)
        button.title = `${row.name}\n${verdict}: ${row.note}\n${origin ? words.openTip : ""}`
        button.ariaLabel = `${row.name}, ${verdict}`
        button.style.setProperty("--verdict", COLORS[row.verdict])
        button.classList.toggle("out", Boolean(origin?.leaveOut?.includes(row.name)))
        button.disabled = !origin
        button.addEventListener("click", () => this.#open(row, origin))
        return button
    }

    /** Open the dataset, its images in the order of the report. */
    #open(row, origin) {
        const told = (each) => `${this.words.verdicts[each.verdict]}: ${each.note}`
        const own = this.rows.filter(({ source }) => source === row.source)
        const judged = new Map(own.map((each, rank) => [each.key, { rank, text: told(each), color: COLORS[each.verdict] }]))
        openImages(origin, undefined, { judged, chosen: row.key, onClose: () => this.#render() })
    }
}
