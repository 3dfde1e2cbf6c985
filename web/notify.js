/**
 * When a run has ended: a mark in the title of a tab that is not shown, and a notification, for which the browser
 * asks once, after a click.
 */

const KEY = "graft.notify"
const MARK = "\u2713 "

/** Return whether a notification is wanted and allowed. */
export function isWanted() {
    return globalThis.Notification?.permission === "granted" && localStorage.getItem(KEY) === "1"
}

/** Turn notifications on or off; return whether they are on now. */
export async function toggle() {
    if (isWanted()) localStorage.removeItem(KEY)
    else if ((await globalThis.Notification?.requestPermission()) === "granted") localStorage.setItem(KEY, "1")
    return isWanted()
}

/** Say that a run has ended; several tabs say it once. */
export function notify(title, run, step) {
    if (document.hidden) markTitle()
    if (!isWanted()) return
    const notification = new Notification(title, { body: `${run}, ${step}`, tag: `graft ${run} ${step}` })
    notification.onclick = () => {
        window.focus()
        notification.close()
    }
}

/** Mark the tab's title until the tab is shown; ComfyUI writes the title anew while a graph runs. */
function markTitle() {
    const mark = () => document.title.startsWith(MARK) || (document.title = MARK + document.title)
    const observer = new MutationObserver(mark)
    observer.observe(document.head, { childList: true, characterData: true, subtree: true })
    mark()
    const seen = () => {
        observer.disconnect()
        if (document.title.startsWith(MARK)) document.title = document.title.slice(MARK.length)
    }
    document.addEventListener("visibilitychange", seen, { once: true })
}
