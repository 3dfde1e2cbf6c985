/** What can be done with a run: buttons, what became of it, and the question before a run is deleted. */

import { make } from "./dialog.js"
import { iconButton } from "./icons.js"
import { sizeText } from "./run_list.js"

export class RunActions {
    static style = `
.actions { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-top: auto; }
.actions .danger:hover:enabled { border-color: #e5534b; background: rgb(229 83 75 / 0.2); }
[role="status"]:empty { display: none; }
.bad { color: #ff8b82; }`

    /**
     * `does` is what leaves the view: {continueRun(row), useLora(row), close()}; `onDeleted` is called when the
     * run is gone.
     */
    constructor(words, row, { server, does, onDeleted }) {
        Object.assign(this, { words, row, server, does, onDeleted })
        this.status = make("div", { role: "status" })
        this.element = make("div", { className: "actions", role: "group", ariaLabel: words.actionsOf(row.name) })
        this.#offer()
    }

    tell(text, bad = false) {
        this.status.textContent = text
        this.status.classList.toggle("bad", bad)
    }

    #offer() {
        const { words, row, does } = this
        const can = row.live?.can ?? []
        this.element.replaceChildren(
            this.#button("play", words.continueRun, () => this.#leave(() => does.continueRun(row))),
            this.#button("plus", words.useLora, () => this.#leave(() => does.useLora(row))),
            ...(can.includes("draw") ? [this.#button("image", words.draw, () => this.#ask("draw"))] : []),
            ...(can.includes("save") ? [this.#button("save", words.save, () => this.#ask("save"))] : []),
            ...(row.live ? [] : [this.#button("trash", words.delete, async () => this.#confirm(), "danger")]),
        )
    }

    #button(name, text, act, className = "") {
        const button = iconButton(name, text, () => act().catch((error) => this.tell(error.message, true)))
        button.className = className
        return button
    }

    /** Do what shows something in the graph, and close over it. */
    async #leave(act) {
        await act()
        this.does.close()
    }

    /** Ask a run under way to draw or to save. */
    async #ask(what) {
        await this.server.post("runs/now", { run: this.row.run, what })
        this.tell(this.words.asked[what])
    }

    #confirm() {
        const { words, row } = this
        const keep = this.#button("close", words.keep, async () => this.#offer())
        const remove = this.#button("trash", words.deleteIt, () => this.#delete(), "danger")
        const question = make("span", { role: "alert", textContent: words.sure(row.run, sizeText(row.bytes)) })
        this.element.replaceChildren(question, remove, keep)
        keep.focus()
    }

    async #delete() {
        try {
            await this.server.post("runs/delete", { run: this.row.run })
            this.onDeleted()
        } finally {
            this.#offer()
        }
    }
}
