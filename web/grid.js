/**
 * The images of a dataset in a dialog: crop, size, caption to edit, what cannot be used, and a way to add more.
 *
 * The list comes from the server each time something has changed; a card is made anew only if its row differs.
 */

import { Card } from "./card.js"
import { make, openDialog } from "./dialog.js"
import { Intake } from "./intake.js"

const FILTERS = {
    all: () => true,
    problems: (row) => row.problem && !row.left_out,
    bare: (row) => !row.caption && !row.left_out && row.width > 0,
    twins: (row) => row.same_as,
    leftOut: (row) => row.left_out,
}

const STYLE = `
header { display: flex; align-items: center; gap: 10px; flex-wrap: wrap; padding: 12px 16px; }
h2 { margin: 0; font-size: 16px; font-weight: 600; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.counts { flex: 1; opacity: 0.85; }
.bar { display: flex; align-items: center; gap: 8px; flex-wrap: wrap; padding: 0 16px 10px; }
.filters button[aria-pressed="true"] { border-color: #5aa9ff; background: rgb(90 169 255 / 0.18); }
.notice { margin: 0 16px 10px; padding: 8px 12px; border-left: 3px solid #e0a030; border-radius: 4px;
          background: rgb(224 160 48 / 0.14); white-space: pre-wrap; max-height: 132px; overflow: auto;
          overflow-wrap: anywhere; }
.scroll { flex: 1; overflow-y: auto; padding: 0 16px 16px; min-height: 120px; }
ul { display: grid; grid-template-columns: repeat(auto-fill, minmax(228px, 1fr)); gap: 14px; margin: 0; padding: 2px;
     list-style: none; }
.empty { display: grid; place-items: center; min-height: 220px; padding: 24px; border: 2px dashed
         var(--border-color, #4e4e4e); border-radius: 8px; text-align: center; white-space: pre-wrap; }
.dropping .scroll { outline: 3px dashed #5aa9ff; outline-offset: -8px; }
`

export class Grid {
    /**
     * `source` is the node's: {title, ask() -> body of the request, url(row) -> thumbnail, folder, setFolder(name),
     * leaveOut, setLeaveOut(lines)}; without `setFolder` nothing can be added. `report` is that of a Dataset
     * Report: {judged: key -> {rank, text, color}, chosen: the key to begin with, onClose}.
     */
    constructor(api, words, source, report = {}) {
        Object.assign(this, { api, words, source, report })
        this.filter = "all"
        this.cards = new Map()
        this.rows = []
    }

    /** Open the dialog; `files` are those to add at once. */
    async open(files) {
        const { words } = this
        const opened = openDialog(words.title, STYLE + Card.style + Intake.style, () => this.#closing())
        this.dialog = opened.dialog
        this.heading = make("h2")
        this.counts = make("span", { className: "counts", role: "status" })
        this.notice = make("div", { className: "notice", hidden: true, role: "status" })
        this.filters = make("div", { className: "bar filters", role: "group", ariaLabel: words.show })
        this.list = make("ul")
        this.list.addEventListener("keydown", (event) => this.#move(event))
        this.empty = make("div", { className: "empty", hidden: true })
        this.intake = new Intake(this.api, words, this.source, () => this.load())
        const close = make("button", { type: "button", textContent: words.close })
        close.addEventListener("click", opened.close)
        const add = this.source.setFolder ? this.intake.buttons : []
        this.dialog.append(
            make("header", {}, this.heading, this.counts, ...add, close),
            this.intake.element,
            this.notice,
            this.filters,
            make("div", { className: "scroll", tabIndex: -1 }, this.empty, this.list),
        )
        if (this.source.setFolder) this.intake.listen(this.dialog)
        await this.load()
        const chosen = this.cards.get(this.report.chosen)?.element
        chosen?.scrollIntoView({ block: "center" })
        chosen?.querySelector("textarea, button")?.focus()
        if (files) this.intake.offer(files)
    }

    /** Ask the server for the list, and show it. */
    async load() {
        let found
        try {
            const body = JSON.stringify(await this.source.ask())
            const headers = { "Content-Type": "application/json" }
            const answer = await this.api.fetchApi("/graft/dataset", { method: "POST", body, headers })
            found = await answer.json()
            if (!answer.ok) found = { images: [], message: found.error }
        } catch (error) {
            found = { images: [], message: `${this.words.lost} (${error.message ?? error})` }
        }
        this.rows = this.#ranked(found.images)
        this.editable = found.editable
        this.intake.limits = found
        this.#note([found.why, this.rows.length ? found.message : ""])
        this.empty.textContent = found.message || this.words.none
        this.#render()
    }

    /** Return the rows in the order of the report, if there is one; those that it does not have last. */
    #ranked(rows) {
        const { judged } = this.report
        if (!judged) return rows
        const rank = (row) => row.judged?.rank ?? rows.length
        return rows.map((row) => ({ ...row, judged: judged.get(row.key) })).sort((a, b) => rank(a) - rank(b))
    }

    #note(lines) {
        this.notice.textContent = lines.filter(Boolean).join("\n")
        this.notice.hidden = !this.notice.textContent
    }

    #render() {
        const { words, rows } = this
        const count = Object.fromEntries(Object.entries(FILTERS).map(([name, test]) => [name, rows.filter(test).length]))
        if (!count[this.filter]) this.filter = "all"
        this.heading.textContent = this.source.title
        this.counts.textContent = words.counts(count.all - count.leftOut, count.problems)
        this.filters.hidden = !rows.length
        this.filters.replaceChildren(
            ...Object.keys(FILTERS)
                .filter((name) => name === "all" || count[name])
                .map((name) => this.#filterButton(name, count[name])),
        )
        this.empty.hidden = rows.length > 0
        const focused = this.dialog.getRootNode().activeElement
        const [key, part] = [focused?.closest?.("li")?.dataset.key, focused?.dataset?.part]
        const shown = rows.filter(FILTERS[this.filter]).map((row) => this.#card(row))
        this.list.replaceChildren(...shown.map((card) => card.element))
        if (key && part) this.cards.get(key)?.element.querySelector(`[data-part="${part}"]`)?.focus()
    }

    #filterButton(name, count) {
        const button = make("button", { type: "button", textContent: `${this.words[name]} ${count}` })
        button.setAttribute("aria-pressed", String(name === this.filter))
        button.addEventListener("click", () => {
            this.filter = name
            this.#render()
        })
        return button
    }

    #card(row) {
        const state = JSON.stringify([row, this.editable])
        const before = this.cards.get(row.key)
        if (before?.state === state) return before
        const card = new Card(row, {
            words: this.words,
            url: row.drawable ? this.source.url(row) : "",
            save: this.editable && row.width && !row.left_out ? (text, old) => this.#save(row, text, old) : null,
            leaveOut: this.source.setLeaveOut ? () => this.#leaveOut(row) : null,
        })
        card.state = state
        this.cards.set(row.key, card)
        return card
    }

    /** Arrow keys go from a card's button to that of the card beside, above or below it; in a caption they edit. */
    #move(event) {
        if (!event.target.matches("button")) return
        const columns = getComputedStyle(this.list).gridTemplateColumns.split(" ").length
        const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key]
        if (!way) return
        event.preventDefault()
        const { children } = this.list
        const next = children[[...children].indexOf(event.target.closest("li")) + way]
        next?.querySelector("button")?.focus()
    }

    async #save(row, text, before) {
        const body = JSON.stringify({ ...(await this.source.ask()), key: row.key, text, before })
        const headers = { "Content-Type": "application/json" }
        const answer = await this.api.fetchApi("/graft/dataset/caption", { method: "POST", body, headers })
        const { caption, error } = await answer.json()
        if (!answer.ok) throw new Error(error)
        row.caption = caption // so that the card stays
        return caption
    }

    #leaveOut(row) {
        const name = row.name.replace(/\p{Surrogate}/gu, "?") // the text of a widget cannot hold it
        const lines = this.source.leaveOut
        this.source.setLeaveOut(row.left_out ? lines.filter((line) => line !== row.left_out) : [...lines, name])
        return this.load()
    }

    #closing() {
        const { activeElement } = this.dialog.getRootNode()
        activeElement?.blur() // saves a caption that is being edited
        this.intake.cancel()
        this.report.onClose?.()
    }
}
