/** One image of a dataset: thumbnail with its crop, size, caption, and what is wrong with it. */

import { make } from "./dialog.js"

export class Card {
    static style = `
li { display: flex; flex-direction: column; gap: 6px; padding: 8px; border: 1px solid var(--border-color, #4e4e4e);
     border-radius: 8px; background: var(--comfy-input-bg, #1c1c1c); content-visibility: auto;
     contain-intrinsic-size: auto 226px auto 368px; }
li.problem { border-color: #e5534b; }
li.out .picture, li.out .text { opacity: 0.45; }
.picture { display: grid; place-items: center; height: 196px; border-radius: 5px; background: rgb(0 0 0 / 0.35); }
.frame { position: relative; overflow: hidden; max-width: 100%; max-height: 196px; }
.frame img { display: block; width: 100%; height: 100%; }
.frame i { position: absolute; border: 2px solid #ffb000; box-shadow: 0 0 0 400px rgb(0 0 0 / 0.62); }
.nothing { opacity: 0.7; text-align: center; padding: 8px; }
.name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-weight: 600; }
.size { font-size: 12px; opacity: 0.85; font-variant-numeric: tabular-nums; }
.badge { align-self: flex-start; max-width: 100%; padding: 1px 7px; border-radius: 4px; font-size: 12px;
         overflow-wrap: anywhere; background: #44546a; color: #fff; }
.badge.bad { background: #a3261e; }
li textarea { width: 100%; height: 66px; resize: vertical; padding: 5px 7px; background: rgb(127 127 127 / 0.13); }
li p { margin: 0; white-space: pre-wrap; overflow: auto; max-height: 66px; }
.foot { display: flex; align-items: center; gap: 8px; margin-top: auto; min-height: 28px; font-size: 12px; }
.foot .state { flex: 1; overflow-wrap: anywhere; }
.foot .state.bad { color: #ff8b82; }`

    /** `save(text, before)` returns the caption as it is on disk; null where it cannot be edited. */
    constructor(row, { words, url, save, leaveOut }) {
        Object.assign(this, { row, words, save })
        this.status = make("span", { className: "state", role: "status" })
        const foot = make("div", { className: "foot" }, this.status)
        if (leaveOut) {
            const button = make("button", { type: "button", textContent: row.left_out ? words.putBack : words.leaveOut })
            button.dataset.part = "out"
            button.ariaLabel = `${button.textContent}: ${row.name}`
            button.addEventListener("click", leaveOut)
            foot.append(button)
        }
        const name = make("div", { className: "name text", textContent: row.name, title: row.name })
        this.element = make("li", {}, this.#picture(url), name, this.#size(), ...this.#badges(), this.#caption(), foot)
        this.element.classList.toggle("problem", Boolean(row.problem) && !row.left_out)
        this.element.classList.toggle("out", Boolean(row.left_out))
        this.element.dataset.key = row.key
    }

    #picture(url) {
        const { row, words } = this
        const box = make("div", { className: "picture" })
        const nothing = make("span", { className: "nothing", textContent: words.noPreview })
        if (!url) {
            box.append(nothing)
            return box
        }
        const image = make("img", { loading: "lazy", decoding: "async", alt: row.name, src: url, draggable: false })
        image.addEventListener("error", () => box.replaceChildren(nothing))
        const frame = make("div", { className: "frame" }, image)
        if (row.width) {
            frame.style.aspectRatio = `${row.width} / ${row.height}`
            frame.style[row.width / row.height > 210 / 196 ? "width" : "height"] = "100%"
            frame.append(this.#crop())
        }
        box.append(frame)
        return box
    }

    #crop() {
        const [left, top, right, bottom] = this.row.crop.map((part) => `${part * 100}%`)
        const crop = make("i", { title: this.words.cropTip })
        Object.assign(crop.style, { left, top, right: `calc(100% - ${right})`, bottom: `calc(100% - ${bottom})` })
        return crop
    }

    #size() {
        const { width, height, bucket, crop } = this.row
        if (!width) return ""
        const cut = Math.round((1 - (crop[2] - crop[0]) * (crop[3] - crop[1])) * 100)
        const trained = bucket[0] ? ` \u2192 ${bucket[0]} \u00d7 ${bucket[1]}` : ""
        const off = cut > 0 ? `, ${this.words.cutOff(cut)}` : ""
        return make("div", { className: "size text", textContent: `${width} \u00d7 ${height}${trained}${off}` })
    }

    #badges() {
        const { row, words } = this
        const badge = (text, bad) => make("span", { className: bad ? "badge bad" : "badge", textContent: text })
        const found = []
        if (row.judged) {
            const judged = badge(row.judged.text)
            Object.assign(judged.style, { background: "none", border: `1px solid ${row.judged.color}`, color: "inherit" })
            found.push(judged)
        }
        if (row.left_out) found.push(badge(row.left_out === row.name ? words.leftOut : words.leftOutBy(row.left_out)))
        else if (row.problem === "no caption") found.push(badge(words.bare, true))
        else if (row.problem) found.push(badge(row.problem, true))
        if (row.same_as) found.push(badge(words.sameAs(row.same_as)))
        if (row.others) found.push(badge(words.others(row.others)))
        return found
    }

    #caption() {
        const { row, words } = this
        if (!this.save) return row.caption ? make("p", { className: "text", textContent: row.caption }) : ""
        const box = make("textarea", { value: row.caption, placeholder: row.trained || words.placeholder, title: row.trained })
        box.ariaLabel = words.captionOf(row.name)
        box.dataset.part = "caption"
        box.addEventListener("change", () => this.#store(box))
        box.addEventListener("keydown", (event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#next(box)
        })
        return box
    }

    async #store(box) {
        const { words, row } = this
        const text = box.value
        this.#tell(words.saving)
        try {
            const caption = await this.save(text, row.caption)
            if (box.value === text) box.value = caption
            if (caption) this.element.querySelector(".badge.bad")?.remove()
            this.element.classList.toggle("problem", !caption && row.problem === "no caption")
            this.#tell(words.saved)
        } catch (error) {
            this.#tell(error.message, true)
        }
    }

    /** Go on to the next image's caption; leaving this one saves it. */
    #next(box) {
        const boxes = [...this.element.parentElement.querySelectorAll("textarea")]
        const next = boxes[boxes.indexOf(box) + 1]
        if (next) next.focus()
        else box.blur()
        next?.scrollIntoView({ block: "center" })
    }

    #tell(text, bad = false) {
        this.status.textContent = text
        this.status.classList.toggle("bad", bad)
    }
}
