/** ComfyUI's PrimeIcons in a shadow root: the page's classes don't reach there, its font does. */

import { make } from "./dialog.js"

const LETTERS = {
    refresh: "\ue938", trash: "\ue93d", play: "\ue9b3", image: "\ue972", images: "\ue973", save: "\ue95b",
    plus: "\ue90d", close: "\ue90b", compare: "\ue98b",
}

export const iconStyle = `
.icon { font: normal 1em/1 primeicons; }
button:has(> .icon) { display: inline-flex; align-items: center; gap: 6px; }`

/** Return a button with an icon and, unless `bare`, its text. */
export function iconButton(name, text, onClick, bare = false) {
    const icon = make("i", { className: "icon", ariaHidden: "true", textContent: LETTERS[name] })
    const button = make("button", { type: "button", title: text, ariaLabel: bare ? text : null }, icon, bare ? "" : text)
    button.addEventListener("click", onClick)
    return button
}

/** Return an icon alone. */
export function icon(name) {
    return make("i", { className: "icon", ariaHidden: "true", textContent: LETTERS[name] })
}
