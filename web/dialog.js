/** A modal dialog over ComfyUI's editor, with its own styles; the editor's keys and drops don't reach it. */

const KEPT = ["keydown", "keyup", "keypress", "copy", "cut", "paste", "wheel", "pointerdown", "contextmenu"]
const DRAGS = ["dragenter", "dragover", "dragleave", "drop"]

/** Of everything in a shadow root of ours. */
export const baseStyle = `
* { box-sizing: border-box; }
[hidden] { display: none !important; }
button, input, textarea { font: inherit; color: inherit; border: 1px solid var(--border-color, #4e4e4e);
                          border-radius: 5px; background: var(--comfy-input-bg, #1c1c1c); }
button { padding: 4px 10px; cursor: pointer; white-space: nowrap; }
button:hover:enabled { border-color: currentColor; }
button:disabled { opacity: 0.5; cursor: default; }
button.main { background: #1668c7; border-color: #1668c7; color: #fff; }
::selection { background: #1668c7; color: #fff; }
:focus-visible { outline: 2px solid #5aa9ff; outline-offset: 1px; }
`

const STYLE = `${baseStyle}
dialog { width: min(1320px, calc(100vw - 48px)); height: calc(100vh - 64px); padding: 0; overflow: hidden;
         border: 1px solid var(--border-color, #4e4e4e); border-radius: 10px;
         background: var(--comfy-menu-bg, #262626); color: var(--input-text, #ddd);
         font: 13px/1.4 system-ui, sans-serif; }
dialog[open] { display: flex; flex-direction: column; }
dialog::backdrop { background: rgb(0 0 0 / 0.6); }
`

/** Return {dialog, root, close}; `style` is added to that of all dialogs. `onClose` is called once. */
export function openDialog(label, style, onClose) {
    const host = document.createElement("div")
    const root = host.attachShadow({ mode: "open" })
    const dialog = make("dialog", { ariaLabel: label })
    root.append(make("style", { textContent: STYLE + style }), dialog)
    for (const type of [...KEPT, ...DRAGS]) host.addEventListener(type, (event) => event.stopPropagation())
    for (const type of DRAGS) host.addEventListener(type, (event) => event.preventDefault())
    dialog.addEventListener("close", () => {
        onClose()
        host.remove()
    })
    document.body.append(host)
    dialog.showModal()
    return { dialog, root, close: () => dialog.close() }
}

/** Return an element with properties and children. */
export function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties)
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""))
    return element
}
