/** The settings of runs in words: of one run all, of several those that differ. */

import { make } from "./dialog.js"
import { short } from "./series.js"

export const settingsStyle = `
details { margin-top: 14px; }
summary { cursor: pointer; }
table { width: 100%; margin-top: 8px; border-collapse: collapse; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--border-color, #4e4e4e); text-align: left;
         overflow-wrap: anywhere; }`

/** Return a table of `all`, the flat settings of each run; `labels` are the runs' names. */
export function settingsTable(words, labels, all) {
    const several = all.length > 1
    const differs = (name) => all.some((each) => JSON.stringify(each[name]) !== JSON.stringify(all[0][name]))
    const names = Object.keys(all[0]).filter((name) => !several || differs(name))
    const cell = (scope, text, title = "") => make("th", { scope, textContent: text, title })
    const rows = names.map((name) => {
        const values = all.map((each) => make("td", { textContent: settingText(each[name] ?? null) }))
        return make("tr", {}, cell("row", settingName(name), name), ...values)
    })
    const head = make("tr", {}, ...[words.setting, ...labels].map((text) => cell("col", text)))
    const summary = make("summary", { textContent: several ? words.differing(names.length) : words.settings })
    return make("details", { open: several }, summary, make("table", {}, head, ...rows))
}

/** Return "rank 4 → 8" for each setting that differs from the run of this name before. */
export function differences(row) {
    return row.differs.map(([name, ...values]) => `${settingName(name)} ${values.map(settingText).join(" \u2192 ")}`)
}

/** Return the name of a setting as people read it. */
export function settingName(name) {
    return name.split(".").at(-1).replaceAll("_", " ")
}

/** Return the value of a setting in few characters. */
export function settingText(value) {
    if (value === "" || value === null) return "\u2013"
    if (typeof value === "number") return short(value)
    return Array.isArray(value) ? value.join(" ") : String(value)
}
