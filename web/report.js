/** The text that a node shows when it has run: read-only, and not saved with the workflow. */

const LINE = 14
const LETTER = 6.7
const MARGINS = 28
/** Lines that a node makes room for; the others scroll, unless the node is made larger. */
const MOST_LINES = 5
const MOST_OF_AN_ERROR = 7

export class Report {
    constructor(node, label) {
        this.node = node
        this.element = document.createElement("textarea")
        this.element.readOnly = true
        this.element.spellcheck = false
        this.element.ariaLabel = label
        Object.assign(this.element.style, { width: "100%", height: "100%", font: `11px/${LINE}px monospace` })
        this.show("")
    }

    /** Show a text; an error is told to screen readers at once. */
    show(text, bad = false) {
        this.element.value = text
        this.bad = bad
        this.element.setAttribute("role", bad ? "alert" : "textbox")
        this.element.style.borderLeft = bad ? "3px solid #e5534b" : ""
        // Nodes 2.0 gives the free height of a node to elements of the class widget-expands.
        this.element.className = text ? "comfy-multiline-input widget-expands" : "comfy-multiline-input"
        this.table = /\S {2,}\S/.test(text) // columns
        if (text && this.minHeight < this.maxHeight) this.element.dataset.captureWheel = "true" // Nodes 2.0: it scrolls
        else delete this.element.dataset.captureWheel
        Object.assign(this.element.style, {
            display: text ? "block" : "none",
            whiteSpace: this.table ? "pre" : "pre-wrap",
            overflow: "auto",
            minHeight: `${this.minHeight - MARGINS + 6}px`,
            maxHeight: `${this.maxHeight - MARGINS + 6}px`,
        })
    }

    /** Height in pixels for the first lines, and for all lines; 0 without a text. */
    get minHeight() {
        return this.#height(Math.min(this.bad ? MOST_OF_AN_ERROR : MOST_LINES, this.#lines))
    }

    get maxHeight() {
        return this.#height(this.#lines)
    }

    #height(lines) {
        return this.element.value ? MARGINS + LINE * lines : 0
    }

    get #lines() {
        const lines = this.element.value.split("\n")
        if (this.table) return lines.length + 1 // its scrollbar
        const letters = Math.max(10, (this.node.size[0] - 40) / LETTER)
        return lines.reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / letters)), 0)
    }
}
