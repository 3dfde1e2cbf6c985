/** A notification of the browser when a run has ended. The browser asks for permission once, after a click. */

const KEY = "graft.notify"

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
    if (!isWanted()) return
    const notification = new Notification(title, { body: `${run}, ${step}`, tag: `graft ${run} ${step}` })
    notification.onclick = () => {
        window.focus()
        notification.close()
    }
}
