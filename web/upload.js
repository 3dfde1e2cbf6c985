/** Files from a drop or a file dialog, and their way to the server: a few at a time, with progress. */

const AT_ONCE = 3

/**
 * Return [{path, file}] of what was dropped, files in folders with their path; hidden files are left out.
 * Call it before the event ends: browsers forget what was dropped.
 */
export function filesOfDrop(transfer) {
    const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean)
    if (!entries.length) return Promise.resolve(filesOfInput(transfer.files))
    return Promise.all(entries.map((entry) => filesIn(entry, ""))).then((lists) => lists.flat().filter(isShown))
}

/** Return [{path, file}] of an <input type="file">, with the folder's name where one was chosen. */
export function filesOfInput(files) {
    return [...files].map((file) => ({ path: file.webkitRelativePath || file.name, file })).filter(isShown)
}

/** Return the files without the folder that all of them are in, and that folder's name: {files, folder}. */
export function withoutTop(files) {
    const tops = new Set(files.map(({ path }) => (path.includes("/") ? path.split("/")[0] : "")))
    const folder = tops.size === 1 ? [...tops][0] : ""
    const zip = files.length === 1 && files[0].path.match(/^([^/]+)\.zip$/i)
    if (zip) return { files, folder: zip[1] }
    const cut = folder ? folder.length + 1 : 0
    return { files: files.map(({ path, file }) => ({ path: path.slice(cut), file })), folder }
}

async function filesIn(entry, folder) {
    const path = folder + entry.name
    if (entry.isFile) return [{ path, file: await new Promise((done, failed) => entry.file(done, failed)) }]
    const reader = entry.createReader()
    const found = []
    for (;;) {
        const some = await new Promise((done, failed) => reader.readEntries(done, failed)) // 100 at a time
        if (!some.length) return found
        for (const child of some) found.push(...(await filesIn(child, `${path}/`)))
    }
}

function isShown({ path }) {
    return !path.split("/").some((part) => part.startsWith(".") || part === "__MACOSX")
}

/** Sends files to a dataset's folder; `onProgress` is called with the bytes sent and those of all. */
export class Upload {
    constructor(api, folder, { largest, taken, words }, onProgress) {
        Object.assign(this, { api, folder, largest, taken, words, onProgress })
        this.requests = new Set()
    }

    /**
     * Return {saved, same, exists, refused, failed} when all is sent: numbers of files; names with the file to
     * send it again; [name, reason]; a reason that ended everything.
     */
    async send(files, replace = false) {
        const result = { saved: 0, same: 0, exists: [], refused: [], others: 0, failed: "" }
        const waiting = files.filter((each) => {
            const reason = this.#refusal(each)
            if (reason) result.refused.push([each.path, reason])
            return !reason
        })
        const sent = new Map()
        const total = waiting.reduce((sum, { file }) => sum + file.size, 0)
        const tell = (each, bytes) => {
            sent.set(each, bytes)
            this.onProgress([...sent.values()].reduce((sum, one) => sum + one, 0), total)
        }
        const work = async () => {
            while (waiting.length && !result.failed && !this.cancelled) {
                const each = waiting.shift()
                const answer = await this.#sendOne(each, replace, (bytes) => tell(each, bytes))
                tell(each, each.file.size)
                this.#add(result, each, answer)
            }
        }
        await Promise.all(Array.from({ length: AT_ONCE }, work))
        return result
    }

    cancel() {
        this.cancelled = true
        for (const request of this.requests) request.abort()
    }

    #refusal({ path, file }) {
        const kind = path.match(/\.[^./]+$/)?.[0].toLowerCase() ?? ""
        if (kind !== ".zip" && !this.taken.includes(kind)) return this.words.wrongKind
        if (file.size > this.largest) return this.words.tooLarge(Math.round(this.largest / 2 ** 20))
        return ""
    }

    #sendOne({ path, file }, replace, onBytes) {
        const query = new URLSearchParams({ folder: this.folder, name: readable(path), replace: replace ? "1" : "0" })
        return new Promise((done) => {
            const request = new XMLHttpRequest()
            this.requests.add(request)
            request.open("POST", this.api.apiURL(`/graft/dataset/upload?${query}`))
            request.setRequestHeader("Content-Type", "application/octet-stream")
            request.upload.onprogress = ({ loaded }) => onBytes(loaded)
            request.onloadend = () => {
                this.requests.delete(request)
                let answer
                try {
                    answer = JSON.parse(request.responseText)
                } catch {
                    answer = {}
                }
                done({ status: request.status, ...answer })
            }
            request.send(file)
        })
    }

    #add(result, each, answer) {
        if (this.cancelled) return
        if (answer.status === 200) {
            result.saved += answer.saved.length
            result.same += answer.same.length
            result.others += answer.others.length
            if (answer.exists.length) result.exists.push({ ...each, names: answer.exists })
            result.refused.push(...answer.refused)
        } else if ([400, 413].includes(answer.status)) result.refused.push([each.path, answer.error])
        else result.failed ||= answer.error || this.words.lost
    }
}

/** Return a name without halves of letters, which no address can hold. */
function readable(name) {
    return name.replace(/\p{Surrogate}/gu, "_")
}
