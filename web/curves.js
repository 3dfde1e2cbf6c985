/** The losses of several runs in one chart: each run's running mean, over its steps. */

import { axis, boxOf, drawAxes, line, padded } from "./chart.js"
import { range } from "./series.js"

export const PALETTE = ["#3f9bff", "#ff9a3c", "#58b368", "#c07ce8", "#e5534b", "#d7c14a", "#4ac2c2", "#b0b7c0"]

/**
 * Draw `all`, an array of Series, on a canvas context of `width` x `height` CSS pixels.
 *
 * `view` is {log: logarithmic loss, hover: a step or null, text: color of the axes}.
 */
export function drawCurves(context, width, height, all, view) {
    context.clearRect(0, 0, width, height)
    const shown = all.filter((series) => series.steps.length)
    if (!shown.length) return
    const box = boxOf(width, height)
    const { first, end } = extentOf(shown)
    const x = (step) => box.left + ((step - first) / (end - first)) * box.width
    const ranges = shown.map((series) => range(series.smoothed)).filter(Boolean)
    const limits = [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))]
    const loss = axis(padded(limits, view.log), view.log, box)
    const scales = { first, end, width: box.width, x, loss }
    context.font = "10px sans-serif"
    drawAxes(context, box, scales, view)
    context.save()
    context.beginPath()
    context.rect(box.left, box.top - 2, box.width, box.height + 4)
    context.clip()
    all.forEach((series, i) => line(context, series, series.smoothed, scales, loss.toY, PALETTE[i % PALETTE.length], 2))
    if (view.hover !== null) {
        context.fillStyle = view.text
        context.globalAlpha = 0.5
        context.fillRect(Math.round(x(view.hover)), box.top, 1, box.height)
        context.globalAlpha = 1
    }
    context.restore()
}

/** Return the step at the horizontal position `x` in a chart of this width; null without steps. */
export function stepUnder(x, width, all) {
    const shown = all.filter((series) => series.steps.length)
    if (!shown.length) return null
    const box = boxOf(width, 100)
    const { first, end } = extentOf(shown)
    return Math.min(end, Math.max(first, first + ((x - box.left) / box.width) * (end - first)))
}

function extentOf(shown) {
    const first = Math.min(...shown.map(({ steps }) => steps[0]))
    return { first, end: Math.max(first + 1, ...shown.map(({ steps }) => steps.at(-1))) }
}
