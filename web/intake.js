/** Adding files to a dataset: chosen or dropped, into which folder, how far, and what became of them. */

import { make } from "./dialog.js"
import { Upload, filesOfDrop, filesOfInput, withoutTop } from "./upload.js"

export class Intake {
    static style = `
.intake { margin: 0 16px 10px; padding: 10px 12px; border: 1px solid #5aa9ff; border-radius: 6px; }
.intake form, .intake .row { display: flex; align-items: center; gap: 8px; flex-wrap: wrap; }
.intake input { flex: 1; min-width: 200px; padding: 4px 8px; }
.intake progress { flex: 1; min-width: 200px; height: 10px; accent-color: #1668c7; }
.intake pre { margin: 6px 0; max-height: 110px; overflow: auto; white-space: pre-wrap; font: inherit;
              overflow-wrap: anywhere; }`

    /** `onAdded` is called when files were added. */
    constructor(api, words, source, onAdded) {
        Object.assign(this, { api, words, source, onAdded })
        this.element = make("div", { className: "intake", hidden: true, role: "status" })
        this.buttons = [...this.#chooser(words.addImages, false), ...this.#chooser(words.addFolder, true)]
    }

    /** Take what is dropped on the dialog. */
    listen(dialog) {
        dialog.addEventListener("dragover", () => dialog.classList.add("dropping"))
        dialog.addEventListener("dragleave", (event) => {
            if (!dialog.contains(event.relatedTarget)) dialog.classList.remove("dropping")
        })
        dialog.addEventListener("drop", (event) => {
            dialog.classList.remove("dropping")
            this.#take(filesOfDrop(event.dataTransfer))
        })
    }

    /** Ask for the folder of these files, and send them there. */
    offer(files) {
        if (!files.length) return this.#tell(this.words.nothing)
        const { words } = this
        const cut = withoutTop(files)
        const here = this.limits?.writable ? this.source.folder : ""
        const input = make("input", { value: cut.folder || here || "my_images", required: true, spellcheck: false })
        input.ariaLabel = words.folder
        const form = make(
            "form",
            {},
            make("label", {}, words.addTo(files.length)),
            input,
            make("button", { type: "submit", className: "main", textContent: words.add }),
            this.#button(words.cancel, () => this.#show()),
        )
        form.addEventListener("submit", (event) => {
            event.preventDefault()
            this.#send(cut.files, input.value.trim())
        })
        this.#show(form)
        input.select()
        input.focus()
    }

    cancel() {
        this.upload?.cancel()
    }

    #chooser(text, folders) {
        const input = make("input", { type: "file", multiple: true, hidden: true, webkitdirectory: folders })
        const button = make("button", { type: "button", textContent: text })
        button.addEventListener("click", () => input.click())
        input.addEventListener("change", () => {
            this.#take(Promise.resolve(filesOfInput(input.files)))
            input.value = ""
        })
        return [button, input]
    }

    async #take(promise) {
        const files = await promise
        const { folder, files: cut } = withoutTop(files)
        // Loose files belong to the dataset that is shown; a folder or a zip may be another one.
        if (files.length && !folder && this.limits?.writable) this.#send(cut, this.source.folder)
        else this.offer(files)
    }

    async #send(files, folder, replace = false) {
        const { words } = this
        const bar = make("progress", { max: 1, value: 0, ariaLabel: words.sending })
        const figure = make("span")
        this.upload = new Upload(this.api, folder, { ...this.limits, words }, (sent, total) => {
            bar.value = total ? sent / total : 1
            figure.textContent = words.sent(megabytes(sent), megabytes(total))
        })
        this.#show(make("div", { className: "row" }, bar, figure, this.#button(words.cancel, () => this.cancel())))
        const result = await this.upload.send(files, replace)
        if (result.saved || result.same) await this.source.setFolder(folder)
        await this.onAdded()
        this.#report(result, folder, this.upload.cancelled)
    }

    #report(result, folder, cancelled) {
        const { words } = this
        const refused = result.refused.slice(0, 50).map(([name, reason]) => `${name}: ${reason}`)
        const text = [
            words.added(result.saved + result.same, folder),
            cancelled ? words.cancelled : result.failed,
            result.others ? words.otherFiles(result.others) : "",
            refused.length ? [words.notTaken(result.refused.length), ...refused].join("\n") : "",
        ]
        const parts = [make("pre", { textContent: text.filter(Boolean).join("\n") })]
        const dismiss = this.#button(words.ok, () => this.#show())
        if (result.exists.length) {
            const names = result.exists.flatMap((each) => each.names)
            parts[0].textContent += `\n${words.exists(names.length)} (${names.slice(0, 8).join(", ")}${names.length > 8 ? ", ..." : ""})`
            const replace = this.#button(words.replace, () => this.#send(result.exists, folder, true))
            dismiss.textContent = words.keep
            parts.push(make("div", { className: "row" }, replace, dismiss))
            this.#show(...parts)
            dismiss.focus()
        } else {
            this.#show(...parts, make("div", { className: "row" }, dismiss))
        }
    }

    #tell(text) {
        this.#show(make("div", { className: "row" }, text, this.#button(this.words.ok, () => this.#show())))
    }

    #show(...parts) {
        this.element.replaceChildren(...parts)
        this.element.hidden = !parts.length
    }

    #button(text, onClick) {
        const button = make("button", { type: "button", textContent: text })
        button.addEventListener("click", onClick)
        return button
    }
}

function megabytes(bytes) {
    return (bytes / 2 ** 20).toFixed(1)
}
